use std::collections::VecDeque;

use futures::FutureExt;
use tensorwire_fabric::{BoxFuture, FabricKind};

use super::*;
use crate::{session::node::connection_setup::tests::connection, worker::Worker};

const PEER: &str = "/job:worker/replica:0/task:0";
const OTHERS_MAX: usize = 100;

/// Stores the sent frames.
#[derive(Debug, Default)]
pub(crate) struct Sent(Mutex<Vec<Vec<u8>>>);

impl FrameSender for Sent {
    fn send(&self, frame: Vec<u8>) -> BoxFuture<'_, Result<(), ControlError>> {
        self.0.lock().unwrap().push(frame);
        Box::pin(std::future::ready(Ok(())))
    }
}

#[derive(Debug)]
struct Incoming(VecDeque<Result<Option<Vec<u8>>, ControlError>>);

impl FrameReceiver for Incoming {
    fn recv(&mut self) -> BoxFuture<'_, Result<Option<Vec<u8>>, ControlError>> {
        Box::pin(std::future::ready(self.0.pop_front().unwrap()))
    }
}

fn introduction(incarnation: u64, listens: Option<&str>) -> Introduction {
    let listen_address = listens.map(str::to_owned);
    Introduction { worker: PEER.to_owned(), incarnation, listen_address, fabrics: Vec::new() }
}

fn from_host(host: &str) -> Addresses {
    Addresses { own: "10.0.0.1:1".parse().unwrap(), peer: SocketAddr::new(host.parse().unwrap(), 2) }
}

/// A session with this incarnation of a worker, at `10.0.0.2:2`.
pub(crate) fn session_of(incarnation: u64, listens: Option<&str>, dialled: bool) -> Arc<Session> {
    let addresses = Some(from_host("10.0.0.2"));
    let connections = Connections::new(OTHERS_MAX);
    Session::new(
        introduction(incarnation, listens),
        addresses,
        Arc::new(Sent::default()),
        dialled,
        connections,
    )
}

fn session(dialled: bool) -> Arc<Session> {
    session_of(1, None, dialled)
}

pub(crate) async fn worker() -> Worker {
    let builder = Worker::builder("/job:ps/replica:0/task:0").require(FabricKind::TCP);
    // The sessions of these tests were not dialled.
    builder.data_bind("127.0.0.1:0").start().await.unwrap()
}

fn record(region: u32) -> RegionRecord {
    RegionRecord { region, generation: 1, base: 0, length: 4096, key: 0 }
}

fn why() -> Lost {
    Lost::new(PeerLoss::Unresponsive, "it says nothing")
}

fn is_closed<T: std::fmt::Debug>(answered: oneshot::Receiver<T>) -> bool {
    answered.now_or_never().unwrap().is_err()
}

#[test]
fn both_ends_number_their_connections_without_asking() {
    for (session, own, theirs) in [(session(true), 0, ACCEPTED), (session(false), ACCEPTED, 0)] {
        let numbers = [(); 2].map(|()| session.open().unwrap().0);
        assert_eq!(numbers, [own | 1, own | 2]);
        session.open_for_peer(theirs | 9).unwrap();
        for taken in [theirs | 9, own | 9] {
            assert_eq!(session.open_for_peer(taken).unwrap_err().code, Code::InvalidArgument, "{taken:x}");
        }
        session.forget(theirs | 9);
        session.open_for_peer(theirs | 9).unwrap();
    }
}

#[test]
fn s4_a_session_has_so_many_connections_and_a_peer_too() {
    let session = session(false);
    (0..16).for_each(|number| session.open_for_peer(number).unwrap());
    let refused = session.open_for_peer(16).unwrap_err();
    assert!(refused.code == Code::ResourceExhausted && refused.message.starts_with("16 data"), "{refused}");
    session.forget(3);
    session.open_for_peer(16).unwrap();
    let connections = Connections::new(1);
    let [one, other] = [1, 2].map(|life| {
        Session::new(introduction(life, None), None, Arc::new(Sent::default()), false, connections.clone())
    });
    one.open_for_peer(1).unwrap();
    let refused = other.open_for_peer(1).unwrap_err();
    assert!(refused.message.contains("connections_per_peer_max"), "{refused}");
}

#[tokio::test]
async fn connections_that_are_over_make_room() {
    let worker = worker().await;
    let session = session(false);
    let mut connections = Vec::new();
    for number in 0..16 {
        connections.push(connection(&worker).await);
        session.open_for_peer(number).unwrap();
        assert!(session.connection(number).is_none(), "it is being set up");
        assert_eq!(session.up(number, &connections[number as usize]), Ok(Vec::new()));
    }
    assert_eq!(session.open_for_peer(16).unwrap_err().code, Code::ResourceExhausted);
    assert!(Arc::ptr_eq(&session.connection(3).unwrap(), &connections[3]));
    connections[3].set_over(&why());
    session.open_for_peer(16).unwrap();
    connections[4].set_over(&why());
    session.open().unwrap();
    assert_eq!(session.lock().connections.len(), 16, "what this end sets up makes room, too");
    assert_eq!(session.up_connections().len(), 14);
}

