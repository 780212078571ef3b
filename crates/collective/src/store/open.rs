//! Opens the store of a URL.

use std::{sync::Arc, time::Duration};

use tensorwire_fabric::Runtime;
use tensorwire_rendezvous::Worker;

#[cfg(feature = "etcd")]
use super::etcd::EtcdStore;
#[cfg(feature = "redis")]
use super::redis::RedisStore;
#[cfg(not(feature = "etcd"))]
use super::url::ETCD;
#[cfg(not(feature = "redis"))]
use super::url::REDIS;
use super::{
    Store, StoreError,
    file::FileStore,
    memory::MemoryStore,
    prefix::PrefixStore,
    served::WorkerStore,
    url::{Location, StoreUrl, address},
};

impl StoreUrl {
    /// Opens or connects to the store. `limit` is passed to the store's constructor: the time limit of operations without one of
    /// their own. The store runs on the runtime of `worker`. Each call for `memory:` makes a new store.
    ///
    /// For `tcp://HOST:PORT`: if `worker` listens there, it serves the store. Otherwise it connects to the worker that does.
    ///
    /// # Errors
    /// [`StoreError`] of the store's constructor; [`StoreError::Unreachable`] if the program was built without this kind of
    /// store.
    ///
    /// # Cancel safety
    /// If dropped, nothing is connected.
    pub async fn open(&self, limit: Duration, worker: &Worker) -> Result<Arc<dyn Store>, StoreError> {
        let runtime = worker.runtime().clone();
        Ok(match &self.0 {
            Location::Memory => Arc::new(MemoryStore::new(runtime)),
            Location::Tcp { host, port } => {
                let address = address(host, *port);
                if worker.listens_at(&address) {
                    let store = MemoryStore::new(runtime);
                    store.serve(worker)?;
                    Arc::new(store)
                } else {
                    Arc::new(WorkerStore::connect(worker, &address, limit).await?)
                }
            }
            Location::File(folder) => Arc::new(FileStore::open(folder, limit, runtime)?),
            Location::Redis(..) => self.open_redis(limit, runtime).await?,
            Location::Etcd(_, prefix) if prefix.is_empty() => self.open_etcd(limit, runtime).await?,
            Location::Etcd(_, prefix) => {
                Arc::new(PrefixStore::new(self.open_etcd(limit, runtime).await?, prefix))
            }
        })
    }

    #[cfg(feature = "redis")]
    async fn open_redis(
        &self,
        limit: Duration,
        runtime: Arc<dyn Runtime>,
    ) -> Result<Arc<dyn Store>, StoreError> {
        Ok(Arc::new(RedisStore::connect(self, limit, runtime).await?))
    }

    #[cfg(not(feature = "redis"))]
    async fn open_redis(&self, _: Duration, _: Arc<dyn Runtime>) -> Result<Arc<dyn Store>, StoreError> {
        Err(self.not_built(REDIS.0))
    }

    #[cfg(feature = "etcd")]
    async fn open_etcd(
        &self,
        limit: Duration,
        runtime: Arc<dyn Runtime>,
    ) -> Result<Arc<dyn Store>, StoreError> {
        Ok(Arc::new(EtcdStore::connect(self, limit, runtime).await?))
    }

    #[cfg(not(feature = "etcd"))]
    async fn open_etcd(&self, _: Duration, _: Arc<dyn Runtime>) -> Result<Arc<dyn Store>, StoreError> {
        Err(self.not_built(ETCD.0))
    }

    #[cfg(not(all(feature = "redis", feature = "etcd")))]
    fn not_built(&self, feature: &str) -> StoreError {
        let detail =
            format!("this program was built without the feature `{feature}`: enable it and build again");
        StoreError::Unreachable { store: format!("the store at {self}"), detail }
    }
}
