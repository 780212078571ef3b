use std::{
    net::Ipv4Addr,
    sync::atomic::AtomicUsize,
    task::{Wake, Waker},
};

use futures::FutureExt;
use rustix::io::Errno;
use tokio::{io::AsyncWriteExt, runtime::Builder};

use super::*;
use crate::clock::Clock;

/// Refusals after which no connection waits.
const FREE_REFUSALS: u32 = 64;
const REFUSAL: Duration = Duration::from_millis(5);
const ARRIVAL_LIMIT: Duration = Duration::from_secs(30);

/// A door, and its strangers.
struct Lobby {
    door: Arc<Door>,
    clock: Clock,
    listener: TcpListener,
    strangers: Vec<(TcpStream, Newcomer)>,
}

impl Lobby {
    async fn with_limit(limit: usize) -> Self {
        let clock = Clock::default();
        let door = Door::new(limit, ARRIVAL_LIMIT, Arc::new(clock.clone()));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        Self { door, clock, listener, strangers: Vec::new() }
    }

    /// One more stranger.
    async fn come(&mut self) -> Arc<Stranger> {
        let own = self.listener.local_addr().unwrap();
        let client = TcpStream::connect(own).await.unwrap();
        let (stream, peer) = self.listener.accept().await.unwrap();
        let newcomer = self.door.enter(stream, own, peer);
        let stranger = newcomer.0.as_ref().unwrap().1.stranger().clone();
        self.strangers.push((client, newcomer));
        stranger
    }

    /// One more stranger, which announces the kind of its connection.
    async fn come_for(&mut self, visit: Visit) -> Arc<Stranger> {
        let stranger = self.come().await;
        stranger.note(visit);
        stranger
    }

    fn inside(&self) -> usize {
        self.door.lock().len()
    }

    /// Refusals since [`FREE_REFUSALS`] were used up.
    fn refusals(&self) -> u32 {
        self.door.wait().div_duration_f64(REFUSAL).round() as u32
    }
}

/// Runs a test on a runtime of one thread.
fn alone(test: impl Future<Output = ()>) {
    Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
}

#[test]
fn who_has_come_least_far_makes_room_and_of_these_the_oldest() {
    alone(async {
        let mut lobby = Lobby::with_limit(5).await;
        let attached = lobby.come().await;
        assert!(attached.is_arriving());
        assert!(attached.attach() && !attached.attach());
        assert!(!attached.is_arriving());
        let [older, newer] = [lobby.come().await, lobby.come().await];
        let leaving = lobby.come().await;
        leaving.leave();
        assert_eq!(lobby.door.wait(), Duration::ZERO);
        let last = lobby.come().await;
        lobby.clock.pass(ATTACHED_GRACE);
        let mut guests = vec![leaving, older, newer, last, attached];
        for _ in 0..4 {
            let pushed = guests.remove(0);
            let newest = lobby.come().await;
            assert!(pushed.is_evicted() && guests.iter().all(|guest| !guest.is_evicted()));
            assert_eq!(lobby.inside(), 5);
            newest.admit();
            guests.push(lobby.come().await);
        }
        assert!(!guests[0].is_evicted() && guests[0].stage() == stage::ATTACHED);
    });
}

#[test]
fn e_a_flood_of_one_kind_pushes_out_its_own_and_nobody_of_the_other() {
    for (flood, few) in [(Visit::Data, Visit::Session), (Visit::Session, Visit::Data)] {
        alone(async move {
            let mut lobby = Lobby::with_limit(8).await;
            // Older than all connections of the flood.
            let honest = [lobby.come_for(few).await, lobby.come_for(few).await];
            let silent = lobby.come().await;
            for _ in 0..50 {
                let dial = lobby.come_for(flood).await;
                if flood == Visit::Session {
                    dial.attach();
                }
                lobby.clock.pass(ATTACHED_GRACE);
                assert!(honest.iter().all(|stranger| !stranger.is_evicted()), "{flood:?}");
            }
            assert!(silent.is_evicted(), "one that has sent nothing goes first");
            let stats = lobby.door.stats();
            assert_eq!((lobby.inside(), stats.accepted, stats.evicted), (8, 53, 45));
        });
    }
}

