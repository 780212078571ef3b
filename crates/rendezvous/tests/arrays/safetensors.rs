//! Safetensors files as tensors and as versions of a set, and the other way round.

use std::{collections::BTreeMap, collections::HashMap, fs, fs::File, sync::Arc};

use bytes::Bytes;
use proptest::{collection, prelude::*, sample};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use super::{on_each_fabric, problem};
use tensorwire_memory::{Buf, Mapping, Pool, PoolConfig, UserMemory};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{
    Tensor, Worker, WorkerError,
    arrays::{from_safetensors_dtype, safetensors_dtype},
};

/// A tensor of a file: its type, its shape, and a seed of its bytes.
type Content = (DataType, Vec<u64>, u8);

fn content() -> impl Strategy<Value = Content> {
    let dtypes: Vec<_> =
        DataType::ALL.iter().copied().filter(|dtype| safetensors_dtype(*dtype).is_some()).collect();
    (sample::select(dtypes), collection::vec(0u64..5, 0..4), any::<u8>())
}

fn bytes_of((dtype, shape, seed): &Content) -> Vec<u8> {
    let length = shape.iter().product::<u64>() * dtype.bits() / 8;
    (0..length).map(|at| (at as u8).wrapping_mul(31).wrapping_add(*seed)).collect()
}

fn file_of(named: &BTreeMap<String, Content>, metadata: Option<HashMap<String, String>>) -> Vec<u8> {
    let bytes: Vec<_> = named.values().map(bytes_of).collect();
    let views = named.iter().zip(&bytes).map(|((name, (dtype, shape, _)), bytes)| {
        let shape = shape.iter().map(|&length| length as usize).collect();
        (name, TensorView::new(safetensors_dtype(*dtype).unwrap(), shape, bytes).unwrap())
    });
    safetensors::serialize(views, metadata).unwrap()
}

/// `file` in users' memory, `skipped` bytes behind an aligned address.
fn buffer_at(file: &[u8], skipped: usize) -> Buf {
    let aligned = Bytes::from(vec![0; skipped].into_iter().chain(file.iter().copied()).collect::<Vec<u8>>());
    UserMemory::new().buffer_of(Arc::new(aligned.slice(skipped..))).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_file_becomes_tensors_where_it_is_and_is_written_again_bit_for_bit(
        named in collection::btree_map(any::<String>(), content(), 0..6),
        skipped in 0usize..9,
    ) {
        let file = file_of(&named, None);
        let buffer = buffer_at(&file, skipped);
        let addresses = buffer.as_ptr_range();
        let tensors = Tensor::from_safetensors(&buffer).unwrap();
        drop(buffer);
        prop_assert_eq!(tensors.len(), named.len());
        for (name, tensor) in &tensors {
            let content = &named[name];
            prop_assert_eq!((tensor.dtype(), tensor.shape()), (content.0, &content.1[..]));
            prop_assert_eq!(tensor.bytes(), bytes_of(content));
            let bytes = tensor.bytes().as_ptr_range();
            prop_assert!(addresses.start <= bytes.start && bytes.end <= addresses.end, "{} was copied", name);
        }
        let views = tensors.iter().map(|(name, tensor)| (name, tensor.as_safetensors().unwrap()));
        prop_assert_eq!(safetensors::serialize(views, None).unwrap(), file);
    }

    #[test]
    fn bytes_that_are_no_file_are_refused_and_never_end_the_process(
        named in collection::btree_map("[a-c]", content(), 0..3),
        at in any::<sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut file = file_of(&named, None);
        let at = at.index(file.len());
        file[at] = byte;
        let _ = Tensor::from_safetensors(&buffer_at(&file, 0));
        file.truncate(at);
        prop_assert!(problem(Tensor::from_safetensors(&buffer_at(&file, 0))).contains("not a safetensors file"));
    }
}

/// Tensors of many types and shapes.
fn checkpoint() -> Vec<u8> {
    let contents = [
        ("embedding.weight", (DataType::Bf16, vec![300, 64], 1)),
        ("layers.0.weight", (DataType::F32, vec![64, 64], 2)),
        ("layers.0.bias", (DataType::F32, vec![64], 3)),
        ("layers.0.scale", (DataType::F8E4M3, vec![7], 4)),
        ("layers.0.mask", (DataType::Bool, vec![3, 3], 0)),
        ("steps", (DataType::I64, vec![], 6)),
        ("none", (DataType::F16, vec![0, 8], 7)),
    ];
    let named = contents.map(|(name, content)| (name.to_owned(), content)).into_iter().collect();
    file_of(&named, Some(HashMap::from([("format".to_owned(), "pt".to_owned())])))
}

