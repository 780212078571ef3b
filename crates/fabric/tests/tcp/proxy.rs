//! Connections through a proxy that delays, splits, cuts, half-closes or stops the streams.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::Arc,
    time::Duration,
};

use futures::future::join;
use tensorwire_fabric::{
    ConnectParams, ConnectionData, FabricError, Immediate, LossCause, QueuePair, Role, Runtime,
};
use tensorwire_fabric_tcp::TcpConfig;

use super::{
    HOST,
    raw::{Local, address},
};
use crate::contract::{
    Flavour, bounded,
    pair::{DEPTHS, STEP_LIMIT, end_of, immediate, pattern, step},
};

/// What the proxy does with the bytes from the dialer to the acceptor. Counts begin with the handshake's first byte.
#[derive(Debug, Clone, Copy)]
enum Middle {
    /// Passes on at most this many bytes at a time.
    Split(usize),
    /// Passes on this many bytes, and then closes both streams.
    Cut(usize),
    /// Passes on this many bytes, and then ends that direction only.
    HalfClose(usize),
    /// Passes on this many bytes, and then reads nothing more.
    Stop(usize),
}

/// Passes bytes on up to the middle's limit, or until one side closes.
fn pass(mut from: TcpStream, mut to: TcpStream, middle: Middle) {
    let (split, limit) = match middle {
        Middle::Split(split) => (split, usize::MAX),
        Middle::Cut(limit) | Middle::HalfClose(limit) | Middle::Stop(limit) => (64 << 10, limit),
    };
    let (mut buffer, mut passed) = (vec![0; split], 0);
    while passed < limit {
        let wanted = split.min(limit - passed);
        let Ok(read @ 1..) = from.read(&mut buffer[..wanted]) else { break };
        if to.write_all(&buffer[..read]).is_err() {
            break;
        }
        passed += read;
    }
    match middle {
        Middle::Stop(_) if passed == limit => {
            // Holds both open, and reads nothing, until the other direction ends.
            let _ = to.read(&mut [0; 1]);
        }
        Middle::HalfClose(_) => {
            let _ = to.shutdown(Shutdown::Write);
        }
        Middle::Cut(_) | Middle::Split(_) | Middle::Stop(_) => {
            let _ = to.shutdown(Shutdown::Both);
            let _ = from.shutdown(Shutdown::Both);
        }
    }
}

/// Connection data that leads to the same side through the middle.
fn through(data: &ConnectionData, middle: Middle) -> ConnectionData {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let mut led = data.clone();
    led.0[19..21].copy_from_slice(&listener.local_addr().unwrap().port().to_le_bytes());
    let to = (HOST, address(data).port);
    std::thread::spawn(move || {
        let (dialer, _) = listener.accept().unwrap();
        let acceptor = TcpStream::connect(to).unwrap();
        for stream in [&dialer, &acceptor] {
            stream.set_nodelay(true).unwrap();
        }
        let back = (acceptor.try_clone().unwrap(), dialer.try_clone().unwrap());
        if !matches!(middle, Middle::Stop(_)) {
            std::thread::spawn(move || pass(back.0, back.1, Middle::Split(64 << 10)));
        } else {
            // The welcome passes; then this waits until the other direction reads.
            let (mut from, mut to) = back;
            let mut welcome = [0; crate::tcp::raw::WELCOME.len()];
            std::thread::spawn(move || {
                if from.read_exact(&mut welcome).is_ok() {
                    let _ = to.write_all(&welcome);
                }
            });
        }
        pass(dialer, acceptor, middle);
    });
    led
}

/// The two ends of a connection with `middle` between them: the dialer's and the acceptor's.
async fn connect(left: &Local, right: &Local, middle: Middle) -> (QueuePair, QueuePair) {
    let (dialer, acceptor) = (left.domain.prepare(DEPTHS).unwrap(), right.domain.prepare(DEPTHS).unwrap());
    let params = |peer, role| ConnectParams { peer, role, peer_address: None, limit: STEP_LIMIT };
    let dial = params(through(&acceptor.connection_data(), middle), Role::Dialer);
    let accept = params(dialer.connection_data(), Role::Acceptor);
    let both = join(dialer.connect(dial), acceptor.connect(accept));
    let (dialed, accepted) = step(&left.runtime, "connecting", both).await;
    (dialed.unwrap().spawn(&*left.runtime), accepted.unwrap().spawn(&*right.runtime))
}

