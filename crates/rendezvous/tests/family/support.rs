//! What every case needs: keys, values, and waits that end.

use std::{future::Future, time::Duration};

use tensorwire_memory::{Pool, PoolConfig};
use tensorwire_protocol::Key;
use tensorwire_rendezvous::{CancellationToken, RecvArgs, SendArgs, Tensor};
use tokio::runtime::{Builder, Runtime};

pub(crate) const CPU: &str = "/job:mnist/replica:1/task:2/CPU:0";
pub(crate) const GPU: &str = "/job:mnist/replica:1/task:2/device:GPU:0";

/// No wait takes longer, unless something hangs.
const LIMIT: Duration = Duration::from_secs(30);

/// The key of `edge` between two CPUs of one task.
pub(crate) fn key(edge: &str) -> Key {
    key_between(CPU, CPU, edge)
}

pub(crate) fn key_between(source: &str, destination: &str, edge: &str) -> Key {
    Key::builder().source(source).incarnation(7890).destination(destination).edge(edge).build().unwrap()
}

pub(crate) fn pool() -> Pool {
    Pool::new(PoolConfig { block_bytes: 4096, ..PoolConfig::new("test") }).unwrap()
}

/// A string, as the cases have it.
pub(crate) fn text(text: &str) -> Tensor {
    Tensor::from_strings(&pool(), &[], &[text]).unwrap()
}

/// The string in a [`text`].
pub(crate) fn read(tensor: &Tensor) -> String {
    String::from_utf8(tensor.strings().unwrap().pop().unwrap().to_vec()).unwrap()
}

pub(crate) fn number(number: u32) -> Tensor {
    Tensor::from_values(&pool(), &[], &[number]).unwrap()
}

pub(crate) fn read_number(tensor: &Tensor) -> u32 {
    tensor.values::<u32>().unwrap()[0]
}

pub(crate) fn plain() -> (SendArgs, RecvArgs) {
    (SendArgs::default(), RecvArgs::default())
}

pub(crate) fn until(token: &CancellationToken) -> RecvArgs {
    RecvArgs { cancellation: Some(token.clone()), ..RecvArgs::default() }
}

/// A runtime of several threads.
pub(crate) fn threads() -> Runtime {
    Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap()
}

/// Blocks this thread, but not for ever.
pub(crate) fn wait<T>(runtime: &Runtime, future: impl Future<Output = T>) -> T {
    #[allow(clippy::disallowed_methods)] // the watchdog of a test that runs on tokio itself
    runtime.block_on(async { tokio::time::timeout(LIMIT, future).await.expect("the test hangs") })
}

/// Runs a case with a watchdog on one thread.
pub(crate) fn run(case: impl Future<Output = ()>) {
    wait(&Builder::new_current_thread().enable_all().build().unwrap(), case);
}

/// Numbers that are the same in every run.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    /// Lets this thread's neighbours run for a while; what a case proves does not depend on how long.
    pub(crate) fn pause(&mut self) {
        std::thread::sleep(Duration::from_micros(100 + self.below(1000)));
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}