async fn fetched_again(publisher: &Worker, peer: &tensorwire_rendezvous::Peer, file: Buf) -> Vec<u8> {
    let tensors = Tensor::from_safetensors(&file).unwrap();
    publisher.set("model").commit(1, tensors).await.unwrap();
    let snapshot = peer.set("model").fetch().await.unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&file).unwrap();
    safetensors::serialize(snapshot.as_safetensors().unwrap(), metadata.metadata().clone()).unwrap()
}

#[test]
fn a_mapped_file_is_a_version_of_a_set_that_a_peer_writes_again_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    fs::write(&path, checkpoint()).unwrap();
    on_each_fabric(async |two| {
        let mapped = Mapping::of_file(&File::open(&path).unwrap()).unwrap();
        let file = two.server.user_memory().buffer_of(Arc::new(mapped)).unwrap();
        assert!(fetched_again(&two.server, &two.peer, file).await == checkpoint());
        two.end().await;
    });
}

#[test]
fn a_file_of_which_no_tensor_is_aligned_is_a_version_of_a_set_too() {
    on_each_fabric(async |two| {
        let bytes = Bytes::from([&[0][..], &checkpoint()].concat()).slice(1..);
        let file = two.server.user_memory().buffer_of(Arc::new(bytes)).unwrap();
        let steps =
            Tensor::from_safetensors(&file).unwrap().into_iter().find(|(name, _)| name == "steps").unwrap().1;
        assert!(steps.as_slice::<i64>().is_err() && steps.values::<i64>().is_ok());
        assert!(fetched_again(&two.server, &two.peer, file).await == checkpoint());
        two.end().await;
    });
}

#[test]
fn a_tensor_of_another_type_is_refused_by_its_name_its_type_and_the_remedy() {
    let view = TensorView::new(Dtype::F8_E8M0, vec![4], &[1; 4]).unwrap();
    let file = safetensors::serialize([("scales", view)], None).unwrap();
    let refused = problem(Tensor::from_safetensors(&buffer_at(&file, 0)));
    for part in ["scales", "F8_E8M0", "U8", "Tensor::shared"] {
        assert!(refused.contains(part), "{refused}");
    }
}

#[test]
fn each_pair_of_types_has_one_size_and_goes_both_ways() {
    let mut pairs = 0;
    for &dtype in DataType::ALL {
        let Some(file) = safetensors_dtype(dtype) else { continue };
        assert_eq!(file.bitsize() as u64, dtype.bits(), "{dtype}");
        assert_eq!(from_safetensors_dtype(file), Some(dtype));
        pairs += 1;
    }
    assert_eq!(pairs, 16);
    assert_eq!(from_safetensors_dtype(Dtype::F4), None);
}

#[test]
fn what_files_lack_is_refused_and_a_snapshot_names_the_tensor() {
    let pool = Pool::new(PoolConfig { block_bytes: 65_536, ..PoolConfig::new("test") }).unwrap();
    let complex = Tensor::from_values(&pool, &[1], &[[1.0f64, 2.0]]).unwrap();
    assert!(problem(complex.as_safetensors()).contains("no element type c128"));
    let strings = Tensor::from_strings(&pool, &[1], &["a"]).unwrap();
    assert!(problem(strings.as_safetensors()).contains("no element type string"));
    let dead = Tensor::dead(DataType::F32, &[2]).unwrap();
    assert!(problem(dead.as_safetensors()).contains("is_dead()"));
    on_each_fabric(async |two| {
        let complex = Tensor::from_values(two.server.pool(), &[1], &[[1.0f64, 2.0]]).unwrap();
        two.server.set("model").commit(1, [("phases", complex)]).await.unwrap();
        let snapshot = two.peer.set("model").fetch().await.unwrap();
        let refused: Result<Vec<_>, WorkerError> = snapshot.as_safetensors();
        assert!(problem(refused).starts_with("\"phases\": safetensors files have no element type c128"));
        two.end().await;
    });
}
