//! A control plane whose names the test resolves.

use std::sync::{Arc, Mutex};

use tensorwire_fabric::{BoxFuture, Runtime};
use tensorwire_fabric_tcp::DataPort;
use tensorwire_rendezvous::control::{
    ControlError, ControlPlane, ControlSession, GrpcConfig, GrpcPlane, Secret,
};
use tokio::sync::watch;

/// What a name resolves to.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    /// `None` if it does not resolve.
    addresses: Arc<Mutex<Option<Vec<String>>>>,
    /// How often it was looked up.
    lookups: Arc<watch::Sender<usize>>,
}

impl Names {
    pub(crate) fn none() -> Self {
        Self { addresses: Arc::default(), lookups: Arc::new(watch::Sender::new(0)) }
    }

    pub(crate) fn of<T: Into<String>>(addresses: impl IntoIterator<Item = T>) -> Self {
        let names = Self::none();
        names.set(addresses);
        names
    }

    pub(crate) fn set<T: Into<String>>(&self, addresses: impl IntoIterator<Item = T>) {
        *self.addresses.lock().unwrap() = Some(addresses.into_iter().map(Into::into).collect());
    }

    /// The name no longer resolves.
    pub(crate) fn fail(&self) {
        *self.addresses.lock().unwrap() = None;
    }

    pub(crate) fn lookups(&self) -> usize {
        *self.lookups.borrow()
    }

    /// Waits until the name was looked up so many times more.
    pub(crate) async fn looked_up(&self, more: usize) {
        let least = self.lookups() + more;
        self.lookups.subscribe().wait_for(|lookups| *lookups >= least).await.unwrap();
    }

    /// A plane that asks these names.
    pub(crate) fn plane(&self, config: GrpcConfig) -> Arc<dyn ControlPlane> {
        Arc::new(Named { plane: GrpcPlane::bind(config).unwrap(), names: self.clone() })
    }
}

#[derive(Debug)]
struct Named {
    plane: GrpcPlane,
    names: Names,
}

impl ControlPlane for Named {
    fn local_address(&self) -> String {
        self.plane.local_address()
    }

    fn dial(&self, address: &str) -> BoxFuture<'static, Result<ControlSession, ControlError>> {
        self.plane.dial(address)
    }

    fn resolve(&self, name: &str) -> BoxFuture<'static, Result<Vec<String>, ControlError>> {
        let answer = self.names.addresses.lock().unwrap().clone();
        self.names.lookups.send_modify(|lookups| *lookups += 1);
        let detail = "the test says so".to_owned();
        let answer = answer.ok_or(ControlError::Unreachable { address: name.to_owned(), detail });
        Box::pin(std::future::ready(answer))
    }

    fn dial_resolved(
        &self,
        address: &str,
        name: &str,
    ) -> BoxFuture<'static, Result<ControlSession, ControlError>> {
        self.plane.dial_resolved(address, name)
    }

    fn accept(&self) -> BoxFuture<'_, Result<ControlSession, ControlError>> {
        self.plane.accept()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.plane.close()
    }

    fn runtime(&self) -> Option<Arc<dyn Runtime>> {
        self.plane.runtime()
    }

    fn data_port(&self) -> Option<DataPort> {
        self.plane.data_port()
    }

    fn ambient_secret(&self, address: &str) -> BoxFuture<'static, Result<Option<Secret>, ControlError>> {
        self.plane.ambient_secret(address)
    }
}
