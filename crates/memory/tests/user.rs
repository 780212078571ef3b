//! Users' own memory: joined, found by its addresses, registered with devices, deregistered at the right moment.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    fs::{self, File, Permissions},
    io::Write,
    os::unix::fs::PermissionsExt,
    ptr::NonNull,
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

use tensorwire_memory::{
    Block, BlockId, BlockVisitor, Buf, BufMut, ForeignMemory, GivenMemory, GrantEnd, Mapping, MemoryError,
    UserMemory, VisitError, copy::CopyReason,
};

fn bytes(length: usize) -> Arc<dyn ForeignMemory> {
    Arc::new((0..length).map(|index| index as u8).collect::<Vec<u8>>())
}

/// A device: the blocks that it has registered, and whether it accepts more.
#[derive(Debug, Default)]
struct Device {
    held: Mutex<Vec<BlockId>>,
    is_full: Mutex<bool>,
}

impl BlockVisitor for Device {
    fn block_added(&self, block: &Block) -> Result<(), VisitError> {
        if *self.is_full.lock().unwrap() {
            return Err(VisitError(Arc::new(std::io::Error::other("no room"))));
        }
        self.held.lock().unwrap().push(block.id());
        Ok(())
    }

    fn block_removed(&self, block: &Block) {
        let mut held = self.held.lock().unwrap();
        let place = held.iter().position(|id| *id == block.id());
        held.remove(place.expect("let go what it did not hold"));
    }
}

impl Device {
    fn held(&self) -> usize {
        self.held.lock().unwrap().len()
    }

    fn set_full(&self, is_full: bool) {
        *self.is_full.lock().unwrap() = is_full;
    }
}

#[test]
fn joined_memory_is_found_by_its_addresses_as_a_whole_or_not_at_all() {
    let memory = UserMemory::new();
    let joined = memory.join(bytes(1000)).unwrap();
    let all = joined.buf().as_ptr_range();
    let found = memory.find(all.clone()).unwrap();
    assert_eq!((found.as_ptr(), found.len()), (all.start, 1000), "the bytes were copied");
    let part = memory.find(joined.buf()[10..20].as_ptr_range()).unwrap();
    assert_eq!((part[0], part.len(), part.offset()), (10, 10, 10));
    assert_eq!(part.block().unwrap().id(), found.block().unwrap().id());
    let outside = [
        all.start.wrapping_sub(1)..all.end,
        all.start..all.end.wrapping_add(1),
        all.end..all.end.wrapping_add(1),
        all.start.wrapping_sub(1)..all.start,
        all.end..all.start,
        std::ptr::null()..all.end,
        all.start..std::ptr::without_provenance(usize::MAX),
    ];
    for range in outside {
        assert!(matches!(memory.find(range.clone()), Err(MemoryError::NotJoined { .. })), "{range:?}");
    }
    assert!(memory.find(all.end..all.end).unwrap().is_empty());
    drop(joined);
    assert!(matches!(memory.find(all), Err(MemoryError::NotJoined { length: 1000 })));
}

#[test]
fn two_neighbours_are_not_one_memory() {
    let memory = UserMemory::new();
    let whole = bytes::Bytes::from(vec![7; 200]);
    let (first, second) = (whole.slice(0..100), whole.slice(100..200));
    let joined = [memory.join(Arc::new(first)).unwrap(), memory.join(Arc::new(second)).unwrap()];
    assert!(memory.find(whole[0..100].as_ptr_range()).is_ok());
    assert!(memory.find(whole[100..200].as_ptr_range()).is_ok());
    assert!(memory.find(whole[50..150].as_ptr_range()).is_err());
    for overlapping in [0..200, 0..1, 99..101, 100..150, 199..200] {
        let again = memory.join(Arc::new(whole.slice(overlapping.clone())));
        assert!(matches!(again, Err(MemoryError::Overlaps { .. })), "{overlapping:?}");
    }
    drop(joined);
    drop(memory.join(Arc::new(whole)).unwrap());
}

