//! From a URL to the store that it names.

use std::{sync::Arc, time::Duration};

use tensorwire_verbs_reactor::Runtime;

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
    tcp::TcpStore,
    url::{Place, StoreUrl, address},
};

impl StoreUrl {
    /// Opens the store, or connects to it. `limit` is that of the store's own constructor: how long an operation takes which has no
    /// limit itself. Each call for `memory:` makes another store.
    ///
    /// # Errors
    /// [`StoreError`] of the store's own constructor; [`StoreError::Unreachable`] where the program was built without the store.
    ///
    /// # Cancel safety
    /// Nothing is connected if dropped.
    pub async fn open(
        &self,
        limit: Duration,
        runtime: Arc<dyn Runtime>,
    ) -> Result<Arc<dyn Store>, StoreError> {
        Ok(match &self.0 {
            Place::Memory => Arc::new(MemoryStore::new(runtime)),
            Place::Tcp { host, port } => {
                Arc::new(TcpStore::connect(&address(host, *port), limit, runtime).await?)
            }
            Place::File(folder) => Arc::new(FileStore::open(folder, limit, runtime)?),
            Place::Redis(..) => self.open_redis(limit, runtime).await?,
            Place::Etcd(_, prefix) if prefix.is_empty() => self.open_etcd(limit, runtime).await?,
            Place::Etcd(_, prefix) => {
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
        let detail = format!("this program is built without the feature `{feature}`: build it with that");
        StoreError::Unreachable { store: format!("the store at {self}"), detail }
    }
}