#[test]
fn where_no_kind_has_more_strangers_only_progress_and_age_count() {
    use received::{DATA, NOTHING, SESSION, SOMETHING};
    // What the older and the newer one have sent, whether each is attached, and whether the older one is evicted.
    for (older, newer, attached, older_goes) in [
        (SESSION, DATA, [false, false], true),
        (DATA, SESSION, [false, false], true),
        (SOMETHING, SESSION, [false, false], true),
        (SESSION, SOMETHING, [false, false], true),
        (SOMETHING, NOTHING, [false, false], false),
        (SESSION, DATA, [true, false], false),
        (DATA, SESSION, [false, true], true),
    ] {
        alone(async move {
            let mut lobby = Lobby::with_limit(2).await;
            let guests = [lobby.come().await, lobby.come().await];
            for (guest, (sent, is_attached)) in guests.iter().zip([older, newer].into_iter().zip(attached)) {
                guest.received.store(sent, Ordering::Release);
                if is_attached {
                    guest.attach();
                }
            }
            lobby.clock.pass(ATTACHED_GRACE);
            lobby.come().await;
            let gone = guests.map(|guest| guest.is_evicted());
            assert_eq!(gone, [older_goes, !older_goes], "{older} {newer} {attached:?}");
        });
    }
}

#[test]
fn a_stranger_has_a_moment_unless_there_are_too_many() {
    alone(async {
        let mut lobby = Lobby::with_limit(2).await;
        let (first, second) = (lobby.come().await, lobby.come().await);
        assert_eq!(lobby.door.wait(), ARRIVING_GRACE);
        lobby.clock.pass(ARRIVING_GRACE / 2);
        second.attach();
        assert_eq!(lobby.door.wait(), ARRIVING_GRACE / 2);
        assert_eq!(second.grace(lobby.clock.now()), ATTACHED_GRACE - ARRIVING_GRACE / 2);
        let third = lobby.come().await;
        assert!(first.is_evicted() && !second.is_evicted() && !third.is_evicted(), "the oldest of too many");
        assert_eq!(first.grace(lobby.clock.now()), Duration::ZERO);
    });
}

#[test]
fn whoever_waits_for_room_is_told_of_it() {
    alone(async {
        let mut lobby = Lobby::with_limit(2).await;
        let (one, other) = (lobby.come().await, lobby.come().await);
        let door = lobby.door.clone();
        let mut room = Box::pin(door.room());
        assert!(room.as_mut().now_or_never().is_none());
        one.admit();
        assert_eq!(lobby.inside(), 1);
        assert!(room.as_mut().now_or_never().is_some());
        lobby.come().await;
        let mut room = Box::pin(door.room());
        assert!(room.as_mut().now_or_never().is_none());
        other.leave();
        assert!(room.as_mut().now_or_never().is_some(), "one that leaves may be pushed out");
    });
}

#[test]
fn out_of_descriptors_those_without_grace_make_room() {
    alone(async {
        let mut lobby = Lobby::with_limit(64).await;
        let door = lobby.door.clone();
        let mut guests = Vec::new();
        for _ in 0..4 {
            guests.push(lobby.come().await);
        }
        door.give_up_descriptors();
        assert!(guests.iter().all(|guest| !guest.is_evicted()), "their grace is not over");
        lobby.clock.pass(ARRIVING_GRACE);
        let mut gone = Box::pin(door.out_of_descriptors(ARRIVAL_LIMIT));
        assert!(gone.as_mut().now_or_never().is_none());
        assert!(guests[..3].iter().all(|guest| guest.is_evicted()) && !guests[3].is_evicted());
        lobby.strangers.remove(0);
        assert!(gone.now_or_never().is_some(), "its descriptor is free");
        let mut waits = Box::pin(door.out_of_descriptors(Duration::from_millis(1)));
        assert!(waits.as_mut().now_or_never().is_none());
        lobby.clock.pass(Duration::from_millis(1));
        assert!(waits.now_or_never().is_some(), "nobody goes, and the wait is bounded");
    });
}

/// An error of the operating system.
fn os(error: Errno) -> io::Error {
    error.into()
}

#[test]
fn a_connection_that_failed_before_it_was_accepted_costs_no_pause() {
    alone(async {
        let lobby = Lobby::with_limit(64).await;
        for error in [Errno::CONNABORTED, Errno::CONNRESET, Errno::INTR] {
            let recovered = lobby.door.recover(&lobby.listener, &os(error)).now_or_never();
            assert!(recovered.is_some(), "{error}");
        }
        assert_eq!(*lobby.door.complained.lock().unwrap(), None, "the peers did that");
    });
}

