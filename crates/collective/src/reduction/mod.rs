//! How elements of several ranks are combined.
