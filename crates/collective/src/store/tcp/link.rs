//! The state that a client's futures share with its connection's driver.

use std::sync::{Mutex, PoisonError};

use super::super::StoreError;

/// The state of a client's connection.
#[derive(Debug)]
pub(super) struct Link {
    address: String,
    /// Why there is no connection; `None` while there is one.
    trouble: Mutex<Option<String>>,
}

impl Link {
    pub(super) fn new(address: &str) -> Self {
        let trouble = Mutex::new(Some("no store has answered there yet".to_owned()));
        Self { address: address.to_owned(), trouble }
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    pub(super) fn set_trouble(&self, why: Option<String>) {
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = why;
    }

    pub(super) fn trouble(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn store(&self) -> String {
        format!("the store at {}", self.address)
    }

    pub(super) fn unreachable(&self, detail: String) -> StoreError {
        StoreError::Unreachable { store: self.store(), detail }
    }
}