#[test]
fn a_joined_block_is_a_users_not_a_pools() {
    let joined = UserMemory::new().join(bytes(100)).unwrap();
    let block = joined.buf().block().unwrap();
    assert!(!block.shareable() && block.fd().is_none() && block.length() == 100);
    assert!(!joined.buf().is_foreign(), "a fabric may send it in place");
    assert!(block.remote_target(0, 1).is_err() && block.exposed(0, 1).is_err());
    let exposure = joined.buf().slice(10..20).unwrap().expose();
    assert_eq!(block.exposed(10, 10).unwrap()[0], 10);
    drop(exposure);
}

#[test]
fn memory_stays_until_the_guard_and_the_last_buffer_are_gone() {
    let (memory, device) = (UserMemory::new(), Arc::new(Device::default()));
    memory.add_visitor(device.clone()).unwrap();
    let owner = bytes(100);
    let joined = memory.join(owner.clone()).unwrap();
    let part = memory.find(joined.buf()[40..50].as_ptr_range()).unwrap();
    assert_eq!((device.held(), Arc::strong_count(&owner)), (1, 2));
    drop(joined);
    assert_eq!((device.held(), part[0]), (1, 40), "a device may be sending it");
    drop(part);
    assert_eq!((device.held(), Arc::strong_count(&owner)), (0, 1));
    // The same bytes can join again.
    drop(memory.join(owner).unwrap());
    assert_eq!(device.held(), 0);
}

#[test]
fn one_memory_can_be_in_several_buffers_and_is_registered_until_each_is_dropped() {
    let (memory, device) = (UserMemory::new(), Arc::new(Device::default()));
    memory.add_visitor(device.clone()).unwrap();
    let shared = bytes::Bytes::from(vec![7; 1000]);
    let joined = memory.join(Arc::new(shared.clone())).unwrap();
    let whole = memory.buffer_of(Arc::new(shared.clone())).unwrap();
    let part = memory.buffer_of(Arc::new(shared.slice(10..20))).unwrap();
    assert_eq!((whole.as_ptr(), part.as_ptr(), part.len()), (shared.as_ptr(), shared[10..].as_ptr(), 10));
    assert_eq!(device.held(), 3);
    drop((whole, joined));
    assert_eq!(device.held(), 1);
    assert!(matches!(memory.find(part.as_ptr_range()), Err(MemoryError::NotJoined { length: 10 })));
    drop(part);
    assert_eq!(device.held(), 0);
    device.set_full(true);
    assert!(matches!(memory.buffer_of(Arc::new(shared.clone())), Err(MemoryError::Register { .. })));
    assert!(memory.buffer_of(Arc::new(shared.slice(0..0))).unwrap().is_empty());
    assert!(shared.is_unique(), "a refused owner is dropped");
}

#[test]
fn a_device_that_comes_later_gets_what_has_joined() {
    let (memory, device) = (UserMemory::new(), Arc::new(Device::default()));
    let joined = [memory.join(bytes(10)).unwrap(), memory.join(bytes(10)).unwrap()];
    memory.add_visitor(device.clone()).unwrap();
    assert_eq!(device.held(), 2);
    drop(joined);
    assert_eq!(device.held(), 0);
}

#[test]
fn a_device_that_goes_lets_go_of_what_has_joined() {
    let (memory, device) = (UserMemory::new(), Arc::new(Device::default()));
    let known: Arc<dyn BlockVisitor> = device.clone();
    memory.add_visitor(known.clone()).unwrap();
    let joined = [memory.join(bytes(10)).unwrap(), memory.join(bytes(10)).unwrap()];
    let left = joined[1].buf().clone();
    let [first, second] = joined;
    drop(second);
    memory.remove_visitor(&known);
    memory.remove_visitor(&known);
    assert_eq!(device.held(), 1, "the one of which a buffer is left");
    drop(left);
    assert_eq!(device.held(), 0);
    let third = memory.join(bytes(10)).unwrap();
    assert_eq!(device.held(), 0);
    drop((first, third));
    assert_eq!(device.held(), 0);
}

