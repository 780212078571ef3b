//! A view for people.

use std::time::Duration;

use indicatif::{BinaryBytes, HumanCount};
use tensorwire::report::{PeerReport, Traffic, WorkerReport};
use tensorwire_protocol::text::escaped;

use super::view::{Figures, Place, Rates, Slowest, View};
use crate::table::table;

/// Shown for a figure that is not known.
const UNKNOWN: &str = "-";

const BOLD: &str = "\x1b[1m";
const PLAIN: &str = "\x1b[0m";

/// The view, in lines.
pub(super) fn text(view: &View) -> String {
    let mut text = head(view) + "\n" + &peers(view);
    if !view.report.sets.is_empty() {
        text += &format!("\n{}", sets(&view.report));
    }
    if !view.report.pools.is_empty() {
        text += &format!("\n{}", pools(&view.report));
    }
    text
}

/// The first `rows` lines but one, each cut to `columns` columns. The first one is bold if there are colours.
pub(super) fn cut(text: &str, columns: usize, rows: usize, has_colours: bool) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let most = rows.saturating_sub(1).max(1);
    let is_cut = lines.len() > most;
    let shown = if is_cut { most - 1 } else { lines.len() };
    let mut cut = String::new();
    for (at, line) in lines.iter().take(shown).enumerate() {
        let line: String = line.chars().take(columns.max(1)).collect();
        cut += &if at == 0 && has_colours { format!("{BOLD}{line}{PLAIN}\n") } else { line + "\n" };
    }
    if is_cut {
        cut += &format!("… {} more lines: a higher window shows them\n", lines.len() - shown);
    }
    cut
}

fn head(view: &View) -> String {
    let report = &view.report;
    let mut text = format!(
        "{} at {}, incarnation {:016x}, tensorwire {}\n",
        escaped(&report.name),
        escaped(&report.address),
        report.incarnation,
        escaped(&report.version)
    );
    let connected = report.peers.iter().filter(|peer| peer.transport.is_some()).count();
    text += &format!("peers {}, {connected} connected", report.peers.len());
    if report.peers_left_out > 0 {
        text += &format!(", {} more not shown", report.peers_left_out);
    }
    if let Some(sessions) = report.sessions {
        text += &format!("; sessions {sessions}");
    }
    if let Some(Traffic { errors, losses, reconnects, .. }) = &report.total {
        text += &format!("; errors {errors}, connections lost {losses}, reconnects {reconnects}");
    }
    text + &format!("\nslowest: {}\n", slowest(view.slowest.as_ref()))
}

fn slowest(slowest: Option<&Slowest>) -> String {
    let Some(Slowest { peer, place, waited }) = slowest else { return "nothing has waited".to_owned() };
    let (peer, seconds) = (escaped(peer), waited.as_secs_f64());
    match place {
        Place::AtPeer => format!("{peer} has not answered a request for at least {seconds:.1} s"),
        Place::Here => format!("a request of {peer} has waited here for at least {seconds:.1} s"),
        Place::OnTheWay => format!("the host of {peer} has acknowledged nothing for {seconds:.1} s"),
    }
}

fn peers(view: &View) -> String {
    let head = [
        "peer", "fabric", "in/s", "values/s", "out/s", "values/s", "in", "values", "out", "values",
        "waiting", "oldest", "lost", "again",
    ];
    let rows = view.report.peers.iter().zip(&view.peers).map(|(peer, figures)| peer_row(peer, figures));
    let total = view.report.total.as_ref().map(|total| {
        let cells = traffic_cells(total, view.total.as_ref());
        row(("all".to_owned(), String::new()), cells, (String::new(), String::new()), total)
    });
    table(2, head, rows.chain(total).collect())
}

fn peer_row(peer: &PeerReport, figures: &Figures) -> [String; 14] {
    let transport = peer.transport.as_deref().unwrap_or(UNKNOWN);
    let waiting = peer.waiting_at_peer.requests.saturating_add(peer.waiting_here.requests);
    let oldest = figures.at_peer.max(figures.here).map_or(UNKNOWN.to_owned(), seconds);
    let cells = traffic_cells(&peer.traffic, figures.rates.as_ref());
    let names = (escaped(&peer.name).to_string(), escaped(transport).to_string());
    row(names, cells, (HumanCount(waiting).to_string(), oldest), &peer.traffic)
}

