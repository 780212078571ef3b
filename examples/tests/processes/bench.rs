//! `--bench`: that it measures every way. How fast they are is not a matter of tests.

use serde_json::Value;

use crate::program::trained;

#[test]
fn the_bench_measures_every_way_beside_grpc() {
    let text = trained("--bench --parameters 200000 --rounds 2 --json");
    let outcome: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&outcome["tensors"], &outcome["workers"], &outcome["rounds"]),
        (&161.into(), &2.into(), &2.into())
    );
    let rows = outcome["rows"].as_array().unwrap();
    let ways: Vec<_> = rows.iter().map(|row| (row["transport"].as_str(), row["uses"].as_str())).collect();
    let expected = [
        ("auto", "shm"),
        ("views", "shm"),
        ("shm", "shm"),
        ("tcp", "tcp"),
        ("fallback", "grpc"),
        ("grpc", "grpc"),
    ];
    assert_eq!(ways, expected.map(|(way, uses)| (Some(way), Some(uses))));
    for row in rows {
        for figure in ["pull_s", "push_s", "exchange_s", "exchange_factor", "step_s", "step_factor"] {
            assert!(row[figure].as_f64().is_some_and(|figure| figure > 0.0), "{figure}: {row}");
        }
    }
}