fn sides(runtime: Arc<dyn Runtime>) -> (Local, Local) {
    (Local::new(runtime.clone()), Local::new(runtime))
}

/// Bytes of the dialer's hello, and of a header.
const HELLO: usize = 50;
const HEADER: usize = 40;

fn assert_lost(error: &FabricError) {
    let causes = [LossCause::EndOfFile, LossCause::Reset];
    assert!(
        matches!(error, FabricError::PeerLost { cause, .. } if causes.contains(cause)),
        "unexpected: {error}"
    );
}

#[test]
fn pieces_of_any_size_make_no_difference() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let (left, right) = sides(runtime);
        for (split, length) in [(1, 3000), (7, 30_000), (4097, 3 << 20)] {
            let (to_right, to_left) = connect(&left, &right, Middle::Split(split)).await;
            let grant = right.receive.grant(length);
            to_right.add_remote_region(grant.region);
            let write = to_right.write_imm(left.source.filled(length, 3), grant.range, Immediate(1));
            let (written, arrival) = left.step("the write", join(write, to_left.next_arrival())).await;
            written.unwrap();
            assert_eq!(immediate(arrival.unwrap()), (1, length as u64));
            assert!(grant.take()[..] == pattern(length, 3)[..], "split into {split}");
        }
    });
}

#[test]
fn a_cut_anywhere_is_a_loss_at_both_ends() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let (left, right) = sides(runtime);
        // From the first frame's first byte on: the handshake is over then.
        for after in [1, HEADER - 1, HEADER, HEADER + 1, 100_000, (1 << 20) + HEADER, (1 << 20) + 2 * HEADER]
        {
            for cut in [Middle::Cut, Middle::HalfClose] {
                let (to_right, to_left) = connect(&left, &right, cut(HELLO + after)).await;
                let grant = right.receive.grant(8 << 20);
                to_right.add_remote_region(grant.region);
                let write = to_right.write_imm(left.source.filled(8 << 20, 3), grant.range, Immediate(1));
                assert_lost(&end_of(&right.runtime, &to_left).await);
                let _ended_either_way = left.step("the write", write).await;
                // The half-closed side notices that its peer has left.
                end_of(&left.runtime, &to_right).await;
                right.step("the close", to_left.close()).await;
                grant.granted.end(tensorwire_memory::GrantEnd::QueuePairDrained).unwrap();
            }
        }
        assert_eq!(left.source.pool.stats().used_bytes, 0);
        assert_eq!(right.receive.pool.stats().leaked_bytes, 0);
    });
}

#[test]
fn a_middle_that_takes_nothing_is_a_loss_within_the_stall_limit() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let config = TcpConfig { stall_limit: Duration::from_secs(1), ..TcpConfig::default() };
        let left = Local::with_config(runtime.clone(), config);
        let right = Local::new(runtime);
        let (to_right, to_left) = connect(&left, &right, Middle::Stop(HELLO + 100_000)).await;
        let grant = right.receive.grant(64 << 20);
        to_right.add_remote_region(grant.region);
        let write = to_right.write_imm(left.source.filled(64 << 20, 3), grant.range, Immediate(1));
        let error = left.step("the write", write).await.unwrap_err();
        let unanswered = LossCause::RetryExceeded;
        assert!(
            matches!(error, FabricError::PeerLost { cause, .. } if cause == unanswered),
            "unexpected: {error}"
        );
        assert_eq!(left.source.pool.stats().used_bytes, 0);
        // The other side has not noticed it, and can still close.
        right.step("the close", to_left.close()).await;
        grant.granted.end(tensorwire_memory::GrantEnd::QueuePairDrained).unwrap();
    });
}
