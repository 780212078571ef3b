//! Limits of the operating system, each lowered in a process of its own: the error names the limit, its value and the
//! remedy; the failed allocation leaves nothing; and the pool works again once there is room.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    env,
    fs::File,
    process::{Command, Output},
    sync::mpsc,
    thread,
    time::Duration,
};

use tensorwire_memory::{Limit, Mapping, MemoryError, Pool, PoolConfig};

const CHILD: &str = "TENSORWIRE_LIMITS_CHILD";
const BLOCK: usize = 1 << 20;

/// Whether this process is the one in which `test` lowers a limit. If not, such a process has run and succeeded.
fn is_child(test: &str) -> bool {
    if env::var_os(CHILD).is_some() {
        return true;
    }
    let (done, answer) = mpsc::channel();
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([&format!("limits::{test}"), "--exact", "--nocapture", "--test-threads=1"]).env(CHILD, "1");
    thread::spawn(move || done.send(command.output()));
    let output: Output = answer.recv_timeout(Duration::from_secs(60)).expect("the child hangs").unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{:?}\n{text}", output.status);
    false
}

#[cfg(target_env = "gnu")]
type Resource = libc::__rlimit_resource_t;
#[cfg(not(target_env = "gnu"))]
type Resource = libc::c_int;

fn set_limit(resource: Resource, soft: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a local variable that the system writes, and then reads.
    unsafe {
        assert_eq!(libc::getrlimit(resource, &raw mut limit), 0);
        limit.rlim_cur = soft.min(limit.rlim_max);
        assert_eq!(libc::setrlimit(resource, &raw const limit), 0);
    }
}

fn pool() -> Pool {
    Pool::new(PoolConfig { block_bytes: BLOCK, ..PoolConfig::new("limited") }).unwrap()
}

/// Checks that the error names `limit`, its value and a remedy, and that nothing is left of the allocation.
fn expect_limit(pool: &Pool, length: usize, expected: Limit, value: u64, remedy: &str) {
    let before = pool.stats();
    let error = pool.try_alloc(length).unwrap_err();
    let MemoryError::Limit { limit, value: told, bytes, .. } = &error else { panic!("{error}") };
    assert_eq!(*limit, expected);
    assert!(*bytes >= length);
    let text = error.to_string();
    assert!(text.contains(remedy) && text.contains("limited"), "{text}");
    assert_eq!(*told, Some(value), "{text}");
    assert!(text.contains(&value.to_string()), "{text}");
    assert_eq!(pool.stats(), before);
}

#[test]
fn d_memory_exhaustion_open_files() {
    if !is_child("d_memory_exhaustion_open_files") {
        return;
    }
    let pool = pool();
    let held = pool.try_alloc(BLOCK).unwrap();
    set_limit(libc::RLIMIT_NOFILE, 64);
    let mut files = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        files.push(file);
    }
    expect_limit(&pool, BLOCK, Limit::OpenFiles, 64, "ulimit -n");
    files.pop();
    let more = pool.try_alloc(BLOCK).unwrap();
    expect_limit(&pool, BLOCK, Limit::OpenFiles, 64, "ulimit -n");
    // Memory that is mapped already needs no file.
    drop(more);
    drop((held, pool.try_alloc(BLOCK).unwrap()));
}

#[test]
fn d_memory_exhaustion_address_space() {
    // The sanitizer may need address space of its own at any moment.
    if cfg!(asan) || !is_child("d_memory_exhaustion_address_space") {
        return;
    }
    let pool = pool();
    let held = pool.try_alloc(BLOCK).unwrap();
    let used = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = used.split_ascii_whitespace().next().unwrap().parse().unwrap();
    let limit = pages * 4096 + (64 << 20);
    set_limit(libc::RLIMIT_AS, limit);
    expect_limit(&pool, 256 << 20, Limit::AddressSpace, limit, "ulimit -v");
    drop((held, pool.try_alloc(8 << 20).unwrap()));
}

