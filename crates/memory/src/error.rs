//! The errors of this crate.

use std::{fmt, sync::Arc};

use crate::limits::{self, Limit, Shown};

/// Why memory could not be allocated, granted or taken back.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The pool is at its cap. Async callers of [`Pool::alloc`](crate::Pool::alloc) wait instead.
    #[error(
        "pool `{pool}` has no room for {requested} bytes: {used} of {cap} bytes are in use; \
         free buffers, wait with `alloc`, or raise the pool's cap"
    )]
    Exhausted {
        /// The pool's name.
        pool: &'static str,
        /// Bytes asked for.
        requested: usize,
        /// Bytes in use.
        used: u64,
        /// The cap in bytes.
        cap: u64,
    },
    /// Buffers whose content does not exist yet hold their maximum share of the pool
    /// ([`Pool::try_alloc_early`](crate::Pool::try_alloc_early)). Send the request without a destination instead.
    #[error(
        "pool `{pool}` has no room for {requested} bytes before their content exists: {early} of {share} bytes \
         are taken early; ask for the value without a destination, or raise the pool's cap or early share"
    )]
    EarlyExhausted {
        /// The pool's name.
        pool: &'static str,
        /// Bytes asked for.
        requested: usize,
        /// Bytes taken early.
        early: u64,
        /// Bytes that may be taken early now.
        share: u64,
    },
    /// The request can never be met, however long the caller waits.
    #[error("pool `{pool}` can never serve {requested} bytes: its cap is {cap} bytes; raise the pool's cap")]
    TooLarge {
        /// The pool's name.
        pool: &'static str,
        /// Bytes asked for.
        requested: usize,
        /// The cap in bytes.
        cap: u64,
    },
    /// A limit of the operating system leaves no room for a block.
    #[error("`{pool}` needs {bytes} bytes more, but {limit} is {}: {}", Shown(*value), limit.remedy())]
    Limit {
        /// The pool's name, or the name of another user of memory.
        pool: &'static str,
        /// Bytes asked for.
        bytes: usize,
        /// The limit.
        limit: Limit,
        /// Its value, if it could be read.
        value: Option<u64>,
    },
    /// There are not enough huge pages for a block, and the pool requires them.
    #[error(
        "pool `{pool}` requires huge pages, but got them for {got} of {bytes} bytes: reserve some with \
         `sysctl vm.nr_hugepages`, or make the pool with HugePages::Try"
    )]
    HugePages {
        /// The pool's name.
        pool: &'static str,
        /// Size of the block in bytes.
        bytes: usize,
        /// Bytes that would have been in huge pages.
        got: usize,
    },
    /// A file can't be mapped.
    #[error("cannot map a file: {step} failed: {source}")]
    Mapping {
        /// The call that failed.
        step: &'static str,
        /// The answer.
        source: Arc<std::io::Error>,
    },
    /// The system refuses a lease on a file. The lease would keep the owner from changing the file while it is mapped.
    #[error("cannot take a lease on a file: {source}")]
    NoLease {
        /// The answer.
        source: Arc<std::io::Error>,
    },
    /// Part of this memory has been joined or given already.
    #[error(
        "some of these {length} bytes have been joined or given already: use them there, or drop what has them first"
    )]
    Overlaps {
        /// Length in bytes.
        length: usize,
    },
    /// No single joined memory contains the whole address range.
    #[error("no joined memory covers all of these {length} bytes: join them, or copy them into a pool")]
    NotJoined {
        /// Length in bytes.
        length: usize,
    },
    /// The operating system refused a block.
    #[error("cannot make a block of {bytes} bytes for pool `{pool}`: {step} failed: {source}")]
    Block {
        /// The pool's name.
        pool: &'static str,
        /// Size of the block in bytes.
        bytes: usize,
        /// The call that failed.
        step: &'static str,
        /// The operating system's answer.
        source: Arc<std::io::Error>,
    },
    /// A device refused to register a block.
    #[error("pool `{pool}`: {source}")]
    Register {
        /// The pool's name.
        pool: &'static str,
        /// The device's answer.
        source: VisitError,
    },
    /// A remote access names a range that no grant covers, or that none covers any more.
    #[error("no grant covers bytes {offset}..{} of block {block}", offset.saturating_add(*length))]
    NotGranted {
        /// The block's number.
        block: u64,
        /// First byte.
        offset: u64,
        /// Length in bytes.
        length: u64,
    },
    /// A remote read names a range that no exposure covers, or that none covers any more.
    #[error("no exposure covers bytes {offset}..{} of block {block}", offset.saturating_add(*length))]
    NotExposed {
        /// The block's number.
        block: u64,
        /// First byte.
        offset: u64,
        /// Length in bytes.
        length: u64,
    },
    /// A grant was ended while a fabric was inside it; its memory has been leaked and counted.
    #[error("a grant on block {block} ended while a fabric was writing it; its {length} bytes are leaked")]
    GrantBusy {
        /// The block's number.
        block: u64,
        /// Length in bytes.
        length: u64,
    },
}

impl MemoryError {
    /// [`Limit`](Self::Limit), if one is behind `error`, which `user` got when it mapped `bytes` bytes.
    pub fn of_mapping(user: &'static str, bytes: usize, error: &std::io::Error) -> Option<Self> {
        let (limit, value) = limits::behind("mmap", error, bytes as u64)?;
        Some(Self::Limit { pool: user, bytes, limit, value })
    }

    /// Whether there is no room now, but may be later: [`Exhausted`](Self::Exhausted) or
    /// [`EarlyExhausted`](Self::EarlyExhausted).
    pub fn is_exhausted(&self) -> bool {
        matches!(self, Self::Exhausted { .. } | Self::EarlyExhausted { .. })
    }
}

/// A visitor's refusal, shared so that it can be cloned into every waiter's error.
#[derive(Clone)]
pub struct VisitError(pub Arc<dyn std::error::Error + Send + Sync>);

impl fmt::Debug for VisitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for VisitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for VisitError {}
