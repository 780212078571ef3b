//! Read leases on files.

use std::{fs::File, io, os::fd::AsRawFd};

/// A read lease on a file (`fcntl(2)`, `F_SETLEASE`), released when this is dropped.
///
/// While it is held, a process that opens the file for writing or changes its length waits, and the kernel sends this
/// process SIGIO. After `/proc/sys/fs/lease-break-time` seconds (45 by default) the kernel revokes the lease; only
/// [`release`](Self::release) shows that.
#[derive(Debug)]
pub struct Lease {
    file: File,
}

impl Lease {
    /// Takes a lease on `file`, which must be open for reading only.
    pub(crate) fn take(file: &File) -> io::Result<Self> {
        let file = file.try_clone()?;
        // SAFETY: no pointers are involved; the descriptor is ours.
        let failed = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) };
        if failed == 0 { Ok(Self { file }) } else { Err(explained(&io::Error::last_os_error())) }
    }

    /// Whether no process waits for the lease.
    pub(crate) fn is_undisturbed(&self) -> bool {
        // SAFETY: no pointers are involved; the descriptor is ours.
        unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_GETLEASE) == libc::F_RDLCK }
    }

    /// Releases the lease. `Ok` means that it was held until now, so the file was not changed meanwhile.
    ///
    /// # Errors
    /// If the kernel has revoked the lease: the file may have changed since.
    pub fn release(self) -> io::Result<()> {
        self.let_go()
    }

    fn let_go(&self) -> io::Result<()> {
        // SAFETY: no pointers are involved; the descriptor is ours.
        let failed = unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
        if failed == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        Err(io::Error::new(error.kind(), format!("the kernel has taken the lease away before: {error}")))
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // A lease that was released or revoked has ended already.
        let _is_gone = self.let_go();
    }
}

fn explained(error: &io::Error) -> io::Error {
    let reason = match error.raw_os_error() {
        Some(libc::EAGAIN) => "it is open for writing",
        Some(libc::EACCES) => "this process is neither its owner nor privileged (CAP_LEASE)",
        Some(libc::EINVAL) => "its file system has no leases",
        _ => "the system refuses",
    };
    io::Error::new(error.kind(), format!("{reason}: {error}"))
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        os::fd::AsRawFd,
    };

    use super::Lease;

    #[test]
    fn s5_a_lease_that_was_taken_away_is_not_released_as_if_it_were_held() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        fs::write(&path, b"content").unwrap();
        let file = File::open(&path).unwrap();
        Lease::take(&file).unwrap().release().unwrap();
        let lease = Lease::take(&file).unwrap();
        // SAFETY: no pointers are involved. Revokes the lease, as the kernel does when the writer has waited long
        // enough.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) }, 0);
        let error = lease.release().unwrap_err().to_string();
        assert!(error.contains("taken the lease away"), "{error}");
    }
}
