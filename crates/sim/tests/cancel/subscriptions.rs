//! Cancelled subscriptions, and publications that wait for subscribers.

use tensorwire_rendezvous::subscriptions::Policy;
use tensorwire_sim::Handle;

use super::{
    for_every_k, on_seeds, polled,
    workers::{Two, builder_mode, every_k_beside_fetches},
};

/// What this file cancels.
pub(super) const CASES: [&str; 2] = ["publish_in_turn", "subscribe"];

#[test]
fn s3_a_subscription_given_up_leaves_nothing_behind() {
    every_k_beside_fetches("subscribe", &async |two, polls| {
        let mut subscription = two.peer.subscribe("x").ahead(1);
        let polled = polled(polls, subscription.next()).await;
        drop(subscription);
        polled.map(|update| two.handle.verify(1, update.unwrap().unwrap().tensor.bytes())).is_some()
    });
}

#[test]
fn s3_a_publication_given_up_publishes_nothing() {
    on_seeds(async |handle: Handle| {
        let two = Two::start(&handle, builder_mode()).await;
        for_every_k("publish_in_turn", async |polls| {
            let mut subscription = two.peer.subscribe("x").policy(Policy::Every).ahead(1);
            two.publish(1);
            subscription.next().await.unwrap().unwrap();
            let polled = polled(polls, two.server.publish_in_turn("x", two.tensor(2))).await;
            let is_published = polled.is_some();
            drop(subscription);
            two.fetches(if is_published { 2 } else { 1 }).await;
            is_published
        })
        .await;
        two.end().await;
    });
}
