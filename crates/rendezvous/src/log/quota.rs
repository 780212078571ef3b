//! Limits the log lines that peers can cause.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError},
    time::Duration,
};

use tensorwire_fabric::Runtime;
use tensorwire_testpoints::sync::Mutex;

/// Maximum number of lines that one peer can cause within a [`WINDOW`].
const LINES_MAX: u32 = 8;

/// Within this time, further lines are counted instead of written.
const WINDOW: Duration = Duration::from_secs(60);

/// Maximum number of peers with their own count. All others share one, because peers can use new names and addresses
/// without end.
const PEERS_MAX: usize = 256;

/// The name of the shared count.
const OTHERS: &str = "";

/// Counts the log lines that peers cause, so that a peer cannot fill the disk by repeating an action.
#[derive(Debug)]
pub(crate) struct LogQuota {
    runtime: Arc<dyn Runtime>,
    windows: Mutex<BTreeMap<String, Window>>,
}

#[derive(Debug)]
struct Window {
    since: Duration,
    lines: u32,
    left_out: u64,
}

impl LogQuota {
    pub(crate) fn new(runtime: Arc<dyn Runtime>) -> Self {
        Self { runtime, windows: Mutex::default() }
    }

    /// Whether a line that `peer` causes is to be written. If so, returns how many lines before it were left out.
    pub(crate) fn line(&self, peer: &str) -> Option<u64> {
        let now = self.runtime.now();
        let is_over = |window: &Window| now.saturating_sub(window.since) >= WINDOW;
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        if !windows.contains_key(peer) && windows.len() >= PEERS_MAX {
            windows.retain(|_, window| !is_over(window));
        }
        let has_place = windows.contains_key(peer) || windows.len() < PEERS_MAX;
        let name = if has_place { peer } else { OTHERS };
        if !windows.contains_key(name) {
            windows.insert(name.to_owned(), Window { since: now, lines: 0, left_out: 0 });
        }
        let window = windows.get_mut(name)?;
        if is_over(window) {
            (window.since, window.lines) = (now, 0);
        }
        if window.lines >= LINES_MAX {
            window.left_out += 1;
            return None;
        }
        window.lines += 1;
        Some(std::mem::take(&mut window.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::values::steps::tests::Clock;

    fn written(quota: &LogQuota, peer: &str, times: u32) -> usize {
        (0..times).filter(|_| quota.line(peer).is_some()).count()
    }

    #[test]
    fn s4_lines_of_one_peer_are_bounded_and_those_left_out_are_told_later() {
        let clock = Arc::new(Clock::default());
        let quota = LogQuota::new(clock.clone());
        assert_eq!(written(&quota, "bad", 1000), LINES_MAX as usize);
        assert_eq!(quota.line("good"), Some(0));
        clock.pass(WINDOW);
        assert_eq!((quota.line("bad"), quota.line("bad")), (Some(1000 - u64::from(LINES_MAX)), Some(0)));
    }

    #[test]
    fn s4_lines_of_ever_new_peers_are_bounded_too() {
        let clock = Arc::new(Clock::default());
        let quota = LogQuota::new(clock.clone());
        let of = |round: &str| (0..10_000).filter(|n| quota.line(&format!("{round}{n}")).is_some()).count();
        assert_eq!(of("a"), PEERS_MAX + LINES_MAX as usize);
        assert!(quota.windows.lock().unwrap().len() <= PEERS_MAX + 1);
        clock.pass(WINDOW);
        assert_eq!(of("b"), PEERS_MAX + LINES_MAX as usize);
    }
}
