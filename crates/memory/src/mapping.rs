//! Files mapped for reading.

use std::{
    fs::File,
    io,
    os::{fd::AsFd, unix::fs::MetadataExt},
    ptr::NonNull,
    sync::Arc,
};

use crate::{
    ForeignMemory, MemoryError, limits,
    memfd::{Mapped, page_size},
};

/// Others than the owner may write it.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// A file's bytes, mapped for reading and read from disk as they are used.
///
/// The file must stay as it is while the mapping lives. Where someone writes it, readers get a mixture of old and new
/// bytes; where someone truncates it, the kernel ends this process with SIGBUS. That is why only a file that nobody
/// but its owner may write is mapped. Replacing it by renaming another file over it is fine: the mapping keeps the
/// old one.
#[derive(Debug)]
pub struct Mapping {
    /// `None` for an empty file, which can't be mapped.
    mapped: Option<Mapped>,
}

impl Mapping {
    /// Maps all of `file`, which may be closed afterwards.
    ///
    /// # Errors
    /// [`MemoryError::Mapping`] when `file` is no regular file, when others than its owner may write it, or when
    /// the system refuses; [`MemoryError::Limit`] where a limit is the reason.
    pub fn of_file(file: &File) -> Result<Self, MemoryError> {
        let failed = |step| move |source| MemoryError::Mapping { step, source: Arc::new(source) };
        let metadata = file.metadata().map_err(failed("fstat"))?;
        if !metadata.is_file() {
            return Err(failed("looking at the file")(io::Error::other(
                "it is not a regular file; give one",
            )));
        }
        if metadata.mode() & WRITABLE_BY_OTHERS != 0 {
            let why = "others than its owner may write it, and a change would tear what is sent; \
                       take the right away with `chmod go-w`";
            return Err(failed("looking at the file")(io::Error::other(why)));
        }
        let length = usize::try_from(metadata.len()).ok().filter(|length| *length <= isize::MAX as usize);
        let too_long = || io::Error::from_raw_os_error(libc::EFBIG);
        let length = length.ok_or_else(too_long).map_err(failed("looking at the file"))?;
        if length == 0 {
            return Ok(Self { mapped: None });
        }
        Self::map(file, length)
    }

    fn map(file: &File, length: usize) -> Result<Self, MemoryError> {
        let mapped = Mapped::new(file.as_fd(), length, libc::PROT_READ, libc::MAP_PRIVATE, page_size());
        let mapped = mapped.map_err(|source| match limits::behind("mmap", &source, length as u64) {
            Some((limit, value)) => MemoryError::Limit { pool: "a mapped file", bytes: length, limit, value },
            None => MemoryError::Mapping { step: "mmap", source: Arc::new(source) },
        })?;
        // SAFETY: the range is our own mapping; the advice starts reading ahead and changes no byte.
        unsafe { libc::madvise(mapped.base().as_ptr().cast(), length, libc::MADV_WILLNEED) };
        Ok(Self { mapped: Some(mapped) })
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range is mapped and readable while `self` lives, and stays as it is (see the type).
        unsafe { std::slice::from_raw_parts(self.base().as_ptr(), self.length()) }
    }
}

// SAFETY: the mapping is made once, stays until the value is dropped and is never written here. That others leave the
// file as it is, is what the type asks for; it keeps strangers from writing it by the check of its mode.
unsafe impl ForeignMemory for Mapping {
    fn base(&self) -> NonNull<u8> {
        self.mapped.as_ref().map_or(NonNull::dangling(), Mapped::base)
    }

    fn length(&self) -> usize {
        self.mapped.as_ref().map_or(0, Mapped::length)
    }
}