fn row(
    (name, fabric): (String, String),
    [in_rate, in_values_rate, out_rate, out_values_rate, bytes_in, values_in, bytes_out, values_out]: [String;
        8],
    (waiting, oldest): (String, String),
    traffic: &Traffic,
) -> [String; 14] {
    let (lost, again) = (HumanCount(traffic.losses).to_string(), HumanCount(traffic.reconnects).to_string());
    [
        name,
        fabric,
        in_rate,
        in_values_rate,
        out_rate,
        out_values_rate,
        bytes_in,
        values_in,
        bytes_out,
        values_out,
        waiting,
        oldest,
        lost,
        again,
    ]
}

/// Rates and sums of both directions.
fn traffic_cells(traffic: &Traffic, rates: Option<&Rates>) -> [String; 8] {
    let unknown = || UNKNOWN.to_owned();
    let bytes_rate = |rate: fn(&Rates) -> f64| {
        rates.map_or_else(unknown, |rates| BinaryBytes(rate(rates).round() as u64).to_string())
    };
    let values_rate =
        |rate: fn(&Rates) -> f64| rates.map_or_else(unknown, |rates| format!("{:.1}", rate(rates)));
    [
        bytes_rate(|rates| rates.bytes_received_per_second),
        values_rate(|rates| rates.values_received_per_second),
        bytes_rate(|rates| rates.bytes_sent_per_second),
        values_rate(|rates| rates.values_sent_per_second),
        BinaryBytes(traffic.bytes_received).to_string(),
        HumanCount(traffic.values_received).to_string(),
        BinaryBytes(traffic.bytes_sent).to_string(),
        HumanCount(traffic.values_sent).to_string(),
    ]
}

fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

fn sets(report: &WorkerReport) -> String {
    let rows = report.sets.iter().map(|set| {
        [
            escaped(&set.name).to_string(),
            set.version.to_string(),
            HumanCount(set.tensors).to_string(),
            BinaryBytes(set.bytes).to_string(),
        ]
    });
    let mut text = table(1, ["set", "version", "tensors", "bytes"], rows.collect());
    if report.sets_left_out > 0 {
        text += &format!("{} more sets not shown\n", report.sets_left_out);
    }
    text
}

fn pools(report: &WorkerReport) -> String {
    let rows = report.pools.iter().map(|pool| {
        let bytes = |bytes: u64| BinaryBytes(bytes).to_string();
        [
            escaped(&pool.name).to_string(),
            bytes(pool.used_bytes),
            bytes(pool.block_bytes),
            bytes(pool.leaked_bytes),
            bytes(pool.retired_bytes),
            HumanCount(pool.waiting).to_string(),
        ]
    });
    table(1, ["pool", "used", "of the system", "leaked", "retired", "waiting"], rows.collect())
}

#[cfg(test)]
mod tests {
    use super::{
        super::view::{Watch, tests::report},
        *,
    };

    #[test]
    fn a_view_shows_rates_sums_and_the_slowest_peer() {
        let mut watch = Watch::default();
        let first = text(&watch.view(report(10, 1, Some(1))));
        assert!(first.contains("slowest: nothing has waited"), "{first}");
        let second = text(&watch.view(report(12, 5, Some(1))));
        assert!(
            second.contains("a request of /job:a/replica:0/task:0 has waited here for at least 2.0 s"),
            "{second}"
        );
        let row = second.lines().find(|line| line.starts_with("/job:a")).unwrap();
        let cells: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(
            cells,
            [
                "/job:a/replica:0/task:0",
                "-",
                "0",
                "B",
                "0.0",
                "20",
                "B",
                "2.0",
                "0",
                "B",
                "0",
                "50",
                "B",
                "5",
                "1",
                "2.0",
                "s",
                "0",
                "0"
            ]
        );
    }

    #[test]
    fn a_screen_shows_what_fits_and_how_much_does_not() {
        let text = "first line\nsecond\nthird\nfourth\n";
        assert_eq!(cut(text, 5, 10, false), "first\nsecon\nthird\nfourt\n");
        assert_eq!(
            cut(text, 80, 4, true),
            "\x1b[1mfirst line\x1b[0m\nsecond\n… 2 more lines: a higher window shows them\n"
        );
    }
}
