use futures::FutureExt;
use tensorwire_fabric::TokioRuntime;

use super::*;
use crate::session::{
    node::connection_setup::tests::connection,
    tests::{session_of, worker},
};

const NAME: &str = "/job:worker/replica:0/task:0";

fn peer() -> KnownPeer {
    KnownPeer::new(NAME)
}

fn gone() -> Lost {
    Lost::gone("it is gone")
}

/// Begins an attempt of this worker.
fn connecting(peer: &KnownPeer) -> Latch<Attempt> {
    match peer.connection_or_attempt() {
        ConnectionOrAttempt::Begun(attempt) => attempt,
        _ => panic!("{:?}", peer.lock().link),
    }
}

fn up(connection: &Arc<DataConnection>) -> Link {
    Link::up(AttemptNumber::default(), connection)
}

/// Replaces the link, as this peer does.
fn set_link(peer: &KnownPeer, link: Link) {
    drop(peer.set_link(&mut peer.lock(), link));
}

fn in_use(peer: &KnownPeer) -> Option<Arc<DataConnection>> {
    peer.inner.in_use.load_full()
}

fn is_up(peer: &KnownPeer, connection: &Arc<DataConnection>) -> bool {
    let is_it = |up: Option<Arc<DataConnection>>| up.is_some_and(|up| Arc::ptr_eq(&up, connection));
    is_it(peer.connection()) && is_it(in_use(peer))
}

fn is_accepted(peer: &KnownPeer, connection: &Arc<DataConnection>) -> bool {
    peer.lock().accepted.as_ref().is_some_and(|(_, accepted)| Arc::ptr_eq(accepted, connection))
}

fn told(latch: &Latch<Attempt>) -> Option<Option<Attempt>> {
    latch.wait().now_or_never()
}

#[test]
fn what_is_known_of_a_peer_is_kept() {
    let peer = KnownPeer::known(NAME, "a:1", 7);
    assert_eq!((peer.name(), peer.address(), peer.incarnation()), (NAME, Some("a:1".to_owned()), Some(7)));
    peer.note_address("a:2");
    assert_eq!(peer.address().unwrap(), "a:2");
    peer.note_not_used(vec!["shm: no".to_owned()]);
    assert_eq!(peer.not_used(), ["shm: no"]);
    assert!(!peer.note_connect() && peer.note_connect());
    assert!(peer.is(&peer.clone()) && !peer.is(&self::peer()));
}

#[test]
fn a_refusal_for_the_name_counts_for_a_while() {
    let (peer, at) = (peer(), Duration::from_secs(9));
    assert_eq!(peer.refusal(at), None);
    peer.note_refusal(at, "taken");
    assert_eq!(peer.refusal(at + REFUSAL_PAUSE - Duration::from_nanos(1)).unwrap(), "taken");
    assert_eq!(peer.refusal(at + REFUSAL_PAUSE), None);
}

#[test]
fn sessions_of_one_life_go_together_and_those_of_two_do_not() {
    let peer = peer();
    let [one, other] = [7, 7].map(|life| session_of(life, None, true));
    assert!(peer.live_session().is_none());
    peer.note_session(&one).unwrap();
    peer.note_session(&other).unwrap();
    peer.note_session(&one).unwrap();
    assert_eq!(peer.lock().sessions.len(), 2, "each is there once");
    let newer = session_of(8, None, true);
    assert!(Arc::ptr_eq(&peer.note_session(&newer).unwrap_err(), &one));
    one.fail(&gone());
    assert!(Arc::ptr_eq(&peer.live_session().unwrap(), &other));
    assert!(Arc::ptr_eq(&peer.note_session(&newer).unwrap_err(), &other));
    other.fail(&gone());
    peer.note_session(&newer).unwrap();
    assert_eq!((peer.incarnation(), peer.lock().sessions.len()), (Some(8), 1));
}

#[test]
fn a_life_is_taken_once() {
    let peer = peer();
    assert!(peer.life().is_none() && !peer.take_life());
    for (life, is_new) in [(7, true), (7, false), (8, true)] {
        let session = session_of(life, None, true);
        peer.note_session(&session).unwrap();
        assert_eq!(peer.life(), Some(life));
        assert_eq!([peer.take_life(), peer.take_life()], [is_new, false], "life {life}");
        session.fail(&gone());
        assert!(peer.life().is_none() && !peer.take_life());
    }
}