#[test]
fn d_memory_exhaustion_file_size_is_an_error_and_no_signal() {
    if !is_child("d_memory_exhaustion_file_size_is_an_error_and_no_signal") {
        return;
    }
    let pool = pool();
    set_limit(libc::RLIMIT_FSIZE, 4096);
    expect_limit(&pool, 1, Limit::FileSize, 4096, "ulimit -f");
    set_limit(libc::RLIMIT_FSIZE, libc::RLIM_INFINITY);
    drop(pool.try_alloc(1).unwrap());
}

#[test]
fn d_memory_exhaustion_more_than_the_system_has() {
    let available = Limit::SystemMemory.value().unwrap();
    let config = PoolConfig { cap_bytes: u64::MAX, block_bytes: BLOCK, ..PoolConfig::new("limited") };
    let pool = Pool::new(config).unwrap();
    // Far more than can become free meanwhile.
    let asked = usize::try_from(available).unwrap() * 64;
    let error = pool.try_alloc(asked).unwrap_err();
    let MemoryError::Limit { limit, value, .. } = &error else { panic!("{error}") };
    assert!(matches!(limit, Limit::SystemMemory | Limit::Cgroup | Limit::FileSize), "{error}");
    assert!(value.is_some_and(|room| room < asked as u64));
    assert_eq!(pool.stats().block_bytes, 0);
    drop(pool.try_alloc(BLOCK).unwrap());
}

#[test]
fn locked_memory_is_named_where_mappings_are_locked() {
    // The sanitizer may map memory of its own at any moment.
    if cfg!(asan) || !is_child("locked_memory_is_named_where_mappings_are_locked") {
        return;
    }
    set_limit(libc::RLIMIT_MEMLOCK, 64 << 10);
    // SAFETY: no pointers are involved.
    let unprivileged = unsafe { libc::setresuid(65534, 65534, 65534) == 0 || libc::geteuid() != 0 };
    // SAFETY: as above.
    let is_locking = unsafe { libc::mlockall(libc::MCL_FUTURE) == 0 };
    if !unprivileged || !is_locking {
        println!("skipped: this system lets nobody lock future mappings");
        return;
    }
    expect_limit(&pool(), BLOCK, Limit::LockedMemory, 64 << 10, "ulimit -l");
}

/// One page more, which the kernel merges with no other; `None` if the process has its maximum number of mappings.
fn one_mapping(number: usize) -> Option<*mut libc::c_void> {
    let protection = if number.is_multiple_of(2) { libc::PROT_READ } else { libc::PROT_NONE };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh mapping at the kernel's choice.
    let place = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) };
    (place != libc::MAP_FAILED).then_some(place)
}

#[test]
fn s5_a_mapped_file_is_replaced_whole_or_not_at_all_where_there_are_too_many_mappings() {
    if !is_child("s5_a_mapped_file_is_replaced_whole_or_not_at_all_where_there_are_too_many_mappings") {
        return;
    }
    // The kernel's default is 65,530; some systems have no bound that a process reaches.
    if Limit::Mappings.value().is_none_or(|most| most > 1 << 20) {
        eprintln!("skipped: vm.max_map_count is too large to be reached");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    let content: Vec<u8> = (0..100_000_u32).map(|index| (index % 251) as u8).collect();
    std::fs::write(&path, &content).unwrap();
    let mapping = Mapping::leased(&File::open(&path).unwrap()).unwrap();
    let mut filling: Vec<_> = (0..).map_while(one_mapping).collect();
    let refused = std::iter::from_fn(|| {
        let refused = mapping.detach().err()?;
        assert!(mapping.bytes() == content, "{refused}");
        // SAFETY: this is one of the mappings above, and nobody reads it.
        assert_eq!(unsafe { libc::munmap(filling.pop()?, 4096) }, 0);
        Some(refused.to_string())
    });
    let refused: Vec<_> = refused.take(100).collect();
    assert!(refused.iter().any(|refused| refused.contains("mremap")), "{refused:?}");
    assert!(refused.len() < 100 && mapping.bytes() == content, "{refused:?}");
}