#[test]
fn a_failed_accept_is_followed_by_a_pause() {
    alone(async {
        // Whether a connection waits; the error; whether it is logged, and whether a stranger is evicted.
        for (waits, error, is_logged, makes_room) in [
            (false, Errno::MFILE, false, false),
            (true, Errno::MFILE, true, true),
            (false, Errno::NETDOWN, true, false),
            (true, Errno::NETDOWN, true, false),
        ] {
            let mut lobby = Lobby::with_limit(64).await;
            let stranger = lobby.come().await;
            lobby.clock.pass(ARRIVING_GRACE);
            let own = lobby.listener.local_addr().unwrap();
            let _waiting = if waits { Some(TcpStream::connect(own).await.unwrap()) } else { None };
            let door = lobby.door.clone();
            let error = os(error);
            let mut pause = Box::pin(door.recover(&lobby.listener, &error));
            assert!(pause.as_mut().now_or_never().is_none());
            let complained = door.complained.lock().unwrap().is_some();
            assert_eq!((complained, stranger.is_evicted()), (is_logged, makes_room), "{waits} {error}");
            lobby.clock.pass(ACCEPT_PAUSE - Duration::from_millis(1));
            assert!(pause.as_mut().now_or_never().is_none());
            lobby.clock.pass(Duration::from_millis(1));
            assert!(pause.now_or_never().is_some());
        }
    });
}

#[test]
fn failed_accepts_are_logged_now_and_then() {
    alone(async {
        let lobby = Lobby::with_limit(64).await;
        let start = lobby.clock.now();
        let complain = || {
            lobby.door.complain(&os(Errno::NETDOWN));
            lobby.door.complained.lock().unwrap().unwrap() - start
        };
        assert_eq!(complain(), Duration::ZERO);
        lobby.clock.pass(COMPLAINT - Duration::from_millis(1));
        assert_eq!(complain(), Duration::ZERO, "one was logged");
        lobby.clock.pass(Duration::from_millis(1));
        assert_eq!(complain(), COMPLAINT);
    });
}

#[test]
fn connections_wait_for_room_and_for_a_listener_that_works() {
    alone(async {
        let mut lobby = Lobby::with_limit(1).await;
        lobby.come().await;
        let (own, door) = (lobby.listener.local_addr().unwrap(), lobby.door.clone());
        let client = TcpStream::connect(own).await.unwrap();
        let mut next = Box::pin(door.accept(&lobby.listener));
        assert!(next.as_mut().now_or_never().is_none());
        // After a connection to another listener, the runtime has handled all events of this one.
        let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let _client = TcpStream::connect(other.local_addr().unwrap()).await.unwrap();
        other.accept().await.unwrap();
        assert!(next.as_mut().now_or_never().is_none(), "there is no room");
        lobby.clock.pass(ARRIVING_GRACE);
        let newcomer = next.await;
        let stranger = newcomer.0.as_ref().unwrap().1.stranger();
        assert_eq!(stranger.peer_address(), client.local_addr().unwrap());
        lobby.clock.pass(ARRIVING_GRACE);
        rustix::net::shutdown(&lobby.listener, rustix::net::Shutdown::Both).unwrap();
        assert!(door.accept(&lobby.listener).now_or_never().is_none());
        assert!(door.complained.lock().unwrap().is_some(), "it accepts nothing any more");
    });
}

#[test]
fn a_storm_of_peers_is_queued() {
    // More than the standard library's queue holds, and fewer than the queue of each system.
    const PEERS: usize = 200;
    let longest = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
    let listener = listen(&[(Ipv4Addr::LOCALHOST, 0).into()], &Congestion::default()).unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    let own = listener.local_addr().unwrap();
    let connect = || std::net::TcpStream::connect_timeout(&own, ARRIVAL_LIMIT).unwrap();
    let waiting: Vec<_> = (0..PEERS.min(longest.trim().parse().unwrap())).map(|_| connect()).collect();
    for client in waiting {
        assert_eq!(listener.accept().unwrap().1, client.local_addr().unwrap());
    }
}

