//! Each time that a user of groups and stores may set, at its ends: it works, or it ends in an error that names it. None waits for
//! ever, and none ends a thread or a task of the store.

use std::{
    future::{Future, IntoFuture},
    sync::Arc,
    time::Duration,
};

use futures::{FutureExt, TryFutureExt, future::BoxFuture, join};
use tensorwire_collective::{
    Group, GroupError,
    launch::Launch,
    store::{MemoryStore, Store, StoreError},
};
use tensorwire_fabric::{FabricKind, Runtime, TokioRuntime, timeout};
use tensorwire_rendezvous::{Tensor, Worker};

use crate::group::{PATIENCE, ranks, worker};
use crate::join_all::join_all;
#[cfg(any(feature = "redis", feature = "etcd"))]
use crate::store::server::{Server, Service};

const ENDS: [Duration; 3] = [Duration::ZERO, Duration::from_nanos(1), Duration::MAX];

fn runtime() -> Arc<dyn Runtime> {
    Arc::new(TokioRuntime::current().unwrap())
}

async fn bounded<T>(what: impl std::fmt::Debug, body: impl Future<Output = T>) -> T {
    timeout(&*runtime(), PATIENCE, body).await.unwrap_or_else(|_| panic!("{what:?} does not end"))
}

async fn client() -> Worker {
    Worker::client().require(FabricKind::TCP).start().await.unwrap()
}

fn keys(name: &str) -> Vec<String> {
    vec![name.to_owned()]
}

/// How the call with the limit `time` may end: the longest works, and one that is too short may be late.
fn check<T, E: std::fmt::Display>(
    what: &str,
    time: Duration,
    ended: Result<T, E>,
    is_late: impl Fn(&E) -> bool,
) {
    if let Err(error) = ended {
        assert!(time < Duration::MAX && is_late(&error), "{what} with {time:?}: {error}");
    }
}

fn is_late(error: &StoreError) -> bool {
    matches!(error, StoreError::TimedOut { .. } | StoreError::Unreachable { .. })
}

/// Of a call: the other rank may be late first.
fn is_late_call(error: &GroupError) -> bool {
    matches!(error, GroupError::TimedOut { .. } | GroupError::Over { .. })
}

fn tensor(worker: &Worker, value: f32) -> Tensor {
    Tensor::from_values(worker.pool(), &[1], &[value]).unwrap()
}

#[tokio::test]
async fn the_time_of_a_group_is_usable_at_its_ends_or_refused_by_its_name() {
    for time in ENDS {
        let store = Arc::new(MemoryStore::new(runtime()));
        let workers = join!(worker("zero", FabricKind::TCP), worker("one", FabricKind::TCP));
        let join = async |rank, worker| {
            Group::builder(store.clone(), rank, 2).job("a").timeout(time).join(worker).await
        };
        let joined = bounded(time, async { join!(join(0, &workers.0), join(1, &workers.1)) }).await;
        for group in [&joined.0, &joined.1] {
            match group {
                Err(GroupError::Argument { field: "timeout", value, remedy }) => {
                    assert!(time.is_zero() && value == "0ns" && remedy.contains("more than zero"));
                }
                Err(error) => {
                    assert!(time == ENDS[1] && error.to_string().contains("1ns"), "{time:?}: {error}");
                }
                Ok(_) => assert!(!time.is_zero()),
            }
        }
        if let (Ok(zero), Ok(one)) = joined {
            let values = (tensor(&workers.0, 1.0), tensor(&workers.1, 2.0));
            let calls = [zero.all_gather(values.0), one.all_gather(values.1)].map(IntoFuture::into_future);
            for gathered in bounded(time, join_all(calls)).await {
                check("all_gather", time, gathered.map(drop), is_late_call);
            }
        }
        if time < Duration::MAX {
            let again = Group::builder(store.clone(), 1, 2).job("a").timeout(time).rejoin(&workers.1);
            bounded(time, again).await.unwrap_err();
        }
        join!(workers.0.shutdown(), workers.1.shutdown());
    }
}

#[tokio::test]
async fn a_newcomer_may_wait_for_the_longest_time() {
    let (store, longest) = (Arc::new(MemoryStore::new(runtime())), Duration::MAX);
    let workers = join!(worker("zero", FabricKind::TCP), worker("one", FabricKind::TCP));
    let builder = |rank| Group::builder(store.clone(), rank, 1).timeout(longest);
    let old = builder(0).join(&workers.0).await.unwrap();
    let admitting = async {
        while old.waiting().await.unwrap() == 0 {
            tokio::task::yield_now().await;
        }
        old.admit().await
    };
    let all = bounded("rejoin", async { join!(builder(0).rejoin(&workers.1), admitting) }).await;
    let groups = [all.0.unwrap(), all.1.unwrap()];
    for ended in bounded("barrier", join_all(groups.iter().map(|group| group.barrier().into_future()))).await
    {
        ended.unwrap();
    }
    join!(workers.0.shutdown(), workers.1.shutdown());
}