#[test]
fn a_peer_that_opens_a_session_says_where_it_listens_if_it_may_have_moved() {
    let peer = peer();
    let note = |life, listens, is_dialled| {
        let session = session_of(life, listens, is_dialled);
        peer.note_session(&session).unwrap();
        session.fail(&gone());
        peer.address()
    };
    assert_eq!(note(7, Some("a:1"), true), None, "it is known where it was dialled");
    assert_eq!(note(7, None, false), None);
    assert_eq!(note(7, Some("a:2"), false).unwrap(), "a:2");
    assert_eq!(note(7, Some("a:3"), false).unwrap(), "a:2", "in the same life");
    assert_eq!(note(8, Some("a:4"), true).unwrap(), "a:2");
    assert_eq!(note(9, None, false).unwrap(), "a:2");
    assert_eq!(note(10, Some("a:5"), false).unwrap(), "a:5");
}

#[tokio::test]
async fn a_peer_is_idle_without_connections_sessions_and_handles() {
    let (worker, peer) = (worker().await, peer());
    assert!(peer.is_idle(1));
    let handle = peer.clone();
    assert!(!peer.is_idle(1) && peer.is_idle(2));
    drop(handle);
    peer.add_hint("a:1");
    assert!(!peer.is_idle(1), "somebody said where it may be");
    peer.remove_hint("a:1");
    peer.begin_accept(true).unwrap();
    assert!(!peer.is_idle(1));
    assert!(peer.end_accept(None).is_none());
    assert!(peer.is_idle(1));
    let sessions = [7, 7].map(|life| session_of(life, None, true));
    sessions.iter().for_each(|session| peer.note_session(session).unwrap());
    assert!(!peer.is_idle(1));
    sessions[0].fail(&gone());
    assert!(!peer.is_idle(1), "one is alive");
    sessions[1].fail(&gone());
    assert!(peer.is_idle(1));
    let connection = connection(&worker).await;
    set_link(&peer, up(&connection));
    assert!(!peer.is_idle(1));
    connection.set_over(&gone());
    assert!(!peer.is_idle(1), "its end is not noted");
    connection.fail(&gone());
    assert!(peer.is_idle(1));
    peer.begin_accept(true).unwrap();
    set_link(&peer, Link::Idle);
    assert!(!peer.is_idle(1), "an attempt of the peer's is under way");
    assert!(peer.end_accept(None).is_none() && peer.is_idle(1));
    connecting(&peer);
    assert!(!peer.is_idle(1));
}

#[tokio::test]
async fn of_two_attempts_that_of_the_first_name_counts() {
    let (worker, peer) = (worker().await, peer());
    connecting(&peer);
    assert_eq!(peer.begin_accept(true).unwrap_err().code, Code::AlreadyExists);
    let attempt = peer.begin_accept(false).unwrap();
    let theirs = connection(&worker).await;
    assert!(peer.end_accept(Some((attempt, &theirs))).is_none());
    assert!(peer.connection().is_none(), "the own attempt goes on, and finds the peer's");
    let ended = peer.end_attempt(Err(WorkerError::ShutDown)).unwrap();
    assert!(Arc::ptr_eq(&ended, &theirs) && is_up(&peer, &theirs));
}

#[tokio::test]
async fn a_peer_that_asks_twice_has_lost_its_end() {
    let (worker, peer) = (worker().await, peer());
    let (one, other) = (connection(&worker).await, connection(&worker).await);
    assert!(Arc::ptr_eq(&peer.end_attempt(Ok(one.clone())).unwrap(), &one));
    assert_eq!(peer.begin_accept(true).unwrap_err().code, Code::AlreadyExists);
    let attempt = peer.begin_accept(true).unwrap();
    let replaced = peer.end_accept(Some((attempt, &other))).unwrap();
    assert!(Arc::ptr_eq(&replaced, &one), "the connection that it replaces");
    assert!(is_up(&peer, &other));
    peer.begin_accept(false).unwrap();
    assert!(peer.end_accept(None).is_none() && is_up(&peer, &other));
}

