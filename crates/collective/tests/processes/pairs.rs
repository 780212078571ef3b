//! TransportMultiProc IoErrors and IoTimeouts: rank 0 is killed or stopped at defined points of its exchanges with the others.
//! Each of these gets an error that names rank 0, in bounded time, and they go on with each other.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use futures::future::join_all;
use rustix::process::Signal;
use tensorwire_collective::{Group, GroupError};
use tensorwire_rendezvous::Tensor;

use crate::{
    child::{ROUNDS, failed, say},
    harness::{LIMIT, Other, STEP, Test, tell, test},
};

/// Lengths of messages, in bytes: one that travels inside a message, and one that almost does not.
const LENGTHS: [usize; 2] = [4, 4000];

/// What the others do with rank 0: receive what it never sends, send what it never receives, receive from any rank, and exchange
/// messages and contents of buffers all the time.
const EXCHANGES: [&str; 5] = ["recv", "send", "any", "messages", "buffers"];

/// The round in which rank 0 is lost during the exchanges.
const LOST_IN: [u64; 2] = [1, 5];

const TAG: u64 = 7;

/// In a child: does `what` until it fails, and reports the error.
pub(crate) async fn run(group: &Group, what: &str, length: usize) {
    let others = (1..group.size()).filter(|rank| *rank != group.rank());
    say("round 0: begun");
    let ended = match what {
        "recv" => group.recv(0, TAG).await.map(drop),
        "any" => group.recv(.., TAG).await.map(drop),
        "send" => send(group, 0, length).await,
        "messages" if group.rank() == 0 => {
            all(others.map(async |rank| answer(group, rank, length).await)).await
        }
        "messages" => ask(group, length).await,
        "buffers" if group.rank() == 0 => all(others.map(async |rank| swap(group, rank, length).await)).await,
        "buffers" => swap(group, 0, length).await,
        "others" => {
            all(others.map(async |rank| {
                let sent = send(group, rank, length);
                let (sent, received) = futures::join!(sent, group.recv(rank, TAG).into_future());
                sent.and(received.map(drop))
            }))
            .await
        }
        other => panic!("no exchange of these tests: {other}"),
    };
    match ended {
        Ok(()) => say("round 1: done"),
        Err(error) => say(&failed(&error)),
    }
}

async fn all(
    each: impl Iterator<Item = impl Future<Output = Result<(), GroupError>>>,
) -> Result<(), GroupError> {
    join_all(each).await.into_iter().collect()
}

async fn send(group: &Group, to: usize, length: usize) -> Result<(), GroupError> {
    let tensor = Tensor::from_values(group.worker().pool(), &[length as u64], &vec![1u8; length])?;
    group.send(to, TAG, tensor)?.await
}

async fn ask(group: &Group, length: usize) -> Result<(), GroupError> {
    for round in 1.. {
        send(group, 0, length).await?;
        assert_eq!(group.recv(0, TAG).await?.tensor.bytes().len(), length);
        report(round);
    }
    Ok(())
}

async fn answer(group: &Group, rank: usize, length: usize) -> Result<(), GroupError> {
    for round in 1.. {
        group.recv(rank, TAG).await?;
        send(group, rank, length).await?;
        report_with(group, rank, round);
    }
    Ok(())
}

async fn swap(group: &Group, rank: usize, length: usize) -> Result<(), GroupError> {
    let (mut outgoing, mut incoming) =
        (group.send_buffer(rank, TAG, length)?, group.recv_buffer(rank, TAG, length)?);
    for round in 1u64.. {
        outgoing.bytes_mut().fill(round as u8);
        outgoing.send(0, length, 0).await?;
        outgoing.wait_send().await?;
        incoming.wait_recv().await?;
        assert!(incoming.bytes().iter().all(|byte| *byte == round as u8), "round {round}");
        report_with(group, rank, round);
    }
    Ok(())
}

/// Rank 0 exchanges with several ranks, and reports the rounds with each.
fn report_with(group: &Group, rank: usize, round: u64) {
    match group.rank() {
        0 if round <= ROUNDS => say(&format!("round {round} with rank {rank}: exchanged")),
        0 => {}
        _ => report(round),
    }
}

fn report(round: u64) {
    if round <= ROUNDS {
        say(&format!("round {round}: exchanged"));
    }
}

/// Rank 0 and the others, all in the exchange: rank 0 has exchanged `round` rounds with each.
fn begun(test: &Test, size: usize, what: &str, length: usize, round: u64) -> (Other, Vec<Other>) {
    let mut ranks = test.group(size);
    let takes_part = ["messages", "buffers"].contains(&what);
    let command = format!("pair {what} {length}");
    tell(&mut ranks[usize::from(!takes_part)..], &[&command]);
    for other in &ranks[usize::from(!takes_part)..] {
        other.expect("round 0: begun");
    }
    if takes_part {
        let with = |rank| format!("round {round} with rank {rank}: exchanged");
        let mut awaited: BTreeSet<_> = (1..size).map(with).collect();
        while !awaited.is_empty() {
            awaited.remove(&ranks[0].hear());
        }
    }
    (ranks.remove(0), ranks)
}

