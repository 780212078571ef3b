//! Files mapped for reading.

use std::{
    fs::File,
    io,
    os::{
        fd::AsFd,
        unix::fs::{FileExt, MetadataExt},
    },
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustix::{
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags},
};

use crate::{
    ForeignMemory, Lease, MemoryError, limits,
    owner::{check_certain, check_own_user},
    pages::{Pages, page_size},
};

/// Mode bits that let others than the owner write.
const WRITABLE_BY_OTHERS: u32 = 0o022;
const ROOT: u32 = 0;

/// A file's bytes, mapped for reading and read from disk as they are used.
///
/// The file must not change while the mapping lives. If it is written, readers get a mixture of old and new bytes; if it
/// is truncated, the kernel ends this process with SIGBUS. So a file is mapped only if it belongs to root or to this
/// process's user, and only its owner may write it. Renaming another file over it is fine:
/// the mapping is of the old file.
///
/// [`leased`](Self::leased) also makes the owner wait until the mapping is [`detach`](Self::detach)ed.
#[derive(Debug)]
pub struct Mapping {
    /// `None` for an empty file, which can't be mapped.
    pages: Option<Pages>,
    /// Dropped after the pages.
    lease: Mutex<Option<Lease>>,
}

impl Mapping {
    /// Maps all of `file`, which may be closed afterwards.
    ///
    /// # Errors
    /// [`MemoryError::Mapping`] when `file` is no regular file, when a user other than root and this process's owns it,
    /// when others than its owner may write it, or when the system refuses; [`MemoryError::Limit`] where a limit is the
    /// reason.
    pub fn of_file(file: &File) -> Result<Self, MemoryError> {
        Self::checked(file, |_| Ok(None))
    }

    /// As [`of_file`](Self::of_file), under a read [`Lease`]: a process that wants to change the file waits, and this process gets
    /// SIGIO. Then
    /// [`change_is_awaited`](Self::change_is_awaited), and [`detach`](Self::detach) lets it happen.
    ///
    /// SIGIO ends a process that has no handler for it, so install one before.
    ///
    /// # Errors
    /// Those of [`of_file`](Self::of_file); [`MemoryError::NoLease`] when the system gives no lease: the file is open for
    /// writing, this process is neither its owner nor privileged (CAP_LEASE), or the file system has no leases. Read the
    /// file into memory then.
    pub fn leased(file: &File) -> Result<Self, MemoryError> {
        Self::checked(file, |file| {
            let refused = |source| MemoryError::NoLease { source: Arc::new(source) };
            Lease::take(file).map(Some).map_err(refused)
        })
    }

    fn checked(
        file: &File,
        lease: impl FnOnce(&File) -> Result<Option<Lease>, MemoryError>,
    ) -> Result<Self, MemoryError> {
        let refused = failed("looking at the file");
        let metadata = file.metadata().map_err(failed("fstat"))?;
        if !metadata.is_file() {
            return Err(refused(io::Error::other("it is not a regular file; give one")));
        }
        check_owner(metadata.uid()).map_err(refused)?;
        if metadata.mode() & WRITABLE_BY_OTHERS != 0 {
            let why = "others than its owner may write it, and a change would tear what is sent; \
                       take the right away with `chmod go-w`";
            return Err(refused(io::Error::other(why)));
        }
        let lease = lease(file)?;
        // Under the lease the length does not change.
        let length = file.metadata().map_err(failed("fstat"))?.len();
        let length = usize::try_from(length).ok().filter(|length| *length <= isize::MAX as usize);
        let length = length.ok_or_else(|| refused(Errno::FBIG.into()))?;
        let pages = if length == 0 { None } else { Some(map(file, length)?) };
        Ok(Self { pages, lease: Mutex::new(lease) })
    }

    /// Whether a process waits for the lease, or the lease was revoked.
    pub fn change_is_awaited(&self) -> bool {
        self.lease().as_ref().is_some_and(|lease| !lease.is_undisturbed())
    }

