//! The contract between two processes, over a fabric that every machine has. It also tests the support code that the
//! same rules over RDMA use.

use std::{
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use tensorwire_fabric::{FabricError, LossCause, Runtime};

use super::CONTROL;
use crate::{
    contract::{Flavour, Setup, pair::Pair},
    process_pair,
};

const APART: Setup = Setup { fabric: process_pair::fabric, peer_address: Some(CONTROL) };
const ENDS: process_pair::Ends = process_pair::Ends {
    fabric: |runtime, _| crate::tcp::fabric(runtime),
    entrance: "tcp::between_processes::two_processes::writes::length_0",
};

contract_suite!(
    @flavour two_processes, CurrentThread,
    crate::tcp::between_processes::APART, crate::tcp::between_processes::run
);

fn run<T, F>(flavour: Flavour, test: T)
where
    T: FnOnce(Arc<dyn Runtime>) -> F + Send + 'static,
    F: Future<Output = ()> + 'static,
{
    process_pair::run(&ENDS, flavour, test);
}

#[test]
fn an_other_process_that_ends_fails_the_test() {
    let test = |runtime: Arc<dyn Runtime>| async move {
        let pair = Pair::new(APART, runtime).await;
        pair.works(&pair.to_right, &pair.to_left).await;
        process_pair::kill();
        let end = pair.end_at_right().await;
        let ended = matches!(end, FabricError::PeerLost { cause: LossCause::EndOfFile, .. });
        assert!(ended, "unexpected: {end}");
        pair.step("the close", pair.to_left.close()).await;
    };
    let failure = catch_unwind(AssertUnwindSafe(|| run(Flavour::CurrentThread, test))).unwrap_err();
    let message = failure.downcast::<String>().expect("a message");
    assert!(message.contains("the other process has ended"), "{message}");
}
