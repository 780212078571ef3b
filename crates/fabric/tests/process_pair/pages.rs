//! Memory that two processes share as the pages under a block of each.
//!
//! A pool's memory is sealed against other writers, so neither process can map the other's. Instead both processes
//! replace the pages of a new block by the same pages, of a file in memory without seals.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::fs::FileExt,
    },
};

use tensorwire_memory::Block;

/// Replaces the pages of `block` by pages that another process can map, too. No buffer was allocated from `block` yet.
pub(super) fn share(block: &Block) -> File {
    // SAFETY: the name is a C string constant.
    let descriptor = unsafe { libc::memfd_create(c"tensorwire-shared-block".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(descriptor >= 0, "memfd_create: {}", io::Error::last_os_error());
    // SAFETY: the kernel just handed us this descriptor; nobody else owns it.
    let file = unsafe { File::from_raw_fd(descriptor) };
    // SAFETY: the block is mapped and initialised, and as nobody has a buffer of it yet, nobody writes it.
    let content = unsafe { std::slice::from_raw_parts(block.base().as_ptr(), block.length()) };
    file.write_all_at(content, 0).unwrap();
    put_under(block, &file);
    file
}

/// The pages behind a descriptor of another process.
pub(super) fn of_process(process: u32, descriptor: u32) -> File {
    let path = format!("/proc/{process}/fd/{descriptor}");
    File::options().read(true).write(true).open(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Maps all of `file` at the address of `block`, replacing its own memory.
pub(super) fn put_under(block: &Block, file: &File) {
    assert_eq!(file.metadata().unwrap().len(), block.length() as u64, "the pages do not fit the block");
    let (base, protection) = (block.base().as_ptr(), libc::PROT_READ | libc::PROT_WRITE);
    let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_POPULATE;
    // SAFETY: the range is the block's mapping, all of it, so nothing else is replaced; dropping the block unmaps the
    // present mapping. No reference into it exists, because no buffer was cut from it yet.
    let mapped = unsafe { libc::mmap(base.cast(), block.length(), protection, flags, file.as_raw_fd(), 0) };
    assert_eq!(mapped, base.cast(), "mmap: {}", io::Error::last_os_error());
}
