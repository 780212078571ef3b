//! Contract to come.
