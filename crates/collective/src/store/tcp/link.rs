//! The state that a client's futures share with its connection's driver.

use std::{
    net::IpAddr,
    sync::{Mutex, PoisonError},
};

use super::super::StoreError;

/// The state of a client's connection.
#[derive(Debug)]
pub(super) struct Link {
    address: String,
    /// Why there is no connection; `None` while there is one.
    trouble: Mutex<Option<String>>,
    /// The address of this machine on the last connection.
    own_address: Mutex<Option<IpAddr>>,
}

impl Link {
    pub(super) fn new(address: &str) -> Self {
        let trouble = Mutex::new(Some("no store has answered there yet".to_owned()));
        Self { address: address.to_owned(), trouble, own_address: Mutex::default() }
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    pub(super) fn set_own_address(&self, address: IpAddr) {
        *self.own_address.lock().unwrap_or_else(PoisonError::into_inner) = Some(address);
    }

    pub(super) fn own_address(&self) -> Option<IpAddr> {
        *self.own_address.lock().unwrap_or_else(PoisonError::into_inner)
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
