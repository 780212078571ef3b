//! Stores: what all have in common, and what is special to each.

mod contract;
mod file;
#[cfg(feature = "redis")]
mod hostile;
mod member;
mod prefix;
mod served;
#[cfg(any(feature = "redis", feature = "etcd"))]
pub(crate) mod server;
#[cfg(any(feature = "redis", feature = "etcd"))]
mod services;
mod worker;

use std::{sync::Arc, time::Duration};

use tensorwire_collective::store::Store;
#[cfg(any(feature = "redis", feature = "etcd"))]
use tensorwire_collective::store::{StoreError, StoreUrl};
use tensorwire_fabric::{Runtime, TokioRuntime};

/// Longer than any step takes on a loaded machine.
const LONG: Duration = Duration::from_secs(60);

/// How long to wait for what must not happen.
const SHORT: Duration = Duration::from_millis(30);

fn runtime() -> Arc<dyn Runtime> {
    Arc::new(TokioRuntime::current().unwrap())
}

/// Opens a store of a server.
#[cfg(any(feature = "redis", feature = "etcd"))]
async fn open_url(url: StoreUrl, limit: Duration) -> Result<Arc<dyn Store>, StoreError> {
    let worker = worker::builder().start().await.unwrap();
    url.open(limit, &worker).await
}

fn keys<const N: usize>(names: [&str; N]) -> Vec<String> {
    names.map(str::to_owned).to_vec()
}

async fn value(store: &dyn Store, key: &str) -> Option<Vec<u8>> {
    store.get(&keys([key])).await.unwrap().remove(0)
}

/// Completes when `is_so`. There is no event to wait for.
async fn until(mut is_so: impl FnMut() -> bool) {
    let runtime = runtime();
    let begun = runtime.now();
    while !is_so() {
        assert!(runtime.now() - begun < LONG, "it never was so");
        runtime.sleep(Duration::from_millis(1)).await;
    }
}
