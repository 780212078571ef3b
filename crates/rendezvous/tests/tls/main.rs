//! Workers over TLS.
