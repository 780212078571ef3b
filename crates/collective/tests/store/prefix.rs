//! Prefixes of a store.

use std::sync::Arc;

use tensorwire_collective::store::{MemoryStore, PrefixStore, Store, StoreError};

use super::{SHORT, keys, runtime, value};

#[tokio::test]
async fn prefixes_keep_their_keys_apart_and_nest() {
    let below: Arc<dyn Store> = Arc::new(MemoryStore::new(runtime()));
    let [a, b, empty] = ["a", "b", ""].map(|prefix| PrefixStore::new(Arc::clone(&below), prefix));
    let nested = PrefixStore::new(Arc::new(a.clone()), "b");
    let stores: [(&dyn Store, &str); 5] =
        [(&*below, "k"), (&a, "a/k"), (&b, "b/k"), (&empty, "/k"), (&nested, "a/b/k")];
    for (store, name) in stores {
        store.set("k", name.as_bytes()).await.unwrap();
    }
    for (store, name) in stores {
        assert_eq!(value(store, "k").await.unwrap(), name.as_bytes());
        assert_eq!(value(&*below, name).await.unwrap(), name.as_bytes());
    }
    assert!(a.delete("k").await.unwrap());
    assert_eq!(value(&a, "k").await, None);
    assert_eq!(value(&b, "k").await.unwrap(), b"b/k");
    assert_eq!(value(&nested, "k").await.unwrap(), b"a/b/k");
}

#[tokio::test]
async fn errors_name_keys_as_the_caller_does_and_the_prefix() {
    let below: Arc<dyn Store> = Arc::new(MemoryStore::new(runtime()));
    let nested = PrefixStore::new(Arc::new(PrefixStore::new(below, "a")), "b");
    let error = nested.wait(&keys(["b/x"]), SHORT).await.unwrap_err();
    let text = "after 30ms these keys are missing from `b/` of `a/` of the store in memory: b/x";
    assert_eq!(error.to_string(), text);
    nested.set("x", b"text").await.unwrap();
    let error = nested.add("x", 1).await.unwrap_err();
    assert!(matches!(error, StoreError::NotANumber { key, .. } if key == "x"));
}
