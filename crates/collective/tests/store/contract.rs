//! What all stores have in common.

use std::{any::Any, sync::Arc, time::Duration};

use futures::FutureExt;
use tensorwire_collective::store::{
    FileStore, KEY_BYTES_MAX, MemoryLimits, MemoryStore, PrefixStore, Store, StoreError, VALUE_BYTES_MAX,
};

use super::{LONG, SHORT, keys, runtime, value, worker::Serving};
#[cfg(any(feature = "redis", feature = "etcd"))]
use super::{
    open_url,
    server::{Server, Service},
};
use crate::join_all::join_all;

/// A store under test.
struct Subject {
    store: Arc<dyn Store>,
    /// Another client of the same keys.
    other: Arc<dyn Store>,
    /// The bytes of the prefix of each key.
    prefix: usize,
    /// What the stores use.
    _kept: Box<dyn Any + Send>,
}

impl Subject {
    fn new(store: impl Store, other: impl Store, prefix: usize, kept: impl Any + Send) -> Self {
        Self { store: Arc::new(store), other: Arc::new(other), prefix, _kept: Box::new(kept) }
    }
}

/// A server for each test. `None` if it is not installed.
#[cfg(any(feature = "redis", feature = "etcd"))]
async fn service(service: Service) -> Option<Subject> {
    let server = Server::start(service)?;
    let open = async || open_url(server.url(), LONG).await.unwrap();
    let (store, other) = (open().await, open().await);
    Some(Subject { store, other, prefix: 0, _kept: Box::new(server) })
}

#[cfg(feature = "redis")]
async fn redis() -> Option<Subject> {
    service(Service::Redis).await
}

#[cfg(feature = "etcd")]
async fn etcd() -> Option<Subject> {
    service(Service::Etcd).await
}

async fn memory() -> Subject {
    let store = MemoryStore::new(runtime());
    Subject::new(store.clone(), store, 0, ())
}

async fn clients_of_a_worker() -> Subject {
    let serving = Serving::start(MemoryLimits::default()).await;
    Subject::new(serving.connect().await, serving.connect().await, 0, serving)
}

async fn served_by_a_worker() -> Subject {
    let serving = Serving::start(MemoryLimits::default()).await;
    Subject::new(serving.store.clone(), serving.connect().await, 0, serving)
}

async fn files() -> Subject {
    let folder = tempfile::tempdir().unwrap();
    let open = || FileStore::open(folder.path(), LONG, runtime()).unwrap();
    Subject::new(open(), open(), 0, folder)
}

async fn prefix_of_memory() -> Subject {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new(runtime()));
    let prefixed = PrefixStore::new(store, "group");
    Subject::new(prefixed.clone(), prefixed, 6, ())
}

async fn prefix_of_prefix_of_clients() -> Subject {
    let Subject { store, other, _kept, .. } = clients_of_a_worker().await;
    let nested = |store| PrefixStore::new(Arc::new(PrefixStore::new(store, "group")), "1");
    Subject::new(nested(store), nested(other), 8, _kept)
}

macro_rules! over {
    ($stores:tt $tests:tt) => { over!(@each $stores $tests); };
    (@each [$($store:ident)*] $tests:tt) => {
        $(over!(@one $store $tests);)*
        // Of installed services.
        #[cfg(feature = "redis")]
        over!(@one redis $tests);
        #[cfg(feature = "etcd")]
        over!(@one etcd $tests);
    };
    (@one $store:ident [$($test:ident)*]) => {
        mod $store {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                if let Some(subject) = Option::<super::Subject>::from(super::$store().await) {
                    super::$test(subject).await;
                }
            })*
        }
    };
}

over! {
    [memory clients_of_a_worker served_by_a_worker files prefix_of_memory prefix_of_prefix_of_clients]
    [
        a_value_is_set_and_replaced_and_read_everywhere
        several_keys_are_read_together
        a_wait_ends_with_the_value_that_is_set_later
        a_wait_for_several_ends_with_the_last
        a_wait_names_exactly_what_is_missing
        a_wait_for_what_is_there_needs_no_time
        numbers_add_up_from_all_sides
        what_is_no_number_is_not_added_to
        a_value_is_compared_before_it_is_set
        one_of_many_wins
        a_deleted_key_is_gone
        keys_are_any_text
        keys_and_values_have_limits
        a_dropped_wait_leaves_nothing_behind
        many_keys_and_large_values_come_in_order
    ]
}

