//! Devices for tests.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use tensorwire_fabric::BoxFuture;
use tensorwire_memory::Pool;
use tensorwire_protocol::{Code, Status};
use tensorwire_rendezvous::{AllocatorAttributes, DeviceContext, RecvArgs, SendArgs, Tensor};
use tokio::sync::Semaphore;

use crate::family::support::pool;

/// A context that is only looked at.
#[derive(Debug)]
pub(crate) struct Stream(pub(crate) u32);

impl Stream {
    pub(crate) fn new(number: u32) -> Arc<Self> {
        Arc::new(Self(number))
    }
}

impl DeviceContext for Stream {
    fn to_host(&self, _: Tensor, _: AllocatorAttributes) -> BoxFuture<'_, Result<Tensor, Status>> {
        Box::pin(async { panic!("nothing is on this device") })
    }

    fn to_device(&self, _: Tensor, _: AllocatorAttributes) -> BoxFuture<'_, Result<Tensor, Status>> {
        Box::pin(async { panic!("nothing is on this device") })
    }
}

/// Which way a value was copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    ToHost,
    ToDevice,
}

/// A device in whose memory every byte is xored with a mask: a value that is not copied by it reads wrong.
#[derive(Debug)]
pub(crate) struct Masked {
    mask: u8,
    pool: Pool,
    /// Copies that were asked for.
    begun: AtomicUsize,
    /// The copies made.
    pub(crate) copies: Mutex<Vec<(Way, AllocatorAttributes)>>,
    /// A copy takes one permit.
    pub(crate) permits: Semaphore,
    /// What becomes of copies, if not what should.
    pub(crate) broken: Mutex<Option<Result<Tensor, Status>>>,
}

impl Masked {
    pub(crate) fn new(mask: u8) -> Arc<Self> {
        let (copies, broken) = (Mutex::default(), Mutex::default());
        Arc::new(Self {
            mask,
            pool: pool(),
            begun: AtomicUsize::new(0),
            copies,
            permits: Semaphore::new(1000),
            broken,
        })
    }

    /// One that copies nothing until it gets permits.
    pub(crate) fn stopped(mask: u8) -> Arc<Self> {
        let device = Self::new(mask);
        device.permits.forget_permits(1000);
        device
    }

    /// `bytes` as they lie in its memory.
    pub(crate) fn masked(&self, bytes: &[u8]) -> Vec<u8> {
        bytes.iter().map(|byte| byte ^ self.mask).collect()
    }

    /// The same value in the other memory.
    pub(crate) fn convert(&self, tensor: &Tensor) -> Tensor {
        Tensor::from_bytes(&self.pool, tensor.dtype(), tensor.shape(), &self.masked(tensor.bytes())).unwrap()
    }

    pub(crate) fn break_with(&self, outcome: Result<Tensor, (Code, &str)>) {
        *self.broken.lock().unwrap() = Some(outcome.map_err(|(code, text)| Status::new(code, text)));
    }

    pub(crate) fn copies(&self) -> Vec<(Way, AllocatorAttributes)> {
        self.copies.lock().unwrap().clone()
    }

    pub(crate) fn begun(&self) -> usize {
        self.begun.load(Ordering::Relaxed)
    }

    /// For a sender on this device.
    pub(crate) fn from(self: &Arc<Self>) -> SendArgs {
        SendArgs { device_context: Some(self.clone()), ..SendArgs::default() }
    }

    /// For a receiver on this device.
    pub(crate) fn to(self: &Arc<Self>) -> RecvArgs {
        RecvArgs { device_context: Some(self.clone()), ..RecvArgs::default() }
    }

    async fn copy(
        &self,
        tensor: Tensor,
        way: Way,
        attributes: AllocatorAttributes,
    ) -> Result<Tensor, Status> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.permits.acquire().await.unwrap().forget();
        self.copies.lock().unwrap().push((way, attributes));
        let broken = self.broken.lock().unwrap().clone();
        broken.unwrap_or_else(|| Ok(self.convert(&tensor)))
    }
}

impl DeviceContext for Masked {
    fn to_host(
        &self,
        tensor: Tensor,
        attributes: AllocatorAttributes,
    ) -> BoxFuture<'_, Result<Tensor, Status>> {
        Box::pin(self.copy(tensor, Way::ToHost, attributes))
    }

    fn to_device(
        &self,
        tensor: Tensor,
        attributes: AllocatorAttributes,
    ) -> BoxFuture<'_, Result<Tensor, Status>> {
        Box::pin(self.copy(tensor, Way::ToDevice, attributes))
    }
}
