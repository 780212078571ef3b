//! Blocks that neighbours map: no process can resize them or map them writable.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{fs::File, io, os::fd::AsRawFd, os::unix::fs::FileExt, ptr};

use tensorwire_memory::{Block, Pool, PoolConfig};

fn block() -> (Pool, Block) {
    let pool = Pool::new(PoolConfig { block_bytes: 8192, ..PoolConfig::new("blocks") }).unwrap();
    let buffer = pool.try_alloc(100).unwrap();
    let block = buffer.block().unwrap().clone();
    (pool, block)
}

/// The block's memory through a descriptor of its own, as a neighbour gets it.
fn neighbour(block: &Block) -> File {
    File::from(block.fd().unwrap().try_clone_to_owned().unwrap())
}

fn map(file: &File, protection: libc::c_int) -> io::Result<*mut u8> {
    // SAFETY: a fresh mapping at an address of the kernel's choice; the tests leave it to the process's end.
    let base =
        unsafe { libc::mmap(ptr::null_mut(), 8192, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    if base == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(base.cast()) }
}

fn is_refused<T>(result: io::Result<T>) -> bool {
    result.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

#[test]
fn a_block_cannot_be_resized() {
    let (_pool, block) = block();
    let file = neighbour(&block);
    assert_eq!(file.metadata().unwrap().len(), block.length() as u64);
    for length in [0, 4096, 8191, 8193, 1 << 20] {
        assert!(is_refused(file.set_len(length)), "{length}");
    }
    assert_eq!(file.metadata().unwrap().len(), 8192);
}

#[test]
fn a_block_cannot_be_written_or_punched_by_whoever_holds_its_descriptor() {
    let (pool, block) = block();
    let mut buffer = pool.try_alloc(64).unwrap();
    buffer.fill(3);
    let file = neighbour(&block);
    assert!(is_refused(file.write_at(&[9; 64], 0)));
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: no pointers are involved.
    let punched = unsafe { libc::fallocate(file.as_raw_fd(), punch, 0, 4096) };
    assert_eq!(punched, -1);
    assert!(is_refused::<()>(Err(io::Error::last_os_error())));
    assert_eq!(buffer[..], [3; 64]);
}

#[test]
fn a_block_can_be_mapped_for_reading_only() {
    let (pool, block) = block();
    let file = neighbour(&block);
    assert!(is_refused(map(&file, libc::PROT_READ | libc::PROT_WRITE)));
    assert!(is_refused(map(&file, libc::PROT_WRITE)));
    let base = map(&file, libc::PROT_READ).unwrap();
    // SAFETY: the mapping was just made and is not in use.
    let widened = unsafe { libc::mprotect(base.cast(), 8192, libc::PROT_READ | libc::PROT_WRITE) };
    assert_eq!(widened, -1, "a reading mapping became a writing one");

    let mut buffer = pool.try_alloc(64).unwrap();
    let offset = buffer.as_ptr().addr() - block.base().as_ptr().addr();
    buffer.fill(0x5C);
    // SAFETY: `offset` lies inside the 8192 mapped bytes; the buffer's owner is not writing now.
    let seen = unsafe { ptr::read_volatile(base.add(offset + 63)) };
    assert_eq!(seen, 0x5C, "the neighbour sees the same memory");
}

#[test]
fn seals_cannot_be_added_to_or_lifted() {
    let (_pool, block) = block();
    let file = neighbour(&block);
    // SAFETY: no pointers are involved.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    let wanted = libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
    assert_eq!(seals & wanted, wanted);
    // SAFETY: as above.
    let added = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_WRITE) };
    assert_eq!(added, -1, "a neighbour could seal the owner's block");
}

#[test]
fn a_block_stays_mapped_while_anyone_holds_it() {
    let (pool, block) = block();
    let mut buffer = pool.try_alloc(64).unwrap();
    buffer.fill(1);
    let offset = buffer.as_ptr().addr() - block.base().as_ptr().addr();
    drop(buffer);
    drop(pool);
    if cfg!(asan) {
        // The sanitizer forbids even reading free bytes.
        return;
    }
    // SAFETY: `block` keeps the mapping; the pool and its buffers are gone, so nobody writes.
    let seen = unsafe { ptr::read_volatile(block.base().as_ptr().add(offset)) };
    assert_eq!(seen, 1);
}