async fn a_value_is_set_and_replaced_and_read_everywhere(subject: Subject) {
    let Subject { store, other, .. } = &subject;
    assert_eq!(value(&**store, "a").await, None);
    store.set("a", b"1").await.unwrap();
    assert_eq!(value(&**other, "a").await.unwrap(), b"1");
    other.set("a", b"two").await.unwrap();
    assert_eq!(value(&**store, "a").await.unwrap(), b"two");
    assert_eq!(value(&**other, "a").await.unwrap(), b"two");
}

async fn several_keys_are_read_together(subject: Subject) {
    let Subject { store, other, .. } = &subject;
    assert!(store.get(&[]).await.unwrap().is_empty());
    store.set("a", b"1").await.unwrap();
    other.set("b", b"2").await.unwrap();
    let found = store.get(&keys(["b", "missing", "a", "b"])).await.unwrap();
    let expected = [Some(b"2"), None, Some(b"1"), Some(b"2")];
    assert_eq!(found, expected.map(|value| value.map(|value| value.to_vec())));
}

async fn a_wait_ends_with_the_value_that_is_set_later(subject: Subject) {
    let Subject { store, other, .. } = &subject;
    let names = keys(["late"]);
    let mut wait = store.wait(&names, LONG);
    assert!((&mut wait).now_or_never().is_none());
    let (waited, set) = tokio::join!(wait, other.set("late", b"value"));
    set.unwrap();
    assert_eq!(waited.unwrap(), [b"value"]);
}

async fn a_wait_for_several_ends_with_the_last(subject: Subject) {
    let Subject { store, other, .. } = &subject;
    let names = keys(["a", "b", "c", "a"]);
    let set = async {
        for name in ["c", "a", "b"] {
            other.set(name, name.as_bytes()).await.unwrap();
        }
    };
    let (first, second, ()) = tokio::join!(store.wait(&names, LONG), other.wait(&names, LONG), set);
    assert_eq!(first.unwrap(), [b"a", b"b", b"c", b"a"]);
    assert_eq!(second.unwrap(), [b"a", b"b", b"c", b"a"]);
    assert!(store.wait(&[], SHORT).await.unwrap().is_empty());
}

async fn a_wait_names_exactly_what_is_missing(subject: Subject) {
    let store = &subject.store;
    for there in ["a", "c"] {
        store.set(there, b"").await.unwrap();
    }
    for limit in [SHORT, Duration::ZERO] {
        let error = store.wait(&keys(["a", "b", "c", "d/e"]), limit).await.unwrap_err();
        let StoreError::TimedOut { limit: named, missing, .. } = &error else { panic!("{error}") };
        assert_eq!((*named, missing), (limit, &keys(["b", "d/e"])));
    }
}

async fn a_wait_for_what_is_there_needs_no_time(subject: Subject) {
    subject.store.set("a", b"1").await.unwrap();
    assert_eq!(subject.other.wait(&keys(["a"]), Duration::ZERO).await.unwrap(), [b"1"]);
    assert_eq!(subject.other.wait(&keys(["a"]), Duration::MAX).await.unwrap(), [b"1"]);
}

async fn numbers_add_up_from_all_sides(subject: Subject) {
    let Subject { store, other, .. } = &subject;
    assert_eq!(store.add("n", 5).await.unwrap(), 5);
    assert_eq!(other.add("n", -7).await.unwrap(), -2);
    assert_eq!(value(&**store, "n").await.unwrap(), b"-2");
    assert_eq!(store.add("n", 0).await.unwrap(), -2);
    let adders = (0..8).map(|at| {
        let store = Arc::clone(if at % 2 == 0 { store } else { other });
        async move {
            let mut seen = Vec::new();
            for _ in 0..10 {
                seen.push(store.add("many", 1).await.unwrap());
            }
            seen
        }
    });
    let mut seen = join_all(adders).await.concat();
    seen.sort_unstable();
    assert_eq!(seen, (1..=80).collect::<Vec<_>>(), "each sum was returned once");
}

