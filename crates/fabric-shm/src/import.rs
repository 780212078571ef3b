//! Checks and maps the memory that the peer shares.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use tensorwire_fabric::PeerViolation;
use tensorwire_memory::MemoryError;

use crate::{
    limits::CHUNK_BYTES,
    sys::{self, Mapping},
};

/// Why shared memory could not be imported.
#[derive(Debug, thiserror::Error)]
pub(super) enum ImportError {
    /// The memory breaks a rule of the contract.
    #[error(transparent)]
    Refused(#[from] PeerViolation),
    /// A system call failed.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Maps `length` bytes of the peer's memfd read-only. Checks first that it is a memfd of exactly this size, that its
/// seals forbid resizing and punching holes, and that it has no hole. So reading it cannot fault, and needs no memory
/// except page tables.
pub(super) fn map_sealed(fd: BorrowedFd<'_>, length: u64) -> Result<Mapping, ImportError> {
    let length = sealed_length(fd, length)?;
    Ok(Mapping::new(fd, length, false)?)
}

/// Makes the checks of [`map_sealed`].
fn sealed_length(fd: BorrowedFd<'_>, length: u64) -> Result<usize, ImportError> {
    if length == 0 || !sys::is_sealed(fd, length)? {
        return Err(PeerViolation::UnsealedBlock.into());
    }
    Ok(usize::try_from(length).map_err(|_| PeerViolation::Malformed)?)
}

/// The mapping of a block of the peer.
#[derive(Debug)]
enum Place {
    Mapped(Arc<Mapping>),
    /// There was no address space when the block arrived, so it is mapped on first use: this side may never read it,
    /// and can read the peer's other blocks meanwhile.
    Later(OwnedFd, OnceLock<Arc<Mapping>>),
}

impl Place {
    fn of(fd: OwnedFd, length: usize) -> io::Result<Self> {
        match Mapping::new(fd.as_fd(), length, false) {
            Ok(mapping) => Ok(Self::Mapped(Arc::new(mapping))),
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory => Ok(Self::Later(fd, OnceLock::new())),
            Err(error) => Err(error),
        }
    }

    fn now(&self) -> Option<&Arc<Mapping>> {
        match self {
            Self::Mapped(mapping) => Some(mapping),
            Self::Later(_, mapping) => mapping.get(),
        }
    }

    /// Maps the block if it is not mapped. An error names the limit behind it.
    fn mapped(&self, length: usize) -> io::Result<&Arc<Mapping>> {
        match self {
            Self::Mapped(mapping) => Ok(mapping),
            Self::Later(fd, mapping) => match mapping.get() {
                Some(mapping) => Ok(mapping),
                None => {
                    let mapped = Mapping::new(fd.as_fd(), length, false);
                    let mapped = Arc::new(mapped.map_err(|error| named(length, error))?);
                    // Another thread may have mapped it meanwhile.
                    Ok(mapping.get_or_init(|| mapped))
                }
            },
        }
    }
}

fn named(length: usize, error: io::Error) -> io::Error {
    match MemoryError::of_mapping("a block of the peer", length, &error) {
        Some(limit) => io::Error::new(error.kind(), limit),
        None => error,
    }
}

/// One block of the peer. The connection's target half and readers of the catalogue share it.
#[derive(Debug)]
pub(super) struct ImportedBlock {
    place: Place,
    length: usize,
    /// By chunk: whether its pages are known to be in this process's page table.
    populated: Box<[AtomicBool]>,
    /// Number of chunks that are not.
    missing: AtomicUsize,
}

impl ImportedBlock {
    /// Checks the block, and maps it if there is address space.
    pub(super) fn new(fd: OwnedFd, length: u64) -> Result<Self, ImportError> {
        let length = sealed_length(fd.as_fd(), length)?;
        let missing = length.div_ceil(CHUNK_BYTES);
        let populated = (0..missing).map(|_| AtomicBool::new(false)).collect();
        Ok(Self { place: Place::of(fd, length)?, length, populated, missing: AtomicUsize::new(missing) })
    }

    /// Whether `offset..offset + length` lies inside the block.
    pub(super) fn covers(&self, offset: u64, length: u64) -> bool {
        offset.checked_add(length).is_some_and(|end| end <= self.length as u64)
    }

    /// The address of `length` bytes from `offset` on, made resident; `None` if they exceed the block. Only the chunks
    /// of the range are populated, so that a small write out of a huge block stays cheap.
    pub(super) fn resident(&self, offset: u64, length: usize) -> io::Result<Option<*const u8>> {
        if !self.covers(offset, length as u64) {
            return Ok(None);
        }
        let start = offset as usize;
        self.populate(start, length, usize::MAX)?;
        let mapping = self.mapping()?;
        // SAFETY: `covers` has checked the range against the length, which is the mapping's.
        Ok(Some(unsafe { mapping.base().as_ptr().add(start) }))
    }

    /// Makes missing chunks of the range resident, up to `limit` bytes but at least one chunk. Returns how many bytes
    /// that were, and whether the whole range is resident now. Two threads may populate the same chunk, which does no
    /// harm.
    pub(super) fn populate(&self, start: usize, length: usize, limit: usize) -> io::Result<(usize, bool)> {
        let mut bytes = 0;
        if self.missing.load(Ordering::Relaxed) == 0 {
            return Ok((bytes, true));
        }
        let mapping = self.mapping()?;
        let end = start.saturating_add(length).div_ceil(CHUNK_BYTES).min(self.populated.len());
        for index in start / CHUNK_BYTES..end {
            let missing = self.populated.get(index).filter(|done| !done.load(Ordering::Relaxed));
            let Some(done) = missing else { continue };
            if bytes >= limit {
                return Ok((bytes, false));
            }
            mapping.populate(index * CHUNK_BYTES, CHUNK_BYTES)?;
            if !done.swap(true, Ordering::Relaxed) {
                self.missing.fetch_sub(1, Ordering::Relaxed);
            }
            bytes += CHUNK_BYTES;
        }
        Ok((bytes, true))
    }

    /// The mapping, if the whole range lies inside the block and is known to be resident.
    pub(super) fn if_resident(&self, offset: u64, length: usize) -> Option<&Arc<Mapping>> {
        let chunks =
            offset as usize / CHUNK_BYTES..(offset as usize).saturating_add(length).div_ceil(CHUNK_BYTES);
        let all_done = |range: &[AtomicBool]| range.iter().all(|done| done.load(Ordering::Relaxed));
        let is_resident = self.covers(offset, length as u64)
            && (self.missing.load(Ordering::Relaxed) == 0
                || self.populated.get(chunks).is_some_and(all_done));
        self.place.now().filter(|_| is_resident)
    }

    /// The mapping, which is made now if the block was not mapped on arrival.
    pub(super) fn mapping(&self) -> io::Result<&Arc<Mapping>> {
        self.place.mapped(self.length)
    }
}

/// The blocks that a connection's peer has sent, by the peer's own number of the block. Descriptors name a block by its
/// position on the connection; the catalogue, which all connections of the peer share, by this number.
#[derive(Debug, Default)]
pub(super) struct ImportedBlocks(RwLock<BTreeMap<u64, Arc<ImportedBlock>>>);

impl ImportedBlocks {
    pub(super) fn get(&self, number: u64) -> Option<Arc<ImportedBlock>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&number).cloned()
    }

    /// False if the peer has already sent a block of that number.
    pub(super) fn insert(&self, number: u64, block: Arc<ImportedBlock>) -> bool {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(number, block).is_none()
    }

    /// Drops all blocks, because the connection is over.
    pub(super) fn clear(&self) {
        let blocks = std::mem::take(&mut *self.0.write().unwrap_or_else(PoisonError::into_inner));
        drop(blocks);
    }
}
