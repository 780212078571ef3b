mod mailbox;

use std::collections::BTreeSet;

use tensorwire_fabric::{PeerViolation, TokioRuntime};
use tensorwire_protocol::{SetContent, Take, Wanted};

use super::*;
use crate::{
    session::{node::connection_setup::tests::connection, tests::worker},
    values::sets::manifest::{FIRST_TENSOR, Head, LOAN, MANIFEST, MANIFEST_DELTA},
};

/// How the peer counts as lost after its NIC refused an access and its session, or it itself, `told` why.
async fn loss_after_a_refusal(told: Option<Lost>) -> PeerLoss {
    let connection = connection(&worker().await).await;
    let runtime: Arc<dyn Runtime> = Arc::new(TokioRuntime::current().unwrap());
    let refusal = FabricError::RemoteRefused { kind: FabricKind::VERBS, reason: PeerViolation::WrongKey };
    let telling = async {
        // The refusal is seen first.
        tokio::task::yield_now().await;
        told.iter().for_each(|why| connection.fail(why));
    };
    futures::join!(connection.clone().end(Err(refusal), runtime), telling);
    connection.lost.get().unwrap().loss
}

#[tokio::test]
async fn a_refusal_by_the_nic_of_a_killed_process_counts_as_its_end() {
    assert_eq!(loss_after_a_refusal(Some(Lost::gone("its session ended"))).await, PeerLoss::Gone);
}

#[tokio::test]
async fn a_refusal_that_nothing_follows_counts_as_a_broken_rule() {
    assert_eq!(loss_after_a_refusal(None).await, PeerLoss::Misbehaved);
}

#[test]
fn a_peer_says_whether_a_rule_was_broken() {
    for why in [Lost::gone("the cable"), Lost::misbehaved("wrong region key")] {
        let told = Lost::from_peer(&why.status());
        assert_eq!(told.loss, why.loss);
        assert_eq!(told.detail, format!("the peer ended the connection: {}", why.detail));
    }
}

#[tokio::test]
async fn s4_who_is_no_reader_gets_no_part_of_a_set_also_without_its_head() {
    let worker = worker().await;
    let connection = connection(&worker).await;
    let values = &connection.values;
    for version in [1, 2] {
        let tensor = Tensor::from_values(worker.pool(), &[2], &[version, 5_u64]).unwrap();
        worker.set("s").commit(version, [("w", tensor)]).await.unwrap();
    }
    let asked = |scope, key: &str| match values.take_at(scope, &key.into()) {
        Take::Now(taken) => taken.map(|taken| taken.tensor().clone()),
        Take::Later(_) => panic!("{scope:?} waits"),
    };
    let head = Head::decode(asked(Scope::Set(Wanted::Now), "s").unwrap().bytes()).unwrap();
    let content = |number| SetContent { edition: head.newest.edition(), number, is_last: false };
    let contents =
        [MANIFEST, MANIFEST_DELTA, LOAN, FIRST_TENSOR].map(|at| (Scope::SetContent(content(at)), "s"));
    let part = (Scope::SetSlice(content(FIRST_TENSOR)), "s[1:2]");
    let all = (Scope::SetSlice(content(FIRST_TENSOR)), "s[0:2]");
    let requests: Vec<_> = contents.into_iter().chain([part, all, (Scope::Set(Wanted::Now), "s")]).collect();
    for (scope, key) in &requests {
        assert!(asked(*scope, key).is_ok(), "{scope:?}");
    }
    worker.node.values().sets.set_readers("s", BTreeSet::from(["another".to_owned()]));
    for (scope, key) in requests {
        assert_eq!(asked(scope, key).unwrap_err().code, Code::PermissionDenied, "{scope:?}");
    }
    let next = Scope::Set(Wanted::NewerThan { incarnation: 0, version: 0 });
    assert!(
        matches!(values.take_at(next, &"s".into()), Take::Now(Err(status)) if status.code == Code::PermissionDenied)
    );
}