async fn what_is_no_number_is_not_added_to(subject: Subject) {
    let store = &subject.store;
    for text in ["", "x", "+1", "1 "] {
        store.set("text", text.as_bytes()).await.unwrap();
        let error = store.add("text", 1).await.unwrap_err();
        assert!(matches!(&error, StoreError::NotANumber { key, .. } if key == "text"), "{error}");
        assert_eq!(value(&**store, "text").await.unwrap(), text.as_bytes());
    }
    assert_eq!(store.add("large", i64::MAX).await.unwrap(), i64::MAX);
    let error = store.add("large", 1).await.unwrap_err();
    assert!(matches!(&error, StoreError::Overflow { key, delta: 1, .. } if key == "large"), "{error}");
    assert_eq!(store.add("large", -1).await.unwrap(), i64::MAX - 1);
}

async fn a_value_is_compared_before_it_is_set(subject: Subject) {
    let Subject { store, other, .. } = &subject;
    assert_eq!(store.compare_set("a", Some(b"1"), b"2").await.unwrap(), None);
    assert_eq!(value(&**other, "a").await, None);
    assert_eq!(store.compare_set("a", None, b"1").await.unwrap().unwrap(), b"1");
    assert_eq!(other.compare_set("a", None, b"2").await.unwrap().unwrap(), b"1");
    assert_eq!(other.compare_set("a", Some(b"2"), b"3").await.unwrap().unwrap(), b"1");
    assert_eq!(other.compare_set("a", Some(b"1"), b"3").await.unwrap().unwrap(), b"3");
    assert_eq!(value(&**store, "a").await.unwrap(), b"3");
    // An empty value is a value.
    assert_eq!(store.compare_set("empty", Some(b""), b"1").await.unwrap(), None);
    assert_eq!(store.compare_set("empty", None, b"").await.unwrap().unwrap(), b"");
    assert_eq!(store.compare_set("empty", Some(b""), b"1").await.unwrap().unwrap(), b"1");
}

async fn one_of_many_wins(subject: Subject) {
    let Subject { store, other, .. } = &subject;
    let racers = (0..8u8).map(|at| {
        let store = if at % 2 == 0 { store } else { other };
        async move { store.compare_set("winner", None, &[at]).await.unwrap().unwrap() }
    });
    let there = join_all(racers).await;
    let winners = (0..8u8).zip(&there).filter(|(at, there)| [*at] == there[..]);
    assert_eq!(winners.count(), 1);
    assert!(there.iter().all(|value| *value == there[0]));
}

async fn a_deleted_key_is_gone(subject: Subject) {
    let Subject { store, other, .. } = &subject;
    assert!(!store.delete("a").await.unwrap());
    store.set("a", b"1").await.unwrap();
    assert!(other.delete("a").await.unwrap());
    assert_eq!(value(&**store, "a").await, None);
    assert!(!store.delete("a").await.unwrap());
    assert_eq!(store.compare_set("a", None, b"2").await.unwrap().unwrap(), b"2");
    assert_eq!(store.add("n", 3).await.unwrap(), 3);
    assert!(store.delete("n").await.unwrap());
    assert_eq!(store.add("n", 3).await.unwrap(), 3);
}

async fn keys_are_any_text(subject: Subject) {
    let Subject { store, other, prefix, .. } = &subject;
    let longest = KEY_BYTES_MAX - prefix;
    let mut names: Vec<String> = keys([
        "a", "A", "a/b", "a/", "/a", "/", "//", "a b", " ", ".", "..", "../a", "a..", ".a", ".lock-a", "%2f",
        "%", "a%2fb", "ä", "日本", "🦀", "\0", "a\0", "\n", "\\", "*", "con", "~", "a.b", "-", "_", "a:b",
        "'", "\"",
    ]);
    names.extend([
        "k".repeat(longest),
        format!("{}l", "k".repeat(longest - 1)),
        "K".repeat(longest),
        "/".repeat(longest),
        "é".repeat(longest / 2),
        "k".repeat(200),
        "k".repeat(255),
        "k".repeat(256),
    ]);
    for name in &names {
        store.set(name, name.as_bytes()).await.unwrap();
    }
    let found = other.get(&names).await.unwrap();
    for (name, value) in names.iter().zip(found) {
        assert_eq!(value.as_deref(), Some(name.as_bytes()), "{name:?}");
    }
    assert_eq!(other.wait(&names, LONG).await.unwrap().len(), names.len());
    for name in &names {
        assert!(other.delete(name).await.unwrap(), "{name:?}");
    }
}