#[test]
fn the_congestion_control_is_the_systems_or_the_one_that_is_named() {
    let congestion =
        |listener: &std::net::TcpListener| rustix::net::sockopt::tcp_congestion(listener).unwrap();
    let listening = |named: &Congestion| listen(&[(Ipv4Addr::LOCALHOST, 0).into()], named).unwrap();
    let plain = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let default = listening(&Congestion::default());
    assert_eq!(congestion(&default), congestion(&plain));
    // Every system has it, and allows it to all users.
    let reno = Congestion::named("reno");
    let listener = listening(&reno);
    assert_eq!(congestion(&listener), "reno");
    let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    rustix::event::poll(
        &mut [rustix::event::PollFd::new(&listener, rustix::event::PollFlags::IN)],
        Some(&rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 }),
    )
    .unwrap();
    let (accepted, _) = listener.accept().unwrap();
    assert_eq!(rustix::net::sockopt::tcp_congestion(&accepted).unwrap(), "reno", "inherited");
    drop(client);
    assert!(!reno.was_refused());
}

#[test]
fn a_refused_congestion_control_leaves_the_systems() {
    let plain = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let unknown = Congestion::named("no-such");
    let listener = listen(&[(Ipv4Addr::LOCALHOST, 0).into()], &unknown).unwrap();
    let congestion =
        |listener: &std::net::TcpListener| rustix::net::sockopt::tcp_congestion(listener).unwrap();
    assert_eq!(congestion(&listener), congestion(&plain));
    assert!(unknown.was_refused());
}

#[test]
fn near_the_limit_of_descriptors_half_as_many_are_kept() {
    alone(async {
        let mut lobby = Lobby::with_limit(64).await;
        for _ in 0..11 {
            lobby.come().await;
        }
        lobby.clock.pass(ARRIVING_GRACE);
        let own = lobby.listener.local_addr().unwrap();
        let _client = TcpStream::connect(own).await.unwrap();
        let (stream, peer) = lobby.listener.accept().await.unwrap();
        let most = Limit::OpenFiles.value().unwrap();
        let high = rustix::io::fcntl_dupfd_cloexec(&stream, i32::try_from(most - 8).unwrap()).unwrap();
        let stream = TcpStream::from_std(std::net::TcpStream::from(high)).unwrap();
        let _last = lobby.door.enter(stream, own, peer);
        assert_eq!(lobby.inside(), 5, "with the newest, half of eleven");
    });
}

#[test]
fn who_is_refused_for_what_it_says_takes_a_place_once() {
    alone(async {
        let mut lobby = Lobby::with_limit(64).await;
        (0..FREE_REFUSALS).for_each(|_| lobby.door.refused());
        let mut expected = 0;
        // What it did, whether it has sent something, how it ends, and whether that is a refusal.
        let arriving: fn(&Stranger) = |_| {};
        for (before, has_spoken, was_held_back, is_refused) in [
            (arriving, false, false, false),
            (arriving, true, false, true),
            (arriving, true, true, true),
            (|stranger| _ = stranger.attach(), true, false, true),
            // A connection that opens a session has sent something.
            (|stranger| _ = stranger.attach(), false, false, true),
            (|stranger| stranger.leave(), true, false, true),
            (|stranger| stranger.leave(), true, true, true),
            (|stranger| stranger.leave(), false, false, true),
            (|stranger| stranger.evict(), true, false, false),
            (|stranger| stranger.evict(), true, true, true),
            (|stranger| stranger.admit(), true, true, false),
            (|stranger| (stranger.admit(), stranger.leave()).1, true, false, false),
        ] {
            let stranger = lobby.come().await;
            if has_spoken {
                stranger.note(Visit::Session);
            }
            before(&stranger);
            stranger.gone(was_held_back);
            expected += u32::from(is_refused);
            assert_eq!((lobby.refusals(), lobby.inside()), (expected, 0), "{stranger:?}");
            assert!(stranger.is_evicted());
            // Its presence ends, too, which is not counted again.
            lobby.strangers.clear();
            assert_eq!(lobby.refusals(), expected);
        }
    });
}

#[test]
fn one_that_is_held_back_is_so_until_it_proves_itself() {
    alone(async {
        let mut lobby = Lobby::with_limit(64).await;
        let stranger = lobby.come().await;
        let (_, mut newcomer) = lobby.strangers.pop().unwrap();
        let (_, presence) = newcomer.0.as_mut().unwrap();
        assert!(!presence.is_held_back());
        presence.hold_back();
        assert!(presence.is_held_back());
        stranger.admit();
        assert!(!presence.is_held_back());
    });
}

