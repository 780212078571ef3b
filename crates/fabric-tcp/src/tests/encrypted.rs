//! Bytes of an encrypted stream that were taken from the socket and not looked at yet.

use std::{
    net::TcpListener,
    sync::{Arc, atomic::Ordering},
    task::{Context, Waker},
};

use futures::future::try_join;

use verbs_reactor::{Capabilities, Immediate, QueuePair, QueuePairConfig, RegionTable, Spinner, Wait};

use super::{Count, POLLS_MAX, on_a_runtime};
use crate::{
    clock::Clock,
    driver::Driver,
    link::TcpLink,
    protection::Stream,
    tls::{
        TlsIdentity, TlsPurpose,
        test_certificates::{Authority, Wanted},
    },
};

/// More than one turn of receiving takes.
const NOTICES: u32 = 300;

fn identity() -> TlsIdentity {
    Authority::new().unwrap().issue(&Wanted::worker("/a")).unwrap().identity().unwrap()
}

/// Both ends of a stream under TLS.
async fn streams() -> (Stream, Stream) {
    let identity = identity();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let dialled = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    let [dialled, accepted] = [dialled, accepted].map(|stream| {
        stream.set_nodelay(true).unwrap();
        stream.set_nonblocking(true).unwrap();
        tokio::net::TcpStream::from_std(stream).unwrap()
    });
    let connect = identity.connect(TlsPurpose::Data, dialled);
    let (dialled, accepted) = try_join(connect, identity.accept(accepted)).await.unwrap();
    (dialled.into(), accepted.into())
}

fn link(clock: &Arc<Clock>, stream: Stream) -> (Arc<TcpLink>, QueuePair) {
    let depths = QueuePairConfig { send_depth: NOTICES, receive_depth: NOTICES };
    let table = Arc::new(RegionTable::new(&**clock));
    TcpLink::new(table, depths, Capabilities::WRITES, stream).unwrap()
}

/// One turn of a task that awaits an arrival takes all that the socket has, and leaves some of it decrypted. The runtime's
/// epoll then finds nothing readable, so only the task can wake the driver.
#[test]
fn the_driver_is_woken_for_what_a_turn_leaves_decrypted() {
    on_a_runtime(|tokio| {
        let clock = Arc::new(Clock::default());
        let (near, far) = tokio.block_on(streams());
        let (link_here, here) = link(&clock, near);
        let (_link_there, there) = link(&clock, far);
        let mut driver = Driver::new(link_here, clock, Spinner::new(Wait::Sleep));
        let count = Arc::new(Count::default());
        let waker = Waker::from(count.clone());
        // Readiness of the handshake is over.
        for _ in 0..POLLS_MAX {
            assert!(driver.poll(&mut Context::from_waker(&waker)).is_pending());
            if count.0.swap(0, Ordering::SeqCst) == 0 {
                break;
            }
        }

        let notices: Vec<_> = (0..NOTICES).map(|number| there.notify(Immediate(number))).collect();
        let awaiting = Context::from_waker(Waker::noop());
        for _ in 0..POLLS_MAX {
            if here.poll_arrivals(&awaiting).is_ready() {
                break;
            }
        }
        let taken = here.stats().arrivals;
        assert!(taken > 0 && taken < u64::from(NOTICES), "{taken} arrivals came with one turn");
        assert!(count.0.load(Ordering::SeqCst) > 0, "nobody goes on with the rest");
        for _ in 0..NOTICES {
            assert!(driver.poll(&mut Context::from_waker(&waker)).is_pending());
        }
        assert_eq!(here.stats().arrivals, u64::from(NOTICES));
        drop(notices);
    });
}
