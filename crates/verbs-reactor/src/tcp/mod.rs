//! One TCP stream per queue pair.