/// Each kind of wait between two ranks, for something that comes.
#[tokio::test]
async fn the_time_of_a_wait_between_ranks_is_usable_at_its_ends() {
    for time in ENDS {
        let all = ranks(FabricKind::TCP, 2).await;
        let [zero, one] = &all.groups[..] else { unreachable!("two ranks") };
        let mut sent = zero.send(1, 7, tensor(&all.workers[0], 1.0)).unwrap();
        let received = bounded(("recv", time), one.recv(0, 7).timeout(time).into_future()).await;
        check("recv", time, received.map(drop), is_late_call);
        let read = bounded(("wait", time), sent.wait().timeout(time).into_future()).await;
        check("wait", time, read, is_late_call);
        let mut outgoing = zero.send_buffer(1, 0, 8).unwrap();
        let mut incoming = one.recv_buffer(0, 0, 8).unwrap();
        let posted = bounded(("send", time), outgoing.send(0, 8, 0).timeout(time).into_future()).await;
        let is_posted = posted.is_ok();
        check("send", time, posted, is_late_call);
        let arrived = incoming.wait_recv().timeout(time).into_future();
        check("wait_recv", time, bounded(("wait_recv", time), arrived).await.map(drop), is_late_call);
        if is_posted {
            let left = outgoing.wait_send().timeout(time).into_future();
            check("wait_send", time, bounded(("wait_send", time), left).await, is_late_call);
        }
        drop((outgoing, incoming));
        join_all(all.workers.iter().map(Worker::shutdown)).await;
    }
}

/// A call of one rank with this limit.
type CallOf = fn(&Group, &Worker, Duration) -> BoxFuture<'static, Result<(), GroupError>>;

const CALLS: [(&str, CallOf); 5] = [
    ("barrier", |group, _, time| group.barrier().timeout(time).into_future()),
    ("all_gather", |group, worker, time| {
        let gathered = group.all_gather(tensor(worker, 1.0)).timeout(time).into_future();
        gathered.map_ok(drop).boxed()
    }),
    ("all_reduce", |group, _, time| {
        let group = group.clone();
        async move { group.all_reduce(&mut [1.0_f32; 9]).timeout(time).await }.boxed()
    }),
    ("all_reduce_tensors", |group, worker, time| {
        let reduced = group.all_reduce_tensors([tensor(worker, 1.0)]).timeout(time).into_future();
        reduced.map_ok(drop).boxed()
    }),
    ("derive", |group, _, time| group.derive("other").timeout(time).into_future().map_ok(drop).boxed()),
];

#[tokio::test]
async fn the_time_of_a_call_is_usable_at_its_ends() {
    for (what, call) in CALLS {
        for time in ENDS {
            let all = ranks(FabricKind::TCP, 2).await;
            let calls = all.groups.iter().zip(&all.workers).map(|(group, worker)| call(group, worker, time));
            for ended in bounded((what, time), join_all(calls)).await {
                check(what, time, ended, is_late_call);
            }
            join_all(all.workers.iter().map(Worker::shutdown)).await;
        }
    }
}

/// All operations of a store that was opened with the limit `time`.
async fn use_store(what: &str, time: Duration, store: &dyn Store) {
    let set = bounded((what, time), store.set("a", b"1")).await;
    let is_set = set.is_ok();
    check(what, time, set, is_late);
    check(what, time, bounded((what, time), store.get(&keys("a"))).await, is_late);
    check(what, time, bounded((what, time), store.add("n", 1)).await, is_late);
    check(what, time, bounded((what, time), store.compare_set("c", None, b"1")).await, is_late);
    for limit in ENDS {
        if is_set {
            let waited = bounded((what, time, limit), store.wait(&keys("a"), limit)).await;
            check(what, time.min(limit), waited, is_late);
        }
        if limit < Duration::MAX {
            let error = bounded((what, time, limit), store.wait(&keys("never"), limit)).await.unwrap_err();
            assert!(is_late(&error), "{what} with {time:?}, a wait of {limit:?}: {error}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_time_of_a_store_is_usable_at_its_ends() {
    let folder = tempfile::tempdir().unwrap();
    #[cfg(feature = "redis")]
    let redis = Server::start(Service::Redis);
    #[cfg(feature = "etcd")]
    let etcd = Server::start(Service::Etcd);
    for time in ENDS {
        use_store("memory", time, &MemoryStore::new(runtime())).await;
        let mut urls = vec![format!("file://{}", folder.path().display())];
        #[cfg(feature = "redis")]
        urls.extend(redis.as_ref().map(|server| server.url().to_string()));
        #[cfg(feature = "etcd")]
        urls.extend(etcd.as_ref().map(|server| server.url().to_string()));
        let (usual, serving) = (MemoryStore::new(runtime()), client().await);
        usual.serve(&serving).unwrap();
        urls.push(serving.address().to_owned());
        let asking = client().await;
        for url in urls {
            let opened = url.parse::<tensorwire_collective::store::StoreUrl>().unwrap();
            match bounded((&url, time), opened.open(time, &asking)).await {
                Ok(store) => use_store(&url, time, &*store).await,
                error => check(&url, time, error.map(drop), is_late),
            }
        }
        use_store("after hasty clients", Duration::MAX, &usual).await;
    }
}

#[tokio::test]
async fn the_time_to_open_the_store_of_a_job_is_usable_at_its_ends() {
    for time in ENDS {
        let (store, serving) = (MemoryStore::new(runtime()), client().await);
        store.serve(&serving).unwrap();
        for rank in [0, 1] {
            let variable = |name: &str| match name {
                "TENSORWIRE_RANK" => Some(rank.to_string()),
                "TENSORWIRE_SIZE" => Some("2".to_owned()),
                "TENSORWIRE_STORE" => Some(serving.address().to_owned()),
                _ => None,
            };
            let launch = Launch::from_variables(variable).unwrap();
            let opened = bounded((rank, time), launch.open_store(time, &client().await)).await;
            check("open_store", time, opened.map(drop), is_late);
        }
    }
}
