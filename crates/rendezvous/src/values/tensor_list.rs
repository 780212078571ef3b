//! Several tensors as one content: the arguments and the answer of a call.

use std::iter;

use tensorwire_memory::{Buf, MemoryError, Pool, copy::CopyReason, copy::copy_bytes};
use tensorwire_protocol::{Code, Metadata, Status, TensorList, WireError};

use crate::{
    peer_memory::import::{PIECE_BYTES, yield_once},
    values::{sets::bytes_of, tensor::Tensor},
};

/// The longest gap between long tensors, in bytes.
const GAP_MAX: usize = 64;

/// Tensors that travel together.
#[derive(Debug)]
pub(crate) struct PackedTensors {
    list: TensorList,
    tensors: Vec<Tensor>,
}

impl PackedTensors {
    /// # Errors
    /// INVALID_ARGUMENT if they are too many or have too many bytes.
    pub(crate) fn new(tensors: Vec<Tensor>) -> Result<Self, Status> {
        Ok(Self { list: Self::check(&tensors)?, tensors })
    }

    /// Where the tensors are in their content.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn check(tensors: &[Tensor]) -> Result<TensorList, Status> {
        let list = TensorList::new(tensors.iter().map(|tensor| tensor.metadata().clone()).collect());
        list.map_err(|error| {
            let message =
                format!("these tensors cannot travel together: {error}; use fewer of them at a time");
            Status::new(Code::InvalidArgument, message)
        })
    }

    /// The metadata of the content.
    pub(crate) fn metadata(&self) -> Metadata {
        bytes_of(self.list.byte_length())
    }

    /// The long tensors, each with its place, in the order of their places.
    fn long(&self) -> impl Iterator<Item = (&Tensor, u64)> {
        let (placed, front) = (self.tensors.iter().zip(self.list.tensors()), self.list.front());
        let placed = placed.filter(move |(_, (_, place))| !place.is_empty() && place.start >= front);
        placed.map(|(tensor, (_, place))| (tensor, place.start))
    }

    /// Whether the bytes of every long tensor are in memory for which `is_in_place` holds.
    pub(crate) fn are_long(&self, is_in_place: impl Fn(&Buf) -> bool) -> bool {
        self.long().all(|(tensor, _)| is_in_place(tensor.buf()))
    }

    /// Writes what precedes the long tensors. `into` has only zeros.
    fn write_front(&self, into: &mut [u8]) {
        let head = self.list.head();
        let front = self.list.front();
        let short = self.tensors.iter().zip(self.list.tensors()).filter(|(_, (_, place))| place.end <= front);
        let short = short.map(|(tensor, (_, place))| (tensor.bytes(), place.start));
        for (bytes, place) in iter::once((&head[..], 0)).chain(short) {
            let at = place as usize;
            into.get_mut(at..at + bytes.len()).into_iter().for_each(|into| into.copy_from_slice(bytes));
        }
    }

    /// The content in pieces without gaps, each with its place. The first is in memory of `pool`, when there is room, and the others are long
    /// tensors, and zeros between them.
    pub(crate) async fn pieces(&self, pool: &Pool) -> Result<Vec<(Buf, u64)>, MemoryError> {
        let front = self.list.front() as usize;
        let mut buffer = pool.alloc(front + GAP_MAX).await?;
        buffer.fill(0);
        self.write_front(&mut buffer);
        let buffer = buffer.freeze();
        let part = |range| buffer.slice(range).unwrap_or_else(Buf::empty);
        let (mut pieces, mut end) = (vec![(part(0..front), 0)], front as u64);
        for (tensor, place) in self.long() {
            let gap = place.saturating_sub(end) as usize;
            if gap > 0 {
                pieces.push((part(front..front + gap), end));
            }
            pieces.push((tensor.buf().clone(), place));
            end = place + tensor.bytes().len() as u64;
        }
        Ok(pieces)
    }

    /// A copy of the content, for one that is short.
    pub(crate) fn copied(&self) -> Vec<u8> {
        let mut content = vec![0; self.list.byte_length() as usize];
        self.write_front(&mut content);
        for (tensor, place) in self.long() {
            let (at, bytes) = (place as usize, tensor.bytes());
            content.get_mut(at..at + bytes.len()).into_iter().for_each(|into| into.copy_from_slice(bytes));
        }
        content
    }

    /// A copy of the content in memory of `pool`, when there is room. Other tasks have their turn after every 256 KiB.
    pub(crate) async fn gathered(self, pool: &Pool) -> Result<Tensor, MemoryError> {
        let mut buffer = pool.alloc(self.list.byte_length() as usize).await?;
        let mut end = self.list.front() as usize;
        let front = buffer.get_mut(..end).unwrap_or_default();
        front.fill(0);
        self.write_front(front);
        for (tensor, place) in self.long() {
            let (at, bytes) = (place as usize, tensor.bytes());
            // What the memory had before is no peer's business.
            buffer.get_mut(end..at).unwrap_or_default().fill(0);
            end = at + bytes.len();
            let into = buffer.get_mut(at..end).unwrap_or_default();
            for (into, from) in into.chunks_mut(PIECE_BYTES).zip(bytes.chunks(PIECE_BYTES)) {
                copy_bytes(into, from, CopyReason::Local);
                yield_once().await;
            }
        }
        Ok(Tensor::received(self.metadata(), buffer.freeze(), None))
    }

    /// The tensors that `content` consists of. They share its memory.
    ///
    /// # Errors
    /// What is wrong with a content that a peer has made.
    pub(crate) fn unpacked(content: &Buf) -> Result<Vec<Tensor>, WireError> {
        let list = TensorList::read(content)?;
        let tensors = list.tensors().map(|(metadata, place)| {
            let bytes = content.slice(place.start as usize..place.end as usize);
            Tensor::received(metadata.clone(), bytes.unwrap_or_else(Buf::empty), None)
        });
        Ok(tensors.collect())
    }
}

