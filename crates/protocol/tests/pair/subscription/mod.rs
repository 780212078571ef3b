//! Subscriptions: requests that stay open, and have many values.

mod beside;
mod cancel;
mod counted;
mod design;
mod failure;
mod receiver;
mod sender;