#[tokio::test]
async fn the_end_of_a_session_is_the_end_of_all_that_it_carries() {
    let worker = worker().await;
    let session = session(true);
    assert!(session.live_connection().is_none());
    let (number, answered) = session.open().unwrap();
    let (up, _) = session.open().unwrap();
    let connection = connection(&worker).await;
    session.up(up, &connection).unwrap();
    assert!(Arc::ptr_eq(&session.live_connection().unwrap(), &connection));
    let (_, page) = session.ask_list().unwrap();
    let (pong, ended) = (session.expect_pong(1), session.ended());
    assert!(!session.is_over() && !*ended.borrow());
    session.condemn(why());
    assert!(session.is_over() && *ended.borrow() && !connection.is_over());
    let failed = session.fail(&Lost::gone("later"));
    assert!(failed.len() == 1 && Arc::ptr_eq(&failed[0], &connection) && connection.has_ended());
    assert_eq!((session.lost(), session.why_over()), (why(), why().detail), "the first reason stays");
    assert!(is_closed(answered) && is_closed(page) && is_closed(pong));
    assert!(session.live_connection().is_none() && session.up_connections().is_empty());
    assert_eq!(session.open().unwrap_err(), why().detail);
    assert_eq!(session.ask_list().unwrap_err(), why().detail);
    assert_eq!(session.up(number, &connection).unwrap_err(), why().detail);
}

#[tokio::test]
async fn a_connection_that_is_over_is_not_live() {
    let worker = worker().await;
    let session = session(true);
    let connection = connection(&worker).await;
    let (number, _) = session.open().unwrap();
    session.up(number, &connection).unwrap();
    connection.set_over(&why());
    assert!(session.live_connection().is_none());
    session.forget(number);
    assert!(session.up(number, &connection).unwrap_err().contains("while it was set up"));
}

#[test]
fn a_failed_session_is_over() {
    let session = session(true);
    assert!(session.fail(&why()).is_empty());
    assert!(session.is_over());
}

#[tokio::test]
async fn s4_regions_are_bounded_in_number_during_set_up_and_after_it() {
    let session = session(false);
    session.open_for_peer(1).unwrap();
    assert_eq!(session.add_region(2, record(1)), Ok(false), "there is no such connection");
    for region in 0..REGIONS_MAX as u32 {
        assert_eq!(session.add_region(1, record(region)), Ok(false));
    }
    assert_eq!(session.add_region(1, record(0)).unwrap_err().loss, PeerLoss::Misbehaved);
    assert!(!session.is_over(), "whoever serves it ends it");
    let worker = worker().await;
    let confirmed = session.up(1, &connection(&worker).await).unwrap();
    assert!(confirmed.into_iter().eq(0..REGIONS_MAX as u32));
    assert_eq!(session.add_region(1, record(0)).unwrap_err().loss, PeerLoss::Misbehaved);
    session.open_for_peer(2).unwrap();
    session.up(2, &connection(&worker).await).unwrap();
    assert_eq!(session.add_region(2, record(0)), Ok(true), "it is confirmed at once");
}

#[tokio::test]
async fn a_region_that_the_peer_confirms_during_set_up_is_confirmed_when_the_connection_is_up() {
    let (session, worker) = (session(false), worker().await);
    session.open_for_peer(1).unwrap();
    let connection = connection(&worker).await;
    let number = REGIONS_MAX as u32 + 7;
    let mut confirmed = Box::pin(connection.announcer.confirmed(region(&record(number))));
    assert!(confirmed.as_mut().now_or_never().is_none());
    session.region_confirmed(2, number);
    session.region_confirmed(1, number);
    assert!(confirmed.as_mut().now_or_never().is_none(), "the connection is not up");
    (0..REGIONS_MAX as u32).for_each(|other| session.region_confirmed(1, other));
    let stored = match &session.lock().connections[&1].stage {
        Stage::Opening(opening) => opening.confirmed.len(),
        Stage::Up(_) => panic!("it is being set up"),
    };
    assert_eq!(stored, REGIONS_MAX, "more than there can be mean nothing");
    session.up(1, &connection).unwrap();
    assert_eq!(confirmed.as_mut().now_or_never(), Some(Ok(())));
}

#[test]
fn why_a_peer_gave_a_connection_up_is_known_while_it_is_set_up() {
    let session = session(true);
    let (number, _answered) = session.open().unwrap();
    session.note_disowned(number + 1, "another one".to_owned());
    let mut disowned = Box::pin(session.disowned(number));
    assert!(disowned.as_mut().now_or_never().is_none());
    session.note_disowned(number, "no memory".to_owned());
    session.note_disowned(number, "again".to_owned());
    assert_eq!(disowned.now_or_never().unwrap(), "no memory");
    assert!(session.disowned(number).now_or_never().is_none(), "it is given once");
}

