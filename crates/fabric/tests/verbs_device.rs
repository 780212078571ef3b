//! How a device is chosen and set up, and what happens when it goes away. A plain run leaves these tests out, and
//! counts them as skipped; see `rdma_devices` for the devices they use.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{process::Command, sync::Arc, thread, time::Duration};

use futures::future::{join, join_all};
use tensorwire_fabric::{
    Access, ConnectParams, Fabric, FabricError, Immediate, LossCause, QueuePair, RemoteRange, Role, Runtime,
    scattered,
};
use tensorwire_memory::{GrantEnd, UserMemory};
use tensorwire_verbs_reactor::{Availability, Context, Library, Mtu, OnDemandPaging, Rdma, VerbsFabric};

use crate::{
    contract::{
        Flavour, Setup, bounded,
        pair::{DEPTHS, Grant, Pair, STEP_LIMIT, pattern},
        patience,
    },
    own_network::need_own_network,
    rdma_devices,
};

/// How long a device that is gone may stay open.
const CLOSED_WITHIN: Duration = Duration::from_secs(2);

/// The device that `scripts/rxe-vm/net` makes on a network interface of its own.
const DUMMY: (&str, &str) = ("rxe0", "d0");

const ON_THE_DUMMY: Setup = Setup { fabric: on_the_dummy, peer_address: None };
const TUNED: Setup = Setup { fabric: tuned, peer_address: None };
const PLAIN: Setup = Setup { fabric: plain, peer_address: None };

fn on_the_dummy(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    open(runtime, &Rdma { device: Some(DUMMY.0.to_owned()), ..Rdma::default() })
}

/// A fabric in which no setting has its default.
fn tuned(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    let chosen = VerbsFabric::open(runtime.clone(), &named()).unwrap();
    let settings = Rdma {
        device: Some(chosen.device().to_owned()),
        port: Some(chosen.port().number),
        gid_index: Some(chosen.source().index),
        pkey_index: Some(0),
        queue_depth: Some(4),
        timeout: Some(18),
        retry_count: Some(3),
        receiver_retry_count: Some(0),
        service_level: Some(1),
        mtu: Some(Mtu::Bytes512),
        traffic_class: Some(0x20),
        on_demand_paging: Some(OnDemandPaging::Never),
    };
    open(runtime, &settings)
}

fn plain(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    open(runtime, &named())
}

fn open(runtime: Arc<dyn Runtime>, settings: &Rdma) -> Arc<dyn Fabric> {
    Arc::new(VerbsFabric::open(runtime, settings).unwrap())
}

fn named() -> Rdma {
    Rdma { device: rdma_devices::ends().left, ..Rdma::default() }
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some that may be broken"]
fn a_connection_with_every_setting_changed_moves_bytes() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let pair = Pair::new(TUNED, runtime).await;
        pair.works(&pair.to_right, &pair.to_left).await;
        // More writes than the device's queue holds, each of many packets.
        let grant = pair.grant_right(64 << 10);
        let posted = (0..12).map(|value| {
            pair.to_right.write_imm(pair.left.source.filled(64 << 10, 9), grant.range, Immediate(value))
        });
        let arrivals = async {
            for value in 0..12 {
                assert_eq!(pair.arrival_at_right().await, (value, 64 << 10));
            }
        };
        let (written, ()) = pair.step("12 writes", join(join_all(posted), arrivals)).await;
        written.into_iter().for_each(|result| result.unwrap());
        assert_eq!(grant.take()[..], pattern(64 << 10, 9)[..]);
    });
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some that may be broken"]
fn settings_that_the_device_cannot_fulfil_are_told_with_their_names() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let refused =
            |settings: Rdma| VerbsFabric::open(runtime.clone(), &settings).map(drop).unwrap_err().to_string();
        let device = VerbsFabric::open(runtime.clone(), &named()).unwrap().device().to_owned();
        let settings = Rdma { device: Some(device.clone()), ..Rdma::default() };
        for (settings, words) in [
            (Rdma { port: Some(99), ..settings.clone() }, ["99", "RDMA_DEVICE_PORT"]),
            (Rdma { gid_index: Some(250), ..settings.clone() }, ["250", "RDMA_GID_INDEX"]),
            (Rdma { pkey_index: Some(65_000), ..settings }, ["65000", "RDMA_QP_PKEY_INDEX"]),
        ] {
            let error = refused(settings);
            assert!(words.iter().all(|word| error.contains(word)) && error.contains(&device), "{error}");
        }
        let absent = refused(Rdma { device: Some("rxe99".into()), ..Rdma::default() });
        assert!(absent.contains("rxe99") && absent.contains(&device), "{absent}");
    });
}