#[tokio::test]
async fn an_attempt_that_ends_late_with_a_failed_connection_replaces_no_live_one() {
    let (worker, peer) = (worker().await, peer());
    let (older, newer) = (connection(&worker).await, connection(&worker).await);
    let [late, early] = [(); 2].map(|()| peer.begin_accept(true).unwrap());
    older.set_over(&gone());
    assert!(peer.end_accept(Some((early, &newer))).is_none() && is_up(&peer, &newer));
    assert!(peer.end_accept(Some((late, &older))).is_none() && is_up(&peer, &newer));
    assert!(is_accepted(&peer, &newer));
    // A failed connection of a newer attempt does not replace it, either.
    let (newest, attempt) = (connection(&worker).await, peer.begin_accept(false).unwrap());
    newest.set_over(&gone());
    assert!(peer.end_accept(Some((attempt, &newest))).is_none() && is_up(&peer, &newer));
    assert!(is_accepted(&peer, &newer));
}

#[tokio::test]
async fn a_connection_of_an_older_attempt_replaces_no_live_one_of_a_newer_attempt() {
    let (worker, peer) = (worker().await, peer());
    let [older, newer, own] =
        [connection(&worker).await, connection(&worker).await, connection(&worker).await];
    let [first, second, third] = [(); 3].map(|()| peer.begin_accept(true).unwrap());
    assert!(peer.end_accept(Some((second, &newer))).is_none());
    assert!(peer.end_accept(Some((first, &older))).is_none() && is_up(&peer, &newer));
    assert!(is_accepted(&peer, &newer));
    // An attempt of this worker is newer than those of the peer that began before it.
    newer.set_over(&gone());
    connecting(&peer);
    assert!(Arc::ptr_eq(&peer.end_attempt(Ok(own.clone())).unwrap(), &own));
    assert!(peer.end_accept(Some((third, &older))).is_none() && is_up(&peer, &own));
    // If the newer connection has ended, an older one is better than none.
    let fourth = peer.begin_accept(false).unwrap();
    own.set_over(&gone());
    connecting(&peer);
    assert!(peer.end_attempt(Ok(own.clone())).is_ok());
    assert!(Arc::ptr_eq(&peer.end_accept(Some((fourth, &older))).unwrap(), &own) && is_up(&peer, &older));
}

#[tokio::test]
async fn of_two_connections_that_are_set_up_at_once_that_of_the_newer_attempt_is_used() {
    let (worker, peer) = (worker().await, peer());
    let (own, theirs) = (connection(&worker).await, connection(&worker).await);
    let older = peer.begin_accept(false).unwrap();
    assert!(peer.end_accept(None).is_none());
    connecting(&peer);
    let newer = peer.begin_accept(false).unwrap();
    assert!(peer.end_accept(Some((newer, &theirs))).is_none());
    assert!(Arc::ptr_eq(&peer.end_attempt(Ok(own.clone())).unwrap(), &theirs), "the peer has lost the other");
    assert!(is_up(&peer, &theirs));
    set_link(&peer, Link::Idle);
    connecting(&peer);
    peer.lock().accepted = Some((older, theirs));
    assert!(Arc::ptr_eq(&peer.end_attempt(Ok(own.clone())).unwrap(), &own) && is_up(&peer, &own));
}

#[tokio::test]
async fn who_waits_for_the_peers_attempt_is_told_of_its_end() {
    let (worker, peer) = (worker().await, peer());
    let waits = |peer: &KnownPeer| match &peer.lock().link {
        Link::Accepting(latch) => latch.clone(),
        link => panic!("{link:?}"),
    };
    peer.begin_accept(true).unwrap();
    peer.begin_accept(true).unwrap();
    let latch = waits(&peer);
    assert!(peer.end_accept(None).is_none() && told(&latch).is_none(), "another is under way");
    assert!(peer.end_accept(None).is_none());
    assert!(matches!(told(&latch), Some(None)) && matches!(peer.lock().link, Link::Idle));
    let attempt = peer.begin_accept(true).unwrap();
    let (latch, accepted) = (waits(&peer), connection(&worker).await);
    assert!(peer.end_accept(Some((attempt, &accepted))).is_none() && is_up(&peer, &accepted));
    assert!(matches!(told(&latch), Some(Some(Ok(connection))) if Arc::ptr_eq(&connection, &accepted)));
}

