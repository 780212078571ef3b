//! Which tasks poll for the reply to a request.

use tensorwire_protocol::{Awaiting, ReceiveOptions};

use crate::support::{
    STEP,
    Side::A,
    bytes_of, looks,
    pair::{Pair, small},
};

/// How often a receive polls for its reply, which comes once its task sleeps. If `known`, an earlier value had the same metadata.
fn looks_of(awaiting: Awaiting, length: usize, known: bool) -> u32 {
    let mut pair = Pair::new(small());
    let value = |pair: &Pair| pair.b.source.send(STEP, "k", bytes_of(length as u64), vec![7; length]);
    if known {
        value(&pair);
        let first = pair.receive(A, STEP, "k");
        pair.run();
        assert!(first.take().is_some_and(|received| received.is_ok()));
    }
    looks::allow();
    let (connection, memory) = (pair.a.connection.clone(), pair.a.memory.clone());
    let options = ReceiveOptions { awaiting, ..ReceiveOptions::default() };
    let receive =
        pair.tasks.spawn(async move { connection.receive_with(STEP, "k", &memory, options).await.is_ok() });
    pair.run();
    value(&pair);
    pair.run();
    assert_eq!(receive.take(), Some(true));
    looks::counted()
}

#[test]
fn a_receive_that_is_awaited_alone_looks_and_one_beside_others_never_does() {
    for (length, known) in [(8, false), (8, true), (4096, false), (4096, true)] {
        assert!(looks_of(Awaiting::Alone, length, known) > 0, "{length} bytes, known: {known}");
        assert_eq!(looks_of(Awaiting::Beside, length, known), 0, "{length} bytes, known: {known}");
    }
}