/// Soft-RoCE of the machine's kernel pages nothing on demand; an adapter may.
#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some that may be broken"]
fn paging_on_demand_is_required_of_devices_that_have_it_alone() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let device = VerbsFabric::open(runtime.clone(), &named()).unwrap().device().to_owned();
        let paging = Context::open(Library::open().unwrap(), &device).unwrap().paging();
        if device.starts_with("rxe") {
            assert_eq!(paging.to_string(), "no on-demand paging");
        }
        for wish in [OnDemandPaging::Never, OnDemandPaging::Auto, OnDemandPaging::Require] {
            let settings = Rdma { on_demand_paging: Some(wish), ..named() };
            let opened = VerbsFabric::open(runtime.clone(), &settings);
            match opened {
                Ok(fabric) => {
                    let expected = wish != OnDemandPaging::Never && paging.suffices();
                    assert_eq!(fabric.pages_on_demand(), expected, "{wish}");
                }
                Err(error) => {
                    assert!(wish == OnDemandPaging::Require && !paging.suffices(), "{error}");
                    let text = error.to_string();
                    for part in ["require", &device, "TENSORWIRE_RDMA_ON_DEMAND_PAGING", &paging.to_string()]
                    {
                        assert!(text.contains(part), "{part} is missing: {text}");
                    }
                }
            }
        }
    });
}

/// By the device's default: paging on demand if the device supports it.
#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some that may be broken"]
fn users_memory_is_sent_and_read_from_where_it_lies() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let pair = Pair::new(PLAIN, runtime).await;
        let memory = UserMemory::new();
        let joined = memory.join(Arc::new(pattern(100_000, 3).into_boxed_slice())).unwrap();
        let bytes = joined.buf().clone();
        let block = bytes.block().unwrap();
        pair.left.domain.register(block, Access::LOCAL).unwrap();
        let grant = pair.grant_right(100_000);
        let write = pair.to_right.write_imm(bytes.clone(), grant.range, Immediate(1));
        let (written, arrival) = pair.step("the write", join(write, pair.arrival_at_right())).await;
        written.unwrap();
        assert_eq!(arrival, (1, 100_000));
        assert!(grant.take()[..] == bytes[..]);

        let theirs = memory.join(Arc::new(pattern(100_000, 4).into_boxed_slice())).unwrap();
        let bytes = theirs.buf().clone();
        let region = pair.right.domain.register(bytes.block().unwrap(), Access::READABLE).unwrap();
        let _exposure = bytes.expose();
        pair.to_right.add_remote_region(region);
        let (id, generation) = (region.region, region.generation);
        let range = RemoteRange { region: id, generation, offset: bytes.offset() as u64, length: 100_000 };
        let into = (0..10).map(|_| pair.left.receive.pool.try_alloc(10_000).unwrap()).collect();
        let read = pair.to_right.read_vectored(scattered(range, into).unwrap());
        let read = pair.step("the read", read).await.unwrap();
        assert!(read.iter().flat_map(|part| part.iter()).eq(bytes.iter()));
    });
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some that may be broken"]
fn among_several_devices_the_same_one_is_chosen_each_time() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let Availability::Devices(present) = Availability::probe() else { panic!("there is no device") };
        let chosen = || VerbsFabric::open(runtime.clone(), &Rdma::default()).unwrap();
        let first = chosen();
        assert!(present.iter().any(|name| name == first.device()), "{present:?}");
        assert!(first.port().is_active());
        let second = chosen();
        assert_eq!((second.device(), second.source()), (first.device(), first.source()));
    });
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some that may be broken"]
fn connections_leave_nothing_of_the_device_open() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        for _ in 0..10 {
            let pair = Pair::new(PLAIN, runtime.clone()).await;
            pair.works(&pair.to_right, &pair.to_left).await;
            pair.step("closing", join(pair.to_right.close(), pair.to_left.close())).await;
        }
        closed(&runtime, Duration::from_secs(2)).await;
    });
}

/// Also tests the removal of a device: it must be possible while domains, pools and queue pairs exist.
async fn port_down(runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(ON_THE_DUMMY, runtime.clone()).await;
    pair.works(&pair.to_right, &pair.to_left).await;
    let waiting = pair.left.domain.prepare(DEPTHS).unwrap();
    let grant = pair.grant_right(4 << 20);
    let down = thread::spawn(|| run("ip", &["link", "set", DUMMY.1, "down"]));
    let (written, arrived) =
        pair.step("the port's end", join(load(&pair, &grant), ended(&pair.to_left))).await;
    down.join().unwrap();
    // A request may fail a moment before the port reports that it is down.
    is_device_lost(&written);
    is_device_lost(&ended(&pair.to_right).await);
    is_port_down(&arrived);
    closed(&runtime, CLOSED_WITHIN).await;
    assert_eq!(pair.left.source.pool.stats().used_bytes, 0, "a buffer was kept");
    drop(grant.granted.end(GrantEnd::QueuePairDrained).unwrap());
    run("rdma", &["link", "delete", DUMMY.0]);

    let refused = pair.left.domain.prepare(DEPTHS).map(drop).unwrap_err();
    assert!(refused.to_string().contains("PORT_ERR"), "{refused}");
    let peer = waiting.connection_data();
    let params = ConnectParams { peer, role: Role::Acceptor, peer_address: None, limit: STEP_LIMIT };
    let unconnected = pair.step("connecting", waiting.connect(params)).await.map(drop).unwrap_err();
    assert!(unconnected.to_string().contains("PORT_ERR"), "{unconnected}");
    // Memory can still be allocated, for other fabrics: here in a new block.
    drop(pair.left.source.filled(3 << 20, 1));

    run("ip", &["link", "set", DUMMY.1, "up"]);
    run("rdma", &["link", "add", DUMMY.0, "type", "rxe", "netdev", DUMMY.1]);
    works_again(&pair).await;
}