#[cfg(test)]
mod tests {
    use tensorwire_memory::PoolConfig;
    use tensorwire_protocol::DataType;

    use super::*;

    #[test]
    fn tensors_of_all_kinds_travel_together_and_are_aligned() {
        let pool = Pool::new(PoolConfig { block_bytes: 1 << 16, ..PoolConfig::new("test") }).unwrap();
        let tensors = vec![
            Tensor::from_values(&pool, &[3], &[1u8, 2, 3]).unwrap(),
            Tensor::from_values(&pool, &[2, 250], &[0.5f64; 500]).unwrap(),
            Tensor::from_values(&pool, &[1025], &[7u8; 1025]).unwrap(),
            Tensor::from_values(&pool, &[600], &[3i64; 600]).unwrap(),
            Tensor::dead(DataType::F32, &[7]).unwrap(),
            Tensor::from_values::<f32>(&pool, &[0], &[]).unwrap(),
            Tensor::from_strings(&pool, &[2], &["one", "two"]).unwrap(),
        ];
        let packed = PackedTensors::new(tensors.clone()).unwrap();
        let content = Buf::on_heap(&packed.copied(), CopyReason::Local);
        assert_eq!(content.len() as u64, packed.metadata().byte_length);
        let unpacked = PackedTensors::unpacked(&content).unwrap();
        assert_eq!(unpacked.len(), tensors.len());
        for (after, before) in unpacked.iter().zip(&tensors) {
            assert_eq!((after.metadata(), after.bytes()), (before.metadata(), before.bytes()));
        }
        assert_eq!(unpacked[1].as_slice::<f64>().unwrap(), [0.5; 500]);
        assert_eq!(unpacked[6].strings().unwrap(), ["one", "two"]);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let pieces = runtime.block_on(packed.pieces(&pool)).unwrap();
        assert_eq!(pieces.iter().map(|(piece, _)| &piece[..]).collect::<Vec<_>>().concat(), content[..]);
        let in_place =
            |tensor: &Tensor| pieces.iter().any(|(piece, _)| piece.as_ptr() == tensor.bytes().as_ptr());
        assert!([1, 2, 3].into_iter().all(|long| in_place(&tensors[long])));
        let gathered = runtime.block_on(packed.gathered(&pool)).unwrap();
        assert_eq!(gathered.bytes(), &content[..]);
    }

    #[test]
    fn too_many_tensors_are_refused_with_the_remedy() {
        let error = PackedTensors::new(vec![Tensor::dead(DataType::U8, &[]).unwrap(); 1025]).unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
        assert!(error.message.contains("use fewer of them"), "{error}");
    }
}