#[test]
fn a_refusal_leaves_nothing_half_made() {
    let memory = UserMemory::new();
    let (willing, full) = (Arc::new(Device::default()), Arc::new(Device::default()));
    memory.add_visitor(willing.clone()).unwrap();
    memory.add_visitor(full.clone()).unwrap();
    full.set_full(true);
    let owner = bytes(10);
    assert!(matches!(memory.join(owner.clone()), Err(MemoryError::Register { .. })));
    assert_eq!((willing.held(), full.held(), Arc::strong_count(&owner)), (0, 0, 1));
    full.set_full(false);
    let joined = memory.join(owner).unwrap();
    let late = Arc::new(Device::default());
    late.set_full(true);
    assert!(matches!(memory.add_visitor(late.clone()), Err(MemoryError::Register { .. })));
    drop(joined);
    assert_eq!((willing.held(), full.held(), late.held()), (0, 0, 0));
}

#[test]
fn nothing_can_join() {
    let memory = UserMemory::new();
    let joined = memory.join(bytes(0)).unwrap();
    assert!(joined.buf().is_empty() && joined.buf().block().is_none());
}

/// A file in a directory of its own.
fn file(content: &[u8], mode: u32) -> (tempfile::TempDir, File) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    File::create(&path).unwrap().write_all(content).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    let file = File::open(&path).unwrap();
    (directory, file)
}

#[test]
fn a_mapped_file_is_sent_from_where_it_lies_also_after_it_was_replaced() {
    let content: Vec<u8> = (0..10_000_u32).map(|index| (index % 251) as u8).collect();
    let (directory, file) = file(&content, 0o644);
    let memory = UserMemory::new();
    let joined = memory.join(Arc::new(Mapping::of_file(&file).unwrap())).unwrap();
    drop(file);
    fs::write(directory.path().join("new"), b"another").unwrap();
    fs::rename(directory.path().join("new"), directory.path().join("file")).unwrap();
    assert_eq!(joined.buf()[..], content);
    let part: Buf = memory.find(joined.buf()[5000..5100].as_ptr_range()).unwrap();
    drop(joined);
    assert_eq!(part[..], content[5000..5100]);
}

#[test]
fn an_empty_file_can_be_mapped() {
    let (_directory, file) = file(b"", 0o600);
    let mapping = Mapping::of_file(&file).unwrap();
    assert!(mapping.bytes().is_empty());
    assert!(Buf::foreign(Arc::new(mapping)).is_empty());
}

#[test]
fn a_file_that_strangers_may_change_and_what_is_no_file_are_not_mapped() {
    for mode in [0o666, 0o664, 0o646] {
        let (_directory, file) = file(b"x", mode);
        let error = Mapping::of_file(&file).unwrap_err();
        assert!(error.to_string().contains("chmod go-w"), "{mode:o}: {error}");
    }
    let directory = tempfile::tempdir().unwrap();
    let error = Mapping::of_file(&File::open(directory.path()).unwrap()).unwrap_err();
    assert!(matches!(error, MemoryError::Mapping { .. }), "{error}");
    let error = Mapping::of_file(&File::open("/dev/null").unwrap()).unwrap_err();
    assert!(error.to_string().contains("regular file"), "{error}");
}

/// A file under a lease, and another thread that opens it for writing, shortens it and reports that.
fn leased_and_shortened(content: &[u8]) -> (tempfile::TempDir, Mapping, mpsc::Receiver<()>) {
    // The kernel sends SIGIO when another process waits, which would end this process.
    // SAFETY: ignoring a signal runs no code.
    unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
    let (directory, file) = file(content, 0o644);
    let mapping = Mapping::leased(&file).unwrap();
    assert!(!mapping.change_is_awaited());
    let path = directory.path().join("file");
    let (done, shortened) = mpsc::channel();
    std::thread::spawn(move || {
        File::options().write(true).truncate(true).open(path).unwrap();
        done.send(()).unwrap();
    });
    let is_awaited = (0..60_000).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        mapping.change_is_awaited()
    });
    assert!(is_awaited, "the file was opened for writing, and nobody said so");
    (directory, mapping, shortened)
}