/// The domains connect again once their port is active, with all memory registered again.
async fn works_again(pair: &Pair) {
    let again = async {
        loop {
            if let Ok(left) = pair.left.domain.prepare(DEPTHS) {
                break connect_with(pair, left).await.unwrap();
            }
            pair.runtime.sleep(Duration::from_millis(100)).await;
        }
    };
    let (to_right, to_left) = pair.step("the port is active again", again).await;
    let grant = pair.right.receive.grant(3 << 20);
    let region = pair.right.domain.register(grant.granted.block().unwrap(), Access::RECEIVE).unwrap();
    assert_eq!(region.region, grant.region.region, "a block keeps its number");
    to_right.add_remote_region(region);
    let write = to_right.write_imm(pair.left.source.filled(3 << 20, 6), grant.range, Immediate(6));
    let (written, arrived) = pair.step("a write", join(write, to_left.next_arrival())).await;
    written.unwrap();
    arrived.unwrap();
    assert_eq!(grant.take()[..], pattern(3 << 20, 6)[..]);
}

async fn connect_with(
    pair: &Pair,
    left: Box<dyn tensorwire_fabric::Prepared>,
) -> Result<(QueuePair, QueuePair), FabricError> {
    let right = pair.right.domain.prepare(DEPTHS)?;
    let params =
        |peer, role| ConnectParams { peer, role, peer_address: None, limit: STEP_LIMIT * patience() };
    let dial = params(right.connection_data(), Role::Dialer);
    let accept = params(left.connection_data(), Role::Acceptor);
    let (left, right) = join(left.connect(dial), right.connect(accept)).await;
    Ok((left?.spawn(&*pair.runtime), right?.spawn(&*pair.runtime)))
}

/// Keeps writes under way until they fail. Each fails once, with the same error.
async fn load(pair: &Pair, grant: &Grant) -> FabricError {
    let source = pair.left.source.filled(4 << 20, 5);
    loop {
        let posted =
            (0..4).map(|value| pair.to_right.write_imm(source.clone(), grant.range, Immediate(value)));
        let mut failed = join_all(posted).await.into_iter().filter_map(Result::err);
        if let Some(first) = failed.next() {
            failed.for_each(|error| assert_eq!(error.to_string(), first.to_string()));
            break first;
        }
    }
}

/// The error that ends `queue_pair`, after its arrivals.
async fn ended(queue_pair: &QueuePair) -> FabricError {
    loop {
        if let Err(error) = queue_pair.next_arrival().await {
            break error;
        }
    }
}

fn is_port_down(error: &FabricError) {
    is_device_lost(error);
    assert!(error.to_string().contains("PORT_ERR"), "{error}");
}

fn is_device_lost(error: &FabricError) {
    let text = error.to_string();
    let lost = matches!(error, FabricError::PeerLost { cause: LossCause::DeviceLost, .. });
    assert!(lost && text.contains(DUMMY.0) && text.contains("port 1"), "{text}");
}

/// Waits until this process has no RDMA device open.
async fn closed(runtime: &Arc<dyn Runtime>, limit: Duration) {
    let start = runtime.now();
    while open_devices() > 0 {
        let waited = runtime.now() - start;
        assert!(waited < limit * patience(), "{} descriptors are open after {waited:?}", open_devices());
        runtime.sleep(Duration::from_millis(5)).await;
    }
    println!("closed after {:?}", runtime.now() - start);
}

fn open_devices() -> usize {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.filter(|target| target.starts_with("/dev/infiniband")).count()
}

/// Runs a command, and stops it if it does not end within seconds.
fn run(program: &str, arguments: &[&str]) {
    let status = Command::new("timeout").arg("10").arg(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {arguments:?}: {status}");
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some that may be broken"]
fn d_port_down_on_one_thread() {
    need_own_network();
    bounded(Flavour::CurrentThread, port_down);
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some that may be broken"]
fn d_port_down_on_two_threads() {
    need_own_network();
    bounded(Flavour::TwoWorkers, port_down);
}
