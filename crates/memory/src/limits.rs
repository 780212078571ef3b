//! The limits of the operating system that keep memory from being had, and what to do about each.

use std::{fmt, fs, io, path::Path};

mod cgroup;

/// A limit that was reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Limit {
    /// Open files of this process (`RLIMIT_NOFILE`); a block is one.
    OpenFiles,
    /// Open files of the whole system (`fs.file-max`).
    SystemFiles,
    /// Address space of this process in bytes (`RLIMIT_AS`).
    AddressSpace,
    /// Size of a file that this process makes, in bytes (`RLIMIT_FSIZE`); a block is one.
    FileSize,
    /// Bytes that this process may lock (`RLIMIT_MEMLOCK`). Registering memory with a network adapter locks it.
    LockedMemory,
    /// Mappings of this process (`vm.max_map_count`).
    Mappings,
    /// Memory of this process's control group in bytes, as far as it is not in use.
    Cgroup,
    /// Memory of the whole system in bytes, as far as it is not in use.
    SystemMemory,
}

impl Limit {
    /// The limit on open files that `error` of the operating system speaks of, if it does.
    pub fn of_files(error: &io::Error) -> Option<Self> {
        match error.raw_os_error()? {
            libc::EMFILE => Some(Self::OpenFiles),
            libc::ENFILE => Some(Self::SystemFiles),
            _ => None,
        }
    }

    /// The limit's value now, in files, mappings or bytes; `None` where there is none or it can't be read.
    pub fn value(self) -> Option<u64> {
        match self {
            Self::OpenFiles => resource_limit(libc::RLIMIT_NOFILE),
            Self::AddressSpace => resource_limit(libc::RLIMIT_AS),
            Self::FileSize => resource_limit(libc::RLIMIT_FSIZE),
            Self::LockedMemory => resource_limit(libc::RLIMIT_MEMLOCK),
            Self::SystemFiles => number_in("/proc/sys/fs/file-max"),
            Self::Mappings => number_in("/proc/sys/vm/max_map_count"),
            Self::Cgroup => cgroup::room(Path::new("/")),
            Self::SystemMemory => available_memory(),
        }
    }

    /// What raises it.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::OpenFiles => "raise it with `ulimit -n` or LimitNOFILE=, or give the pool larger blocks",
            Self::SystemFiles => "raise it with `sysctl fs.file-max`, or give the pool larger blocks",
            Self::AddressSpace => "raise it with `ulimit -v` or LimitAS=, or lower the pool's cap",
            Self::FileSize => {
                "raise it with `ulimit -f` (which counts in 1024 bytes) or LimitFSIZE=, or give the pool smaller blocks"
            }
            Self::LockedMemory => "raise it with `ulimit -l` (which counts in 1024 bytes) or LimitMEMLOCK=",
            Self::Mappings => "raise it with `sysctl vm.max_map_count`, or give the pool larger blocks",
            Self::Cgroup => {
                "raise the group's memory.max (a container's memory limit), or lower the pool's cap"
            }
            Self::SystemMemory => "free memory, or lower the pool's cap",
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OpenFiles => "the number of open files of this process (RLIMIT_NOFILE)",
            Self::SystemFiles => "the number of open files of this system (fs.file-max)",
            Self::AddressSpace => "the address space of this process in bytes (RLIMIT_AS)",
            Self::FileSize => "the size of a file that this process makes, in bytes (RLIMIT_FSIZE)",
            Self::LockedMemory => "the bytes that this process may lock (RLIMIT_MEMLOCK)",
            Self::Mappings => "the number of mappings of this process (vm.max_map_count)",
            Self::Cgroup => "the memory left to this process's control group, in bytes",
            Self::SystemMemory => "the memory left on this system, in bytes",
        })
    }
}

/// A limit's value in messages.
pub(crate) struct Shown(pub(crate) Option<u64>);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(value) => value.fmt(f),
            None => f.write_str("not known"),
        }
    }
}

/// From this size on a block is worth the reading of a few files before memory is taken for it. The kernel ends
/// a process that goes over its group's limit, where it would refuse a single allocation.
const CHECKED_BYTES: u64 = 1 << 20;

/// The limit that making a file of `bytes` bytes in memory would break: the kernel answers some of these with a
/// signal instead of an error.
pub(crate) fn refuses(bytes: u64) -> Option<(Limit, Option<u64>)> {
    let checked: &[Limit] = match bytes {
        0..CHECKED_BYTES => &[Limit::FileSize],
        _ => &[Limit::FileSize, Limit::Cgroup, Limit::SystemMemory],
    };
    checked
        .iter()
        .map(|&limit| (limit, limit.value()))
        .find(|(_, value)| value.is_some_and(|room| bytes > room))
}

/// The limit behind an error of `step`.
pub(crate) fn behind(step: &str, error: &io::Error, bytes: u64) -> Option<(Limit, Option<u64>)> {
    let limit = match (error.raw_os_error()?, step) {
        (libc::EMFILE, _) => Limit::OpenFiles,
        (libc::ENFILE, _) => Limit::SystemFiles,
        (libc::EFBIG, _) => Limit::FileSize,
        (libc::EAGAIN, "mmap") => Limit::LockedMemory,
        (libc::ENOMEM, "mmap") if Limit::AddressSpace.value().is_some() => Limit::AddressSpace,
        (libc::ENOMEM, "mmap") if available_memory().is_some_and(|room| room > bytes) => Limit::Mappings,
        (libc::ENOMEM | libc::ENOSPC, _) if Limit::Cgroup.value().is_some_and(|room| room < bytes) => {
            Limit::Cgroup
        }
        (libc::ENOMEM | libc::ENOSPC, _) => Limit::SystemMemory,
        _ => return None,
    };
    Some((limit, limit.value()))
}

#[cfg(target_env = "gnu")]
type Resource = libc::__rlimit_resource_t;
#[cfg(not(target_env = "gnu"))]
type Resource = libc::c_int;

/// The soft limit; `None` where it is unlimited.
fn resource_limit(resource: Resource) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid place for the answer.
    let failed = unsafe { libc::getrlimit(resource, &raw mut limit) };
    (failed == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

fn number_in(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn available_memory() -> Option<u64> {
    field_of(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:").map(|kib| kib.saturating_mul(1024))
}

/// The number after `name` in a file of lines `name number …`.
fn field_of(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_ascii_whitespace);
    lines.find_map(|mut words| (words.next() == Some(name)).then(|| words.next()?.parse().ok()).flatten())
}