#[test]
fn an_answer_goes_to_who_asked() {
    let session = session(true);
    let ((one, first), (other, second)) = (session.open().unwrap(), session.open().unwrap());
    let refused = Status::new(Code::Unavailable, "no");
    session.answer(other, Err(refused.clone()));
    assert_eq!(second.now_or_never().unwrap().unwrap().unwrap_err(), refused);
    session.forget(one);
    assert!(is_closed(first));
    let (pong, given_up) = (session.expect_pong(1), session.expect_pong(2));
    session.pong(3);
    session.pong(1);
    assert_eq!(pong.now_or_never().unwrap(), Ok(()));
    drop(given_up);
    let pong = session.expect_pong(4);
    assert_eq!(session.lock().pings.len(), 1, "what nobody waits for is forgotten");
    let _other = session.expect_pong(5);
    session.pong(4);
    assert_eq!(pong.now_or_never().unwrap(), Ok(()));
}

#[test]
fn s4_lists_are_asked_for_and_served_in_bounded_number() {
    let session = session(true);
    let mut asked: Vec<_> = (0..64).map(|_| session.ask_list().unwrap()).collect();
    assert!(session.ask_list().unwrap_err().starts_with("64 list requests"));
    assert!(session.ask_report().unwrap_err().starts_with("64 list requests"), "they count together");
    asked.truncate(63);
    let (number, page) = session.ask_list().unwrap();
    session.give_list(number, ListPage { entries: Vec::new(), more: true });
    assert!(page.now_or_never().unwrap().unwrap().more);
    let (number, mut report) = session.ask_report().unwrap();
    session.give_list(number, ListPage { entries: Vec::new(), more: true });
    assert!((&mut report).now_or_never().is_none(), "a page is no report");
    session.give_report(number, Default::default());
    assert_eq!(report.now_or_never().unwrap().unwrap(), Default::default());
    let room: Vec<_> = (0..64).map(|_| session.begin_list().unwrap()).collect();
    assert_eq!(session.begin_list().unwrap_err().loss, PeerLoss::Misbehaved);
    drop(room);
    drop(session.begin_list().unwrap());
    let turn = session.list_turn().now_or_never().flatten().unwrap();
    assert!(session.list_turn().now_or_never().is_none(), "another is on its way");
    drop(turn);
    assert!(session.list_turn().now_or_never().flatten().is_some());
}

#[test]
fn frames_are_sent_until_this_end_hangs_up() {
    let sent = Arc::new(Sent::default());
    let session = Session::new(introduction(1, None), None, sent.clone(), true, Connections::new(1));
    let frame = || ControlFrame::Ping { nonce: 4 };
    session.send(frame()).now_or_never().unwrap().unwrap();
    assert_eq!(*sent.0.lock().unwrap(), [frame().encode()]);
    session.condemn(why());
    session.hang_up();
    let refused = session.send(frame()).now_or_never().unwrap().unwrap_err();
    assert!(refused.to_string().contains("it says nothing"), "{refused}");
}

#[test]
fn every_frame_is_a_sign_of_life_and_each_end_has_its_reason() {
    let session = session(true);
    let gone = ControlError::Lost { detail: "cut".to_owned() };
    let ping = ControlFrame::Ping { nonce: 4 };
    let incoming = [Ok(Some(ping.encode())), Ok(Some(vec![0xFF])), Ok(None), Err(gone)];
    let mut incoming = Incoming(incoming.into());
    assert_eq!(session.signs_of_life(), 0);
    let mut next = || session.next_frame(&mut incoming).now_or_never().unwrap();
    assert_eq!(next(), Ok(ping));
    assert_eq!(session.signs_of_life(), 1);
    let ends = [(); 3].map(|()| next().unwrap_err().loss);
    assert_eq!(ends, [PeerLoss::Misbehaved, PeerLoss::Goodbye, PeerLoss::Gone]);
}

#[test]
fn a_peer_is_where_it_was_dialled_and_where_it_says_that_it_listens() {
    assert_eq!(session(true).dialled_at().unwrap().ip().to_string(), "10.0.0.2");
    assert_eq!(session(true).own_address().unwrap().to_string(), "10.0.0.1:1");
    for (says, dial) in
        [("0.0.0.0:5", "10.0.0.2:5"), ("10.0.0.3:5", "10.0.0.3:5"), ("a.example:5", "a.example:5")]
    {
        assert_eq!(session_of(1, Some(says), false).listen_address().unwrap(), dial);
    }
    assert_eq!(session(false).listen_address(), None);
    assert_eq!(session(false).whereabouts(), "10.0.0.2");
    let tells = |says, host: Option<&str>| whereabouts(&introduction(1, says), host.map(from_host));
    assert_eq!(tells(None, None), "an unknown address");
    assert_eq!(tells(Some("127.0.0.1:5"), Some("10.0.0.2")), "127.0.0.1:5 of the host 10.0.0.2");
    assert_eq!(tells(Some("127.0.0.1:5"), Some("127.0.0.1")), "127.0.0.1:5");
    assert_eq!(tells(Some("10.0.0.3:5"), Some("10.0.0.2")), "10.0.0.3:5");
}
