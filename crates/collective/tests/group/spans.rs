//! Spans of calls, and the target of the log.

use std::time::Duration;

use tensorwire_fabric::FabricKind;

use super::ranks_within;
use crate::spans::{SpanFields, Spans};

/// What a program does in which a subscriber records spans: three calls, of which the last ends the group.
async fn calls() {
    let ranks = ranks_within(FabricKind::SHM, 2, Duration::from_secs(60)).await;
    let one_rank = async |group: tensorwire_collective::Group| {
        let mut short = [1_u64; 2];
        group.all_reduce(&mut short).await.unwrap();
        let mut long = vec![1_f32; 1 << 20];
        group.reduce(1, &mut long).await.unwrap();
    };
    futures::future::join_all(ranks.groups.iter().cloned().map(one_rank)).await;
    let late = ranks.groups[0].barrier().timeout(Duration::from_millis(1));
    late.await.unwrap_err();
    ranks.shutdown().await;
}

#[test]
fn a_subscriber_sees_a_span_of_each_call() {
    let spans = Spans::default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tracing::subscriber::with_default(spans.subscriber(), || runtime.block_on(calls()));
    let calls = spans.named("call");
    let of = |kind: &str| -> Vec<&SpanFields> { calls.iter().filter(|call| call["kind"] == kind).collect() };
    let fields = |call: &SpanFields, names: &[&str]| -> Vec<String> {
        names.iter().map(|name| call.get(*name).cloned().unwrap_or_default()).collect()
    };
    let (mut short, long) = (of("all_reduce"), of("reduce"));
    // The ranks end in any order.
    short.sort_by_key(|call| call["rank"].clone());
    assert_eq!((short.len(), long.len()), (2, 2), "one for each rank: {calls:#?}");
    for (call, rank) in short.into_iter().zip(["0", "1"]) {
        let found = fields(call, &["rank", "ranks", "bytes", "algorithm", "root"]);
        assert_eq!(found, [rank, "2", "16", "exchange", ""]);
    }
    for call in long {
        assert_eq!(fields(call, &["ranks", "bytes", "root", "error"]), ["2", "4194304", "1", ""]);
    }
    let late = of("barrier");
    assert_eq!(late.len(), 1);
    assert!(late[0]["error"].contains("not complete after 1ms"), "{late:?}");
}
