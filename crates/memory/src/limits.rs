//! The limits of the operating system on memory, with the remedy for each.

use std::{fmt, fs, io, path::Path};

use rustix::{
    io::Errno,
    process::{Resource, getrlimit},
};

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
    /// Unused memory of this process's control group in bytes.
    Cgroup,
    /// Unused memory of the whole system in bytes.
    SystemMemory,
}

impl Limit {
    /// The limit on open files that the operating system's `error` stands for, if it stands for one.
    pub fn of_files(error: &io::Error) -> Option<Self> {
        match Errno::from_io_error(error)? {
            Errno::MFILE => Some(Self::OpenFiles),
            Errno::NFILE => Some(Self::SystemFiles),
            _ => None,
        }
    }

    /// The limit's value now, in files, mappings or bytes; `None` where there is none or it can't be read.
    pub fn value(self) -> Option<u64> {
        match self {
            Self::OpenFiles => getrlimit(Resource::Nofile).current,
            Self::AddressSpace => getrlimit(Resource::As).current,
            Self::FileSize => getrlimit(Resource::Fsize).current,
            Self::LockedMemory => getrlimit(Resource::Memlock).current,
            Self::SystemFiles => number_in("/proc/sys/fs/file-max"),
            Self::Mappings => number_in("/proc/sys/vm/max_map_count"),
            Self::Cgroup => cgroup::room(Path::new("/")),
            Self::SystemMemory => available_memory(),
        }
    }

    /// How to raise it.
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

/// From this size on, limits are read before a block is allocated. The kernel kills a process that exceeds its control
/// group's limit, instead of refusing the allocation.
const CHECKED_BYTES: u64 = 1 << 20;

/// The limit that a memory file of `bytes` bytes would exceed: the kernel answers some of these with a signal instead of
/// an error.
pub(crate) fn refuses(bytes: u64) -> Option<(Limit, Option<u64>)> {
    first_below(bytes, &[Limit::FileSize]).or_else(|| leaves_no_room(bytes))
}

/// The limit that `bytes` bytes of memory without a file would exceed.
pub(crate) fn leaves_no_room(bytes: u64) -> Option<(Limit, Option<u64>)> {
    let checked: &[Limit] = if bytes < CHECKED_BYTES { &[] } else { &[Limit::Cgroup, Limit::SystemMemory] };
    first_below(bytes, checked)
}

fn first_below(bytes: u64, limits: &[Limit]) -> Option<(Limit, Option<u64>)> {
    let mut values = limits.iter().map(|&limit| (limit, limit.value()));
    values.find(|(_, value)| value.is_some_and(|room| bytes > room))
}

/// The limit behind an error of `step`.
pub(crate) fn behind(step: &str, error: &io::Error, bytes: u64) -> Option<(Limit, Option<u64>)> {
    let limit = match (Errno::from_io_error(error)?, step) {
        (Errno::MFILE, _) => Limit::OpenFiles,
        (Errno::NFILE, _) => Limit::SystemFiles,
        (Errno::FBIG, _) => Limit::FileSize,
        (Errno::AGAIN, "mmap") => Limit::LockedMemory,
        (Errno::NOMEM, "mmap") if Limit::AddressSpace.value().is_some() => Limit::AddressSpace,
        (Errno::NOMEM, "mmap") if available_memory().is_some_and(|room| room > bytes) => Limit::Mappings,
        (Errno::NOMEM | Errno::NOSPC, _) if Limit::Cgroup.value().is_some_and(|room| room < bytes) => {
            Limit::Cgroup
        }
        (Errno::NOMEM | Errno::NOSPC, _) => Limit::SystemMemory,
        _ => return None,
    };
    Some((limit, limit.value()))
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