#[test]
fn s5_whoever_shortens_a_leased_file_waits_until_its_bytes_are_copied_to_the_same_addresses() {
    let content: Vec<u8> = (0..1_000_000_u32).map(|index| (index % 251) as u8).collect();
    let (directory, mapping, shortened) = leased_and_shortened(&content);
    let (mapping, memory, device) = (Arc::new(mapping), UserMemory::new(), Arc::new(Device::default()));
    memory.add_visitor(device.clone()).unwrap();
    let joined = memory.join(mapping.clone()).unwrap();
    let lease = mapping.detach().unwrap();
    joined.register_again();
    assert_eq!(device.held(), 1);
    assert!(shortened.try_recv().is_err(), "the lease was let go before its holder said so");
    lease.unwrap().release().unwrap();
    shortened.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!(fs::metadata(directory.path().join("file")).unwrap().len(), 0);
    assert!(joined.buf()[..] == content, "the bytes changed with the file");
    assert!(!mapping.change_is_awaited() && mapping.detach().unwrap().is_none());
}

#[test]
fn a_device_that_refuses_memory_the_second_time_is_left_without_it() {
    let (memory, device) = (UserMemory::new(), Arc::new(Device::default()));
    memory.add_visitor(device.clone()).unwrap();
    let joined = memory.join(bytes(10)).unwrap();
    device.set_full(true);
    joined.register_again();
    assert_eq!(device.held(), 0);
    drop(joined);
    assert_eq!(device.held(), 0);
}

#[test]
fn a_file_that_is_open_for_writing_gets_no_lease() {
    let (directory, file) = file(b"content", 0o644);
    let _writer = File::options().append(true).open(directory.path().join("file")).unwrap();
    let error = Mapping::leased(&file).unwrap_err();
    assert!(matches!(error, MemoryError::NoLease { .. }), "{error}");
}

/// Memory that goes back to its program when nobody uses it any more.
#[derive(Debug)]
struct Returning(Vec<u8>, mpsc::SyncSender<Vec<u8>>);

// SAFETY: the vector's, whose elements do not move with it, and which nobody else has until `drop`.
unsafe impl GivenMemory for Returning {
    fn bytes(&mut self) -> NonNull<[u8]> {
        self.0.bytes()
    }
}

impl Drop for Returning {
    fn drop(&mut self) {
        let _ = self.1.send(std::mem::take(&mut self.0));
    }
}

fn returning(length: usize) -> (Returning, mpsc::Receiver<Vec<u8>>) {
    let (sender, back) = mpsc::sync_channel(1);
    (Returning((0..length).map(|index| index as u8).collect(), sender), back)
}

#[test]
fn given_memory_is_a_buffer_until_its_last_view_is_gone() {
    let (memory, device) = (UserMemory::new(), Arc::new(Device::default()));
    memory.add_visitor(device.clone()).unwrap();
    let (owner, back) = returning(100);
    let address = owner.0.as_ptr();
    let mut given = memory.give(owner).unwrap();
    assert_eq!((given.as_ptr(), given.len(), given[40], device.held()), (address, 100, 40, 1));
    given[40] = 7;
    let shared = given.freeze();
    let part = shared.slice(30..50).unwrap();
    let mut given = shared.try_into_mut().unwrap_err();
    assert!(back.try_recv().is_err());
    drop(part);
    let mut again = given.try_into_mut().unwrap();
    again[41] = 8;
    given = again.freeze();
    assert_eq!(given.block().map(|block| (block.is_writable(), block.shareable())), Some((true, false)));
    drop(given);
    let returned = back.try_recv().unwrap();
    assert_eq!((returned.as_ptr(), &returned[39..43], device.held()), (address, &[39, 7, 8, 42][..], 0));
}

#[test]
fn a_peer_may_write_the_parts_of_given_memory_that_are_granted() {
    let (owner, back) = returning(100);
    let (whole, parts) = UserMemory::new().give(owner).unwrap().divide(&[20, 50]).unwrap();
    let [first, second, third] = <[_; 3]>::try_from(parts).unwrap();
    let block = second.block().unwrap().clone();
    let granted = second.grant();
    let write = |offset, bytes: &[u8]| {
        block.remote_target(offset, bytes.len() as u64)?.write_at(0, bytes, CopyReason::ShmPayload)
    };
    write(20, &[1; 30]).unwrap();
    for (offset, length) in [(19, 2), (49, 2), (0, 1), (50, 1), (99, 2)] {
        assert!(write(offset, &vec![9; length]).is_err(), "{length} bytes at {offset}");
    }
    assert!(granted.end(GrantEnd::Content).unwrap().iter().all(|byte| *byte == 1));
    assert!(write(20, &[2]).is_err());
    drop((first, third, whole, block));
    let returned = back.try_recv().unwrap();
    assert_eq!((returned[19], returned[20], returned[49], returned[50]), (19, 1, 1, 50));
}

