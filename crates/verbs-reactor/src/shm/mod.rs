//! Shared memory between processes of one host and one trust domain (DESIGN §6).