#[tokio::test]
async fn the_peers_attempt_is_waited_for_while_there_is_a_sign_of_it() {
    let (worker, peer) = (worker().await, peer());
    let runtime = TokioRuntime::current().unwrap();
    assert!(peer.accepted(&runtime).await.is_none());
    connecting(&peer);
    let attempt = peer.begin_accept(false).unwrap();
    let mut waiting = Box::pin(peer.accepted(&runtime));
    assert!(waiting.as_mut().now_or_never().is_none());
    assert!(
        timeout(&runtime, PEERS_TURN * 2, waiting.as_mut()).await.is_err(),
        "for as long as it is under way"
    );
    let theirs = connection(&worker).await;
    assert!(peer.end_accept(Some((attempt, &theirs))).is_none());
    assert!(Arc::ptr_eq(&waiting.await.unwrap(), &theirs));
    assert!(Arc::ptr_eq(&peer.accepted(&runtime).now_or_never().unwrap().unwrap(), &theirs));
    theirs.set_over(&gone());
    assert!(peer.accepted(&runtime).await.is_none());
    // An attempt that begins meanwhile is waited for.
    let mut waiting = Box::pin(peer.accepted(&runtime));
    assert!(waiting.as_mut().now_or_never().is_none());
    let attempt = peer.begin_accept(false).unwrap();
    let theirs = connection(&worker).await;
    assert!(peer.end_accept(Some((attempt, &theirs))).is_none());
    assert!(Arc::ptr_eq(&waiting.await.unwrap(), &theirs));
}

#[tokio::test]
async fn an_attempt_without_a_connection_leaves_none() {
    let (worker, peer) = (worker().await, peer());
    connecting(&peer);
    assert!(peer.end_attempt(Err(WorkerError::ShutDown)).is_err());
    assert!(matches!(peer.lock().link, Link::Idle));
    connecting(&peer);
    let attempt = peer.begin_accept(false).unwrap();
    let over = connection(&worker).await;
    assert!(peer.end_accept(Some((attempt, &over))).is_none());
    over.set_over(&gone());
    assert!(peer.end_attempt(Err(WorkerError::ShutDown)).is_err(), "the peer's is over already");
}

#[tokio::test]
async fn a_standby_replaces_the_connection_in_use_when_nothing_is_under_way() {
    let (worker, peer) = (worker().await, peer());
    let (used, standby, other) =
        (connection(&worker).await, connection(&worker).await, connection(&worker).await);
    set_link(&peer, up(&used));
    assert!(peer.uses(&used) && !peer.uses(&standby));
    assert!(matches!(peer.replace(&other, &standby), Replaced::Over), "it is not in use");
    let stay = used.protocol.stay().unwrap();
    assert!(matches!(peer.replace(&used, &standby), Replaced::Busy));
    assert!(peer.uses(&used));
    drop(stay);
    assert!(matches!(peer.replace(&used, &standby), Replaced::Done));
    assert!(is_up(&peer, &standby) && peer.uses(&standby) && !peer.uses(&used));
    assert!(used.protocol.stay().is_none(), "it is retired");
    other.set_over(&gone());
    assert!(matches!(peer.replace(&standby, &other), Replaced::Over), "the new one is over");
    let other = connection(&worker).await;
    standby.set_over(&gone());
    assert!(matches!(peer.replace(&standby, &other), Replaced::Over), "the one in use is over");
}

#[tokio::test]
async fn a_connection_whose_end_is_noted_is_let_go_of() {
    let (worker, peer) = (worker().await, peer());
    let (connection, other) = (connection(&worker).await, connection(&worker).await);
    set_link(&peer, up(&connection));
    peer.lock().accepted = Some((AttemptNumber::default(), connection.clone()));
    peer.lock().former.0.arrivals = 5;
    peer.let_go(&other);
    assert!(is_up(&peer, &connection) && peer.lock().accepted.is_some());
    assert_eq!(peer.figures().0.arrivals, 0, "of the connection in use");
    peer.let_go(&connection);
    assert!(peer.connection().is_none() && peer.lock().accepted.is_none());
    assert!(in_use(&peer).is_none());
    assert_eq!(peer.figures().0.arrivals, 0, "of the last one");
}