#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn whatever_happens_to_a_stranger_wakes_its_connection() {
    alone(async {
        let mut lobby = Lobby::with_limit(64).await;
        let steps: [fn(&Stranger); 4] =
            [|it| _ = it.attach(), Stranger::admit, Stranger::leave, Stranger::evict];
        for step in steps {
            let (stranger, woken) = (lobby.come().await, Arc::new(Woken::default()));
            let (_, newcomer) = lobby.strangers.last_mut().unwrap();
            let (_, presence) = newcomer.0.as_mut().unwrap();
            let waker = Waker::from(woken.clone());
            assert!(presence.poll_cut(&mut Context::from_waker(&waker)).is_ok());
            step(&stranger);
            assert_eq!(woken.0.load(Ordering::Relaxed), 1);
        }
    });
}

#[test]
fn each_stage_has_its_time() {
    let moment = Duration::from_millis(1);
    let aborted = Some(io::ErrorKind::ConnectionAborted);
    // Its time limit, and whether a timeout is counted.
    let arriving: fn(&Stranger) = |_| {};
    for (reach, limit, counted) in [
        (arriving, Some(ARRIVAL_LIMIT), 1),
        (|stranger| _ = stranger.attach(), None, 0),
        (|stranger| stranger.leave(), Some(LEAVING), 0),
    ] {
        alone(async move {
            let mut lobby = Lobby::with_limit(64).await;
            let stranger = lobby.come().await;
            let (_, mut newcomer) = lobby.strangers.pop().unwrap();
            let (_, presence) = newcomer.0.as_mut().unwrap();
            let mut context = Context::from_waker(Waker::noop());
            let mut cut = || presence.poll_cut(&mut context).err().map(|error| error.kind());
            reach(&stranger);
            assert_eq!(cut(), None);
            lobby.clock.pass(limit.unwrap_or(ARRIVAL_LIMIT * 2) - moment);
            assert_eq!(cut(), None);
            let Some(_) = limit else { return };
            lobby.clock.pass(moment);
            assert_eq!(cut(), Some(io::ErrorKind::TimedOut));
            assert_eq!((stranger.is_evicted(), cut()), (true, aborted));
            assert_eq!(lobby.door.stats().timed_out, counted);
        });
    }
}

#[test]
fn a_newcomer_becomes_a_guest_when_it_speaks_and_nothing_when_it_was_cut() {
    alone(async {
        let mut lobby = Lobby::with_limit(64).await;
        (0..FREE_REFUSALS).for_each(|_| lobby.door.refused());
        lobby.come().await;
        lobby.strangers.clear();
        assert_eq!((lobby.refusals(), lobby.inside()), (0, 0), "it has said nothing");
        let stranger = lobby.come().await;
        let (mut client, mut newcomer) = lobby.strangers.pop().unwrap();
        assert!((&mut newcomer).now_or_never().is_none());
        client.write_all(b"P").await.unwrap();
        let guest = newcomer.await.unwrap();
        assert!(Arc::ptr_eq(guest.presence.stranger(), &stranger) && guest.first == b'P');
        drop(guest);
        assert_eq!((lobby.refusals(), lobby.inside()), (1, 0), "it has spoken");
        lobby.come().await;
        let (client, newcomer) = lobby.strangers.pop().unwrap();
        drop(client);
        assert!(newcomer.await.is_none());
        assert_eq!((lobby.refusals(), lobby.inside()), (2, 0), "its end is all that it said");
        let stranger = lobby.come().await;
        let (_client, mut newcomer) = lobby.strangers.pop().unwrap();
        stranger.evict();
        assert!((&mut newcomer).await.is_none());
        assert_eq!((lobby.refusals(), lobby.inside()), (2, 0), "it is forgotten at once");
    });
}

#[test]
fn what_a_stranger_is_asked_ends_when_it_is_cut() {
    alone(async {
        let mut lobby = Lobby::with_limit(64).await;
        let stranger = lobby.come().await;
        let (_client, mut newcomer) = lobby.strangers.pop().unwrap();
        let (_, presence) = newcomer.0.as_mut().unwrap();
        assert_eq!(presence.unless_cut(std::future::ready(3)).await, Some(3));
        stranger.evict();
        assert_eq!(presence.unless_cut(std::future::pending::<u8>()).await, None);
    });
}