async fn keys_and_values_have_limits(subject: Subject) {
    let Subject { store, other, prefix, .. } = &subject;
    for (name, bytes) in [(String::new(), 0), ("k".repeat(KEY_BYTES_MAX + 1), KEY_BYTES_MAX + 1)] {
        let named = [name.clone()];
        let errors = [
            store.set(&name, b"").await.unwrap_err(),
            store.get(&named).await.unwrap_err(),
            store.wait(&named, LONG).await.unwrap_err(),
            store.add(&name, 1).await.unwrap_err(),
            store.compare_set(&name, None, b"").await.unwrap_err(),
            store.delete(&name).await.unwrap_err(),
        ];
        for error in errors {
            assert!(
                matches!(error, StoreError::Invalid { field: "key", bytes: named, .. } if named == bytes),
                "{error}"
            );
        }
    }
    let beyond = "k".repeat(KEY_BYTES_MAX + 1 - prefix);
    assert!(matches!(store.set(&beyond, b"").await, Err(StoreError::Invalid { field: "key", .. })));

    let (longest, beyond) = (vec![7; VALUE_BYTES_MAX], vec![7; VALUE_BYTES_MAX + 1]);
    store.set("empty", b"").await.unwrap();
    store.set("long", &longest).await.unwrap();
    assert_eq!(other.wait(&keys(["empty", "long"]), LONG).await.unwrap(), [vec![], longest.clone()]);
    assert!(other.compare_set("long", Some(&longest), &longest).await.unwrap().unwrap() == longest);
    let errors = [
        store.set("long", &beyond).await.unwrap_err(),
        store.compare_set("long", None, &beyond).await.unwrap_err(),
        store.compare_set("long", Some(&beyond), b"").await.unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error, StoreError::Invalid { field: "value", .. }), "{error}");
    }
}

async fn a_dropped_wait_leaves_nothing_behind(subject: Subject) {
    let Subject { store, other, .. } = &subject;
    let names = keys(["never", "later"]);
    for _ in 0..100 {
        assert!(store.wait(&names, LONG).now_or_never().is_none());
    }
    drop(store.wait(&names, LONG));
    // The store answers as before, and a wait for the same keys completes.
    other.set("later", b"1").await.unwrap();
    let (waited, set) = tokio::join!(store.wait(&names, LONG), other.set("never", b"2"));
    set.unwrap();
    assert_eq!(waited.unwrap(), [b"2", b"1"]);
}

async fn many_keys_and_large_values_come_in_order(subject: Subject) {
    let Subject { store, other, .. } = &subject;
    // More than fit into one answer.
    let large: Vec<String> = (0..6).map(|at| format!("large/{at}")).collect();
    for (at, name) in (0..).zip(&large) {
        store.set(name, &vec![at; VALUE_BYTES_MAX]).await.unwrap();
    }
    let values = other.wait(&large, LONG).await.unwrap();
    assert!((0..).zip(&values).all(|(at, value)| *value == vec![at; VALUE_BYTES_MAX]));
    let values = other.get(&large).await.unwrap();
    assert!((0..).zip(&values).all(|(at, value)| value.as_deref() == Some(&vec![at; VALUE_BYTES_MAX][..])));

    // More than one request waits for.
    let several: Vec<String> = (0..300).map(|at| format!("several/{at}")).collect();
    for name in &several {
        store.set(name, name.as_bytes()).await.unwrap();
    }
    assert!(several.iter().map(String::as_bytes).eq(other.wait(&several, LONG).await.unwrap()));

    // More than fit into one request.
    store.set("last", b"1").await.unwrap();
    let mut names: Vec<String> = (0..5000).map(|at| format!("none/{at}")).collect();
    names[4999] = "last".to_owned();
    let found = other.get(&names).await.unwrap();
    assert_eq!((found.len(), found[4999].as_deref(), &found[4998]), (5000, Some(&b"1"[..]), &None));
    let error = other.wait(&names, Duration::ZERO).await.unwrap_err();
    let StoreError::TimedOut { missing, .. } = error else { panic!("{error}") };
    assert_eq!(missing, names[..4999]);
}