    /// Replaces the file's pages by a copy, all at once: concurrent readers read the same bytes. Returns the lease; the file
    /// cannot change before it is released. Devices that have the old pages registered must register them again before
    /// ([`Joined::register_again`](crate::Joined::register_again)).
    ///
    /// It takes as long as reading the file, and must be done within the time that the kernel grants. Where it takes
    /// longer, the file may change while it is copied. So the copy is the unchanged file only if [`Lease::release`]
    /// succeeds afterwards; otherwise the bytes must not be used.
    ///
    /// # Errors
    /// [`MemoryError::Limit`] where there is no room for the copy; [`MemoryError::Mapping`] when the file can't be read.
    /// The mapping is as before then.
    ///
    /// # Aborts
    /// If the kernel fails to replace the pages, although it has just moved the copy in the same way: it may have unmapped
    /// them already, and readers would read whatever is mapped there next.
    pub fn detach(&self) -> Result<Option<Lease>, MemoryError> {
        let mut held = self.lease();
        if let (Some(pages), Some(lease)) = (&self.pages, &*held) {
            let copy = copy_of(lease.file(), pages.length())?;
            pages.replace(copy).map_err(failed("mremap"))?;
        }
        Ok(held.take())
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range is mapped and readable while `self` lives, and its bytes do not change (see the type).
        unsafe { std::slice::from_raw_parts(self.base().as_ptr(), self.length()) }
    }

    fn lease(&self) -> MutexGuard<'_, Option<Lease>> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// SAFETY: the mapping is made once, stays until the value is dropped and is never written here; `detach` puts pages with
// the same bytes in its place. The type requires that nobody changes the file: the checks of owner and mode prevent
// other users from writing it, and under a lease the kernel makes the owner wait.
unsafe impl ForeignMemory for Mapping {
    fn base(&self) -> NonNull<u8> {
        self.pages.as_ref().map_or(NonNull::dangling(), Pages::base)
    }

    fn length(&self) -> usize {
        self.pages.as_ref().map_or(0, Pages::length)
    }
}

fn failed(step: &'static str) -> impl Fn(io::Error) -> MemoryError + Copy {
    move |source| MemoryError::Mapping { step, source: Arc::new(source) }
}

/// The owner of a file may shorten it at any time, which ends a process that has it mapped.
fn check_owner(owner: u32) -> io::Result<()> {
    let checked = if owner == ROOT { check_certain(owner) } else { check_own_user(owner) };
    checked.map_err(|why| {
        io::Error::other(format!(
            "{why}. Another owner could shorten the file and so end this process; map files of root or of this user only, \
             or read it into memory"
        ))
    })
}

fn map(file: &File, length: usize) -> Result<Pages, MemoryError> {
    let mapped = Pages::new(file.as_fd(), length, ProtFlags::READ, MapFlags::PRIVATE, page_size());
    let mapped = mapped.map_err(|source| {
        MemoryError::of_mapping("a mapped file", length, &source).unwrap_or_else(|| failed("mmap")(source))
    })?;
    // SAFETY: the range is our own mapping; the advice starts reading ahead and changes no byte.
    let _only_advice =
        unsafe { rustix::mm::madvise(mapped.base().as_ptr().cast(), length, Advice::WillNeed) };
    Ok(mapped)
}

/// The first `length` bytes of `file`, in memory of this process.
fn copy_of(file: &File, length: usize) -> Result<Pages, MemoryError> {
    let pool = "a copy of a mapped file";
    if let Some((limit, value)) = limits::leaves_no_room(length as u64) {
        return Err(MemoryError::Limit { pool, bytes: length, limit, value });
    }
    let copy = Pages::anonymous(length).map_err(|source| MemoryError::Block {
        pool,
        bytes: length,
        step: "mmap",
        source: Arc::new(source),
    })?;
    // SAFETY: the range is mapped, zeroed and writable, and no other code has its address.
    let bytes = unsafe { std::slice::from_raw_parts_mut(copy.base().as_ptr(), length) };
    file.read_exact_at(bytes, 0).map_err(failed("reading the file"))?;
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::{ROOT, check_owner};

    #[test]
    fn s5_only_files_of_root_and_of_the_own_user_are_mapped() {
        let own = rustix::process::geteuid().as_raw();
        assert!(check_owner(ROOT).is_ok() && check_owner(own).is_ok());
        let refused = check_owner(own + 1).unwrap_err().to_string();
        let named = [own, own + 1].map(|user| format!("user {user}"));
        assert!(named.iter().all(|user| refused.contains(user)), "{refused}");
    }
}