/// The others exchange messages with each other.
fn go_on(mut others: Vec<Other>) {
    tell(&mut others, &["pair others 1000"]);
    for other in &others {
        other.expect("round 0: begun");
        other.expect("round 1: done");
    }
    others.into_iter().for_each(Other::end);
}

fn killed(name: &'static str, fabric: &'static str, what: &str) {
    test(name, fabric, LIMIT, |test| {
        for size in 2..=4 {
            let (length, round) = (LENGTHS[size % 2], LOST_IN[size / 2 % 2]);
            let (lost, others) = begun(&test, size, what, length, round);
            let killed = Instant::now();
            lost.kill();
            for other in &others {
                let error = other.failure_until(killed + 2 * LIMIT);
                assert!(error.starts_with("RankLost: ") && error.contains("rank 0 is lost: "), "{error}");
            }
            println!("{fabric}, {size} ranks, {what}, {length} bytes: {:?}", killed.elapsed());
            go_on(others);
        }
    });
}

fn stopped(name: &'static str, fabric: &'static str, what: &str, liveness: Option<Duration>) {
    test(name, fabric, LIMIT, |mut test| {
        test.liveness = liveness.unwrap_or(test.liveness);
        let (lost, others) = begun(&test, 3, what, LENGTHS[1], LOST_IN[1]);
        let stopped = Instant::now();
        lost.signal(Signal::STOP);
        for other in &others {
            let error = other.failure_until(stopped + 2 * LIMIT);
            let kind = error.split(':').next().unwrap_or_default();
            let expected = if liveness.is_some() { "RankLost" } else { "TimedOut" };
            assert!(kind == expected && (error.contains("rank 0") || error.contains("ranks [0")), "{error}");
        }
        let noticed = stopped.elapsed();
        println!("{fabric}, {what}: {noticed:?}");
        assert!(liveness.is_some() || noticed >= LIMIT / 2, "{noticed:?}");
        go_on(others);
        lost.signal(Signal::CONT);
        lost.failure_until(Instant::now() + STEP);
        lost.end();
    });
}

/// Rank 2 has never connected to rank 0, which accepts connections but answers nothing on them.
fn stopped_before_it_met_others(name: &'static str, fabric: &'static str) {
    test(name, fabric, LIMIT, |mut test| {
        test.liveness = NOTICED;
        let mut others = test.group(3);
        let lost = others.remove(0);
        let stopped = Instant::now();
        lost.signal(Signal::STOP);
        tell(&mut others, &["pair recv 4"]);
        for other in &others {
            let error = other.failure_until(stopped + 2 * LIMIT);
            assert!(error.starts_with("RankLost: ") && error.contains("rank 0 is lost: "), "{error}");
        }
        go_on(others);
        lost.signal(Signal::CONT);
        lost.end();
    });
}

#[test]
fn stopped_before_it_met_others_over_shm() {
    stopped_before_it_met_others("pairs::stopped_before_it_met_others_over_shm", "shm");
}

#[test]
fn stopped_before_it_met_others_over_tcp() {
    stopped_before_it_met_others("pairs::stopped_before_it_met_others_over_tcp", "tcp");
}

macro_rules! kills {
    ($($name:ident: $fabric:literal, $exchange:expr;)*) => {
        $(#[test] fn $name() {
            killed(concat!("pairs::", stringify!($name)), $fabric, $exchange);
        })*
    };
}
kills! {
    killed_before_it_sends_over_shm: "shm", EXCHANGES[0];
    killed_before_it_receives_over_shm: "shm", EXCHANGES[1];
    killed_while_others_receive_from_any_over_shm: "shm", EXCHANGES[2];
    killed_among_messages_over_shm: "shm", EXCHANGES[3];
    killed_among_buffers_over_shm: "shm", EXCHANGES[4];
    killed_before_it_sends_over_tcp: "tcp", EXCHANGES[0];
    killed_before_it_receives_over_tcp: "tcp", EXCHANGES[1];
    killed_while_others_receive_from_any_over_tcp: "tcp", EXCHANGES[2];
    killed_among_messages_over_tcp: "tcp", EXCHANGES[3];
    killed_among_buffers_over_tcp: "tcp", EXCHANGES[4];
}

macro_rules! stops {
    ($($name:ident: $fabric:literal, $exchange:expr, $liveness:expr;)*) => {
        $(#[test] fn $name() {
            stopped(concat!("pairs::", stringify!($name)), $fabric, $exchange, $liveness);
        })*
    };
}

/// Shorter than [`LIMIT`], and longer than a busy machine delays a rank.
const NOTICED: Duration = Duration::from_secs(2);

stops! {
    stopped_among_messages_over_shm: "shm", EXCHANGES[3], None;
    stopped_among_buffers_over_shm: "shm", EXCHANGES[4], None;
    stopped_among_messages_over_tcp: "tcp", EXCHANGES[3], None;
    stopped_among_buffers_over_tcp: "tcp", EXCHANGES[4], None;
    stopped_and_noticed_over_shm: "shm", EXCHANGES[3], Some(NOTICED);
    stopped_and_noticed_over_tcp: "tcp", EXCHANGES[4], Some(NOTICED);
}
