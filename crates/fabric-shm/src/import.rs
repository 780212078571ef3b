//! Checks and maps the memory that the peer shares.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    sync::{
        Arc, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use tensorwire_verbs_reactor::PeerViolation;

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
/// seals forbid to resize it and to punch holes into it, and that it has no hole. So reading it cannot fault, and takes
/// no memory but page tables.
pub(super) fn map_sealed(fd: BorrowedFd<'_>, length: u64) -> Result<Mapping, ImportError> {
    Ok(Mapping::new(fd, sealed_length(fd, length)?, false)?)
}

fn sealed_length(fd: BorrowedFd<'_>, length: u64) -> Result<usize, ImportError> {
    if length == 0 || !sys::is_sealed(fd, length)? {
        return Err(PeerViolation::UnsealedBlock.into());
    }
    Ok(usize::try_from(length).map_err(|_| PeerViolation::Malformed)?)
}

/// One block of the peer. The connection's target half and readers of the catalogue share it.
#[derive(Debug)]
pub(super) struct ImportedBlock {
    mapping: OnceLock<Arc<Mapping>>,
    /// The block's file, if there was no address space for the block when it came.
    unmapped: Option<OwnedFd>,
    length: usize,
    /// By chunk: whether its pages are known to be in this process's page table.
    populated: Box<[AtomicBool]>,
    /// How many chunks are not.
    missing: AtomicUsize,
}

impl ImportedBlock {
    /// Maps the block if there is address space for it. Else it is mapped when it is read: a peer also sends blocks that this
    /// process never reads, and a process that can't map such a block must not lose its connection.
    pub(super) fn new(fd: BorrowedFd<'_>, length: u64) -> Result<Self, ImportError> {
        let length = sealed_length(fd, length)?;
        let (mapping, unmapped) = match Mapping::new(fd, length, false) {
            Ok(mapping) => (Arc::new(mapping).into(), None),
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory => {
                (OnceLock::new(), Some(fd.try_clone_to_owned()?))
            }
            Err(error) => return Err(error.into()),
        };
        let missing = length.div_ceil(CHUNK_BYTES);
        let populated = (0..missing).map(|_| AtomicBool::new(false)).collect();
        Ok(Self { mapping, unmapped, length, populated, missing: AtomicUsize::new(missing) })
    }

    /// Whether `offset..offset + length` lies inside the block.
    pub(super) fn covers(&self, offset: u64, length: u64) -> bool {
        offset.checked_add(length).is_some_and(|end| end <= self.length as u64)
    }

    /// The address of `length` bytes from `offset` on, made resident; `None` if they do not lie inside the block. Only
    /// the chunks of the range are populated, so that a small write out of a huge block stays cheap.
    pub(super) fn resident(&self, offset: u64, length: usize) -> io::Result<Option<*const u8>> {
        if !self.covers(offset, length as u64) {
            return Ok(None);
        }
        let start = offset as usize;
        self.populate(start, length, usize::MAX)?;
        // SAFETY: `covers` has checked the range against the mapping.
        Ok(Some(unsafe { self.mapping()?.base().as_ptr().add(start) }))
    }

    /// Makes missing chunks of the range resident, up to `limit` bytes but at least one chunk. Gives how many bytes
    /// that were, and whether the whole range is resident now. Two threads may do the same chunk, which does no harm.
    pub(super) fn populate(&self, start: usize, length: usize, limit: usize) -> io::Result<(usize, bool)> {
        let mut bytes = 0;
        if self.missing.load(Ordering::Relaxed) == 0 {
            return Ok((bytes, true));
        }
        let end = start.saturating_add(length).div_ceil(CHUNK_BYTES).min(self.populated.len());
        for index in start / CHUNK_BYTES..end {
            let missing = self.populated.get(index).filter(|done| !done.load(Ordering::Relaxed));
            let Some(done) = missing else { continue };
            if bytes >= limit {
                return Ok((bytes, false));
            }
            self.mapping()?.populate(index * CHUNK_BYTES, CHUNK_BYTES)?;
            if !done.swap(true, Ordering::Relaxed) {
                self.missing.fetch_sub(1, Ordering::Relaxed);
            }
            bytes += CHUNK_BYTES;
        }
        Ok((bytes, true))
    }

    /// Whether the whole range lies inside the block and is known to be resident.
    pub(super) fn is_resident(&self, offset: u64, length: usize) -> bool {
        let chunks =
            offset as usize / CHUNK_BYTES..(offset as usize).saturating_add(length).div_ceil(CHUNK_BYTES);
        let all_done = |range: &[AtomicBool]| range.iter().all(|done| done.load(Ordering::Relaxed));
        self.covers(offset, length as u64)
            && (self.missing.load(Ordering::Relaxed) == 0 || self.populated.get(chunks).is_some_and(all_done))
    }

    /// The mapping, which is tried again if there was no address space for it before.
    pub(super) fn mapping(&self) -> io::Result<&Arc<Mapping>> {
        if let Some(mapping) = self.mapping.get() {
            return Ok(mapping);
        }
        let file = self.unmapped.as_ref().ok_or(io::ErrorKind::OutOfMemory)?;
        // Two threads may both map it: the second mapping is dropped.
        let mapping = Arc::new(Mapping::new(file.as_fd(), self.length, false)?);
        Ok(self.mapping.get_or_init(|| mapping))
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

    /// False if the peer has sent a block of that number before.
    pub(super) fn insert(&self, number: u64, block: Arc<ImportedBlock>) -> bool {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(number, block).is_none()
    }

    /// Drops all blocks, because the connection is over.
    pub(super) fn clear(&self) {
        let blocks = std::mem::take(&mut *self.0.write().unwrap_or_else(PoisonError::into_inner));
        drop(blocks);
    }
}
