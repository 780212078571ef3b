mod mailbox;

use tensorwire_fabric::{PeerViolation, TokioRuntime};

use super::*;
use crate::session::{node::connection_setup::tests::connection, tests::worker};

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