#[tokio::test]
async fn the_end_of_a_connection_is_noted_before_the_next() {
    let (worker, peer) = (worker().await, peer());
    let over = connection(&worker).await;
    set_link(&peer, up(&over));
    peer.end_former();
    assert!(!over.has_ended(), "it is in use");
    over.set_over(&gone());
    peer.begin_accept(true).unwrap();
    assert!(over.has_ended());
    let over = connection(&worker).await;
    set_link(&peer, up(&over));
    assert!(Arc::ptr_eq(&worker.node.connected(&peer).await.unwrap(), &over));
    over.set_over(&gone());
    peer.lock().accepted = Some((AttemptNumber::default(), connection(&worker).await));
    let mut attempt = Box::pin(worker.node.connected(&peer));
    assert!(attempt.as_mut().now_or_never().is_none());
    assert!(over.has_ended() && matches!(peer.lock().link, Link::Connecting(_)), "this end makes a new one");
    assert!(peer.lock().accepted.is_none(), "what the peer set up before is not what it comes to");
    assert!(matches!(peer.connection_or_attempt(), ConnectionOrAttempt::UnderWay(_)));
    let error = attempt.await.unwrap_err();
    assert!(matches!(&error, WorkerError::NoAddress { peer } if peer == NAME), "{error}");
    assert!(matches!(peer.lock().link, Link::Idle));
}

#[tokio::test]
async fn who_waited_for_an_attempt_that_failed_waits_for_one_more() {
    let (worker, peer) = (worker().await, peer());
    let accepting = || {
        let attempt = Latch::new();
        set_link(&peer, Link::Accepting(attempt.clone()));
        attempt
    };
    let failed = |detail: &str| {
        let error = crate::control::ControlError::Lost { detail: detail.to_owned() };
        Some(Err(WorkerError::Control(error)))
    };
    let first = accepting();
    let mut waiting = Box::pin(worker.node.connected(&peer));
    assert!(waiting.as_mut().now_or_never().is_none());
    let second = accepting();
    first.set(failed("first"));
    assert!(waiting.as_mut().now_or_never().is_none(), "it began before this one asked");
    let _third = accepting();
    second.set(failed("second"));
    let error = waiting.now_or_never().unwrap().unwrap_err();
    assert!(error.to_string().contains("second"), "{error}");
    // An error that another attempt would not change is returned at once.
    let attempt = accepting();
    let mut waiting = Box::pin(worker.node.connected(&peer));
    assert!(waiting.as_mut().now_or_never().is_none());
    let _next = accepting();
    attempt.set(Some(Err(WorkerError::ShutDown)));
    assert!(matches!(waiting.now_or_never(), Some(Err(WorkerError::ShutDown))));
    // An attempt of this worker that began for this caller is not repeated, either.
    set_link(&peer, Link::Idle);
    let mut waiting = Box::pin(worker.node.connected(&peer));
    assert!(waiting.as_mut().now_or_never().is_none());
    let own = match &peer.lock().link {
        Link::Connecting(attempt) => attempt.clone(),
        link => panic!("{link:?}"),
    };
    let _next = accepting();
    own.set(failed("own"));
    let error = waiting.now_or_never().unwrap().unwrap_err();
    assert!(error.to_string().contains("own"), "{error}");
}

#[tokio::test]
async fn the_connection_in_use_is_found_without_the_lock_and_one_made_meanwhile_with_it() {
    let (worker, peer) = (worker().await, peer());
    let connection = connection(&worker).await;
    let found = || match peer.connection_or_attempt() {
        ConnectionOrAttempt::Connection(found) => Arc::ptr_eq(&found, &connection),
        _ => false,
    };
    // Another thread reads `in_use` before the link is replaced.
    peer.inner.in_use.store(Some(connection.clone()));
    assert!(found());
    assert_eq!(peer.find(|connection| Some(connection.kind)), Some(connection.kind));
    peer.inner.in_use.store(None);
    assert_eq!(peer.find(|connection| Some(connection.kind)), None);
    set_link(&peer, up(&connection));
    // Another thread reads `in_use` before the connection is up, and takes the lock afterwards.
    peer.inner.in_use.store(None);
    assert!(found());
    connection.set_over(&gone());
    peer.inner.in_use.store(Some(connection.clone()));
    assert!(peer.live_connection().is_none() && !found(), "it is over");
}