#[test]
fn given_memory_that_a_peer_may_still_write_never_goes_back() {
    let (memory, (owner, back)) = (UserMemory::new(), returning(64));
    drop(memory.give(owner).unwrap().grant());
    assert_eq!(back.try_recv(), Err(mpsc::TryRecvError::Empty));
}

#[test]
fn memory_has_one_user() {
    let memory = UserMemory::new();
    let (owner, back) = returning(64);
    let addresses = owner.0.as_ptr_range();
    let given = memory.give(owner).unwrap();
    assert!(
        matches!(memory.find(addresses.clone()), Err(MemoryError::NotJoined { .. })),
        "it may be written"
    );
    drop(given);
    // Its place is free again, for either use.
    let returned: Arc<dyn ForeignMemory> = Arc::new(back.recv().unwrap());
    let joined = memory.join(returned).unwrap();
    assert_eq!(memory.find(addresses).unwrap().len(), 64);
    assert_eq!(memory.hits(), 1);
    drop(joined);
    assert!(memory.give(Vec::<u8>::new()).unwrap().is_empty());
    let numbers = memory.give(vec![1_u32, 2]).unwrap();
    assert_eq!(numbers[..], [1, 2_u32].map(u32::to_ne_bytes).concat());
}

#[test]
fn devices_that_come_go_and_refuse_know_given_memory() {
    let (memory, device) = (UserMemory::new(), Arc::new(Device::default()));
    let given = memory.give(vec![0_u8; 10]).unwrap();
    let known: Arc<dyn BlockVisitor> = device.clone();
    memory.add_visitor(known.clone()).unwrap();
    assert_eq!(device.held(), 1);
    memory.remove_visitor(&known);
    assert_eq!(device.held(), 0);
    device.set_full(true);
    assert!(matches!(memory.add_visitor(known.clone()), Err(MemoryError::Register { .. })));
    drop(given);
    memory.add_visitor(known).unwrap();
    let (owner, back) = returning(64);
    assert!(matches!(memory.give(owner), Err(MemoryError::Register { .. })));
    assert_eq!((device.held(), back.try_recv().unwrap().len()), (0, 64));
}

/// Joins what it gets back at once.
#[derive(Debug)]
struct Rejoining(Vec<u8>, UserMemory, mpsc::SyncSender<bool>);

// SAFETY: as for `Returning`.
unsafe impl GivenMemory for Rejoining {
    fn bytes(&mut self) -> NonNull<[u8]> {
        self.0.bytes()
    }
}

impl Drop for Rejoining {
    fn drop(&mut self) {
        let joined = self.1.join(Arc::new(vec![1_u8; 8]));
        let _ = self.2.send(joined.is_ok());
    }
}

#[test]
fn an_owner_may_use_the_registry_when_its_memory_was_refused() {
    let (memory, device) = (UserMemory::new(), Arc::new(Device::default()));
    memory.add_visitor(device.clone()).unwrap();
    device.set_full(true);
    let (sender, used) = mpsc::sync_channel(1);
    let refused = memory.give(Rejoining(vec![0; 64], memory.clone(), sender));
    assert!(matches!(refused, Err(MemoryError::Register { .. })));
    assert!(!used.try_recv().unwrap(), "the device is full");
}

/// A device that takes the program's last handle on the memory while it registers it.
#[derive(Debug)]
struct Taking(Mutex<Option<BufMut>>);

impl BlockVisitor for Taking {
    fn block_added(&self, _: &Block) -> Result<(), VisitError> {
        drop(self.0.lock().unwrap().take());
        Ok(())
    }

    fn block_removed(&self, _: &Block) {}
}

#[test]
fn an_owner_may_use_the_registry_when_a_device_comes_meanwhile() {
    let memory = UserMemory::new();
    let (sender, used) = mpsc::sync_channel(1);
    let given = memory.give(Rejoining(vec![0; 64], memory.clone(), sender)).unwrap();
    memory.add_visitor(Arc::new(Taking(Mutex::new(Some(given))))).unwrap();
    assert!(used.try_recv().unwrap());
}
