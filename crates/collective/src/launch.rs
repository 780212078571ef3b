//! Which rank this process is, by the environment that its launcher made.
