//! Control sessions and tcp connections that something on the way delays, cuts, half-closes, resets, flips bits of, or
//! holds up.

use std::{
    future::Future,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use futures::future::join;
use tensorwire_fabric::{ConnectionData, FabricError, Runtime, TokioRuntime};
use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{
    Peer, PeerLoss, Tensor, Validation, Worker, WorkerBuilder, WorkerError, control::Secret,
};

use crate::{
    crowd::{
        Draw,
        content::Label,
        gauges::{Gauges, recorded},
        number,
        tally::is_a_loss,
    },
    harness::{bounded, info, step},
    proxy::{Harm, Pace, Proxy, Way},
    rdma::patient,
    watched::{Watcher, watched},
};

const SERVER: &str = "/job:server/replica:0/task:0";
const CLIENT: &str = "/job:client/replica:0/task:0";

const LIMIT: Duration = Duration::from_secs(100);
const LIVENESS: Duration = Duration::from_secs(1);

/// The deadline of an operation.
const DEADLINE: Duration = Duration::from_secs(3);

/// Of values that travel within a message, in one frame, and in several writes.
const SIZES: [usize; 3] = [512, 20_000, 150_000];

/// Where the port stands in tcp's connection data.
const PORT: std::ops::Range<usize> = 19..21;

/// Rounds of each kind of harm: `TENSORWIRE_PROXY_ROUNDS`, or as many as every change can wait for.
fn rounds() -> u64 {
    number("TENSORWIRE_PROXY_ROUNDS").unwrap_or(3)
}

/// Leads data connections through a proxy.
#[derive(Debug)]
struct Led {
    data: Proxy,
    control: Arc<Proxy>,
    /// Ends the session of this worker while it prepares a connection.
    client: OnceLock<Worker>,
    cuts_in: AtomicBool,
}

impl Watcher for Led {
    fn preparing(&self) -> Result<(), FabricError> {
        if self.cuts_in.swap(false, Ordering::SeqCst) {
            self.control.cut(true);
            let is_known =
                || self.client.get().unwrap().peers().iter().any(|peer| peer.incarnation.is_some());
            let mut looks = 0..5_000;
            while is_known() && looks.next().is_some() {
                thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    fn connection_data(self: Arc<Self>, mut data: ConnectionData) -> ConnectionData {
        let port = u16::from_le_bytes(data.0[PORT].try_into().unwrap());
        data.0[PORT].copy_from_slice(&self.data.port(port).to_le_bytes());
        data
    }
}

/// Two workers, and what is between them.
struct Pair {
    runtime: Arc<dyn Runtime>,
    server: Worker,
    client: Worker,
    peer: Peer,
    control: Arc<Proxy>,
    led: Arc<Led>,
    next: u64,
}

impl Pair {
    async fn start(runtime: Arc<dyn Runtime>, validation: Validation, pace: Pace) -> Self {
        let control = Arc::new(Proxy::new());
        let led = Led {
            data: Proxy::new(),
            control: control.clone(),
            client: OnceLock::new(),
            cuts_in: AtomicBool::new(false),
        };
        let led = Arc::new(led);
        let settings = |name| {
            let fabric = TcpFabric::new(Arc::new(TokioRuntime::current().unwrap()), TcpConfig::default());
            let builder: WorkerBuilder =
                Worker::builder(name).local_fabrics(vec![watched(Arc::new(fabric), &led)]);
            let secret = Secret::new(*b"known to both of them").unwrap();
            builder
                .secret(secret)
                .validation(validation)
                .liveness(patient(LIVENESS))
                .timeout(patient(DEADLINE))
        };
        let server = settings(SERVER).start().await.unwrap();
        let client = settings(CLIENT).start().await.unwrap();
        led.client.set(client.clone()).unwrap();
        [&*control, &led.data].into_iter().for_each(|proxy| proxy.pace(pace));
        let port = server.address().rsplit_once(':').unwrap().1.parse().unwrap();
        let peer = client.peer_at(&format!("127.0.0.1:{}", control.port(port))).await.unwrap();
        for size in SIZES {
            let value =
                Label { owner: 0, life: 0, number: size as u64 }.value(&server, size - size % 8).await;
            server.publish(&size.to_string(), value).unwrap();
        }
        Self { runtime, server, client, peer, control, led, next: 0 }
    }

    fn proxy(&self, is_control: bool) -> &Proxy {
        if is_control { &self.control } else { &self.led.data }
    }

    /// Fetches of each size, and receives of a step of its own. Each ends, with what it should give or an error.
    async fn exchange(&mut self) -> Vec<Result<Tensor, WorkerError>> {
        self.next += 1;
        let id = self.next as i64;
        let device = |worker: &str| format!("{worker}/device:CPU:0");
        let mut ended = Vec::new();
        for size in SIZES {
            let name = size.to_string();
            ended.push(step("a fetch", self.peer.fetch(&name).into_future()).await);
            let label = Label { owner: 1, life: 0, number: size as u64 };
            let value = label.value(&self.server, size - size % 8).await;
            let key = self.server.key(&device(SERVER), &device(CLIENT), &name).unwrap();
            let received = match self.server.shared_step(id).send(&key, value) {
                Ok(()) => step("a receive", self.receive(id, &name)).await,
                // A step in which values may be lost is over.
                Err(error) => Err(error),
            };
            ended.push(received);
        }
        self.server.cleanup(id);
        self.client.cleanup(id);
        ended
    }

    async fn receive(&self, id: i64, edge: &str) -> Result<Tensor, WorkerError> {
        let device = |worker: &str| format!("{worker}/device:CPU:0");
        let key = self.client.key(&device(SERVER), &device(CLIENT), edge)?;
        self.client.shared_step(id).recv(&key).await
    }

    /// Waits until the client knows that its connection is over.
    async fn is_lost(&self) {
        let lost = async {
            while info(&self.client, &self.peer).transport.is_some() {
                self.runtime.sleep(Duration::from_millis(1)).await;
            }
        };
        step("the end of a connection that was cut", lost).await;
    }

    /// Every result is right, or an error that damage on the way may cause. Gives how many are errors.
    async fn right_or_an_error(&mut self, what: &str, is_validated: bool) -> usize {
        let mut errors = 0;
        for (number, ended) in self.exchange().await.into_iter().enumerate() {
            match ended {
                Ok(tensor) if is_validated => {
                    let expected = (SIZES[number / 2], number as u64 % 2);
                    let label = Label::of(tensor.bytes());
                    let found = label.map(|label| (label.number as usize, label.owner));
                    assert_eq!(found, Some(expected), "{what}: wrong bytes");
                    assert_eq!(tensor.dtype(), DataType::U8, "{what}");
                }
                // Whoever wants to know checks the bytes.
                Ok(_) => {}
                Err(error) => {
                    let is_expected = is_a_loss(&error)
                        || matches!(
                            &error,
                            WorkerError::Corrupted { .. }
                                | WorkerError::DeadlineExceeded { .. }
                                | WorkerError::Remote { .. }
                        );
                    assert!(is_expected, "{what}: {error}");
                    errors += 1;
                }
            }
        }
        errors
    }

    /// Soon everything goes right again, over the same workers.
    async fn recovers(&mut self, what: &str) {
        let end = self.runtime.now() + patient(Duration::from_secs(20));
        while self.right_or_an_error(what, true).await > 0 {
            assert!(self.runtime.now() < end, "{what}: the workers do not find to each other again");
        }
    }

    /// No memory stays in use after what went wrong.
    async fn end(self) {
        let held = |worker: &Worker, name: &str| recorded(worker).get(name).copied().unwrap_or(0);
        let back = async {
            while held(&self.client, "receive.pool_used_bytes") > 0 {
                self.runtime.sleep(Duration::from_millis(1)).await;
            }
        };
        step("the return of the receive memory", back).await;
        for worker in [&self.server, &self.client] {
            assert_eq!(leaked(&recorded(worker)), 0, "{:?}", recorded(worker));
        }
        self.client.shutdown().await;
        self.server.shutdown().await;
    }
}

fn leaked(gauges: &Gauges) -> u64 {
    gauges.iter().filter(|(name, _)| name.ends_with("pool_leaked_bytes")).map(|(_, bytes)| bytes).sum()
}

fn run<F: Future<Output = ()>>(body: impl FnOnce(Arc<dyn Runtime>) -> F) {
    bounded(LIMIT, body);
}

/// Where harm may come to new connections, and to one that stands, in bytes of a direction. The first session took `set_up`
/// there and back, and so does each after it.
fn most(is_control: bool, way: Way, is_new: bool, set_up: [u64; 2]) -> usize {
    match (is_control, way, is_new) {
        (true, _, true) => set_up[way as usize] as usize,
        // Little but pings.
        (true, _, false) => 20,
        (false, _, true) => 120,
        (false, Way::There, false) => 900,
        (false, Way::Back, false) => 330_000,
    }
}

async fn harmed(
    runtime: Arc<dyn Runtime>,
    is_control: bool,
    harm: fn(&mut Draw) -> Harm,
    validation: Validation,
) {
    let mut draw = Draw::new(&*runtime);
    let mut pair = Pair::start(runtime, validation, Pace::AsTheyCome).await;
    pair.recovers("at first").await;
    let is_validated = validation != Validation::Off;
    let set_up = pair.proxy(is_control).came();
    for round in 0..rounds() * 4 {
        let (way, is_new) = ([Way::There, Way::Back][(round % 2) as usize], round % 4 < 2);
        let (at, harm) = (draw.below(most(is_control, way, is_new, set_up)), harm(&mut draw));
        let what =
            format!("round {round}, {harm:?} {way:?} after {at} bytes, new {is_new}, control {is_control}");
        let proxy = pair.proxy(is_control);
        proxy.arm(way, at as u64, harm);
        if is_new {
            proxy.cut(draw.below(2) == 0);
            pair.is_lost().await;
        }
        pair.right_or_an_error(&what, is_validated).await;
        let proxy = pair.proxy(is_control);
        proxy.disarm();
        if !is_control && matches!(harm, Harm::Flip(_)) {
            // A changed header can have the peer wait for bytes that are never sent, until deadlines end that.
            proxy.cut(true);
        }
        pair.recovers(&what).await;
    }
    assert!(pair.proxy(is_control).done() > 0, "nothing was ever harmed");
    pair.end().await;
}

macro_rules! harms {
    ($($test:ident: $is_control:literal, $harm:expr, $validation:ident;)*) => {
        $(
            #[test]
            fn $test() {
                run(|runtime| harmed(runtime, $is_control, $harm, Validation::$validation));
            }
        )*
    };
}

harms! {
    d_proxy_control_sessions_cut_at_any_byte: true, |_| Harm::Cut, Xxh3;
    d_proxy_control_sessions_half_closed_at_any_byte: true, |_| Harm::HalfClose, Xxh3;
    d_proxy_control_sessions_reset_at_any_byte: true, |_| Harm::Reset, Xxh3;
    d_proxy_bits_flipped_in_control_sessions: true, |draw| Harm::Flip(draw.below(8) as u8), Xxh3;
    d_proxy_tcp_connections_cut_at_any_byte: false, |_| Harm::Cut, Xxh3;
    d_proxy_tcp_connections_half_closed_at_any_byte: false, |_| Harm::HalfClose, Xxh3;
    d_proxy_tcp_connections_reset_at_any_byte: false, |_| Harm::Reset, Xxh3;
    d_proxy_bits_flipped_in_tcp_connections_are_noticed_with_validation:
        false, |draw| Harm::Flip(draw.below(8) as u8), Xxh3;
    d_proxy_bits_flipped_in_tcp_connections_hang_nobody_without_validation:
        false, |draw| Harm::Flip(draw.below(8) as u8), Off;
}

/// All is as ever, only later.
fn only_slower(pace: Pace) {
    run(|runtime| async move {
        let mut pair = Pair::start(runtime, Validation::Xxh3, pace).await;
        for ended in pair.exchange().await {
            ended.unwrap();
        }
        pair.end().await;
    });
}

#[test]
fn d_proxy_bytes_that_come_late_are_right() {
    only_slower(Pace::Late(Duration::from_millis(3)));
}

#[test]
fn d_proxy_bytes_that_come_one_by_one_are_right() {
    only_slower(Pace::ByBytes);
}

/// Nothing goes through for about `outage`; gives how long that was, and how a receive ended that waited meanwhile.
async fn outage(pair: &mut Pair, outage: Duration) -> (Duration, Result<Tensor, WorkerError>) {
    pair.recovers("before an outage").await;
    pair.next += 1;
    let (id, device) = (pair.next as i64, |worker: &str| format!("{worker}/device:CPU:0"));
    let key = pair.server.key(&device(SERVER), &device(CLIENT), "late").unwrap();
    let asked = || pair.client.peers()[0].counters.sent.tensor_request;
    let before = asked();
    let pace = |pace| [&*pair.control, &pair.led.data].into_iter().for_each(|proxy| proxy.pace(pace));
    let holding = async {
        // The receive has asked.
        while asked() == before {
            pair.runtime.sleep(Duration::from_millis(1)).await;
        }
        pace(Pace::Held);
        let began = pair.runtime.now();
        pair.runtime.sleep(outage).await;
        pace(Pace::AsTheyCome);
        let took = pair.runtime.now() - began;
        let value = Label { owner: 1, life: 0, number: 0 }.value(&pair.server, 4096).await;
        // An outage that was noticed has ended the step.
        let _ = pair.server.shared_step(id).send(&key, value);
        took
    };
    let (received, took) = join(pair.receive(id, "late"), holding).await;
    pair.server.cleanup(id);
    pair.client.cleanup(id);
    (took, received)
}

#[test]
fn d_proxy_an_outage_just_under_the_liveness_bound_is_survived_and_one_just_over_is_not() {
    run(|runtime| async move {
        let mut pair = Pair::start(runtime, Validation::Off, Pace::AsTheyCome).await;
        let liveness = patient(LIVENESS);
        // On a busy machine an outage may become longer than it was meant to be.
        let mut under = outage(&mut pair, liveness * 8 / 10).await;
        for _ in 0..10 {
            if under.0 < liveness * 85 / 100 {
                break;
            }
            under = outage(&mut pair, liveness * 8 / 10).await;
        }
        assert!(under.0 < liveness * 85 / 100, "no outage of {liveness:?} * 0.8 could be made");
        let (took, received) = under;
        let received = received.map(|tensor| Label::of(tensor.bytes()));
        assert!(received.unwrap_or_else(|error| panic!("after {took:?}: {error}")).is_some());
        let (took, received) = outage(&mut pair, liveness * 12 / 10).await;
        let error = received.expect_err("an outage over the liveness bound was not noticed");
        let WorkerError::PeerLost { loss, .. } = &error else { panic!("after {took:?}: {error}") };
        assert_eq!(*loss, PeerLoss::Unresponsive, "{error}");
        pair.recovers("after an outage").await;
        pair.end().await;
    });
}

#[test]
fn d_proxy_a_ring_prepared_for_a_session_that_ends_meanwhile_goes_back() {
    run(|runtime| async move {
        let mut pair = Pair::start(runtime, Validation::Off, Pace::AsTheyCome).await;
        pair.led.cuts_in.store(true, Ordering::SeqCst);
        pair.right_or_an_error("cut while preparing", true).await;
        assert!(!pair.led.cuts_in.load(Ordering::SeqCst), "nothing was prepared");
        pair.recovers("cut while preparing").await;
        pair.end().await;
    });
}
