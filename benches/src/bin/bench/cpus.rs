//! The CPUs of the two processes, and the share of CPU time that the hypervisor took.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::error::{BenchError, system};
use crate::arguments::CpuChoice;

/// From this size on a second core may help to copy.
const HELPED_BYTES: u64 = 16 << 20;

/// The CPUs of a case: this process's and the other's; `None` leaves it to the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Placement {
    pub(super) name: &'static str,
    pub(super) own: Option<usize>,
    pub(super) peer: Option<usize>,
    /// Whether two CPUs can work for the case.
    pub(super) has_two_cpus: bool,
}

impl Placement {
    /// The placement for a case of `bytes` bytes.
    pub(super) fn choose(choice: CpuChoice, bytes: u64, allowed: &[usize]) -> Result<Self, BenchError> {
        let free = Self { name: "free", own: None, peer: None, has_two_cpus: allowed.len() > 1 };
        let two = match *allowed {
            [first, second, ..] => {
                Some(Self { name: "two", own: Some(first), peer: Some(second), has_two_cpus: true })
            }
            _ => None,
        };
        match choice {
            CpuChoice::Free => Ok(free),
            CpuChoice::Auto if bytes >= HELPED_BYTES => Ok(free),
            CpuChoice::Auto => Ok(two.unwrap_or(free)),
            CpuChoice::Two => two.ok_or(BenchError::Cpus { value: "two", allowed: allowed.len() }),
            CpuChoice::One => {
                let first = allowed.first().copied();
                Ok(Self { name: "one", own: first, peer: first, has_two_cpus: false })
            }
        }
    }

    /// The CPU of a rank of a group, of which this process is rank 0.
    pub(super) fn of_rank(self, rank: usize) -> Option<usize> {
        if rank.is_multiple_of(2) { self.own } else { self.peer }
    }

    /// Whether both processes run on the same CPU.
    pub(super) fn is_one_cpu(self) -> bool {
        !self.has_two_cpus
    }
}

/// The CPUs this process may run on.
pub(super) fn allowed() -> Result<Vec<usize>, BenchError> {
    let set = sched_getaffinity(None).map_err(system("sched_getaffinity"))?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

/// Runs this thread, and those it starts from now on, on these CPUs only.
pub(super) fn pin(cpus: &[usize]) -> Result<(), BenchError> {
    let mut set = CpuSet::new();
    for &cpu in cpus.iter().filter(|&&cpu| cpu < CpuSet::MAX_CPU) {
        set.set(cpu);
    }
    sched_setaffinity(None, &set).map_err(system("sched_setaffinity"))
}

/// CPU time of the machine since it started, in ticks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct CpuTime {
    stolen: u64,
    total: u64,
}

impl CpuTime {
    /// The present counts; zero if they can't be read.
    pub(super) fn now() -> Self {
        Self::parse(&std::fs::read_to_string("/proc/stat").unwrap_or_default())
    }

    /// user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of user.
    fn parse(stat: &str) -> Self {
        let line = stat.lines().find_map(|line| line.strip_prefix("cpu ")).unwrap_or_default();
        let ticks: Vec<u64> = line.split_whitespace().take(8).map_while(|word| word.parse().ok()).collect();
        Self { stolen: ticks.get(7).copied().unwrap_or(0), total: ticks.iter().sum() }
    }

    /// The share of the time since `earlier` that the hypervisor gave to other machines, 0 to 1.
    pub(super) fn stolen_since(self, earlier: Self) -> f64 {
        let total = self.total.saturating_sub(earlier.total);
        let stolen = self.stolen.saturating_sub(earlier.stolen);
        if total == 0 { 0.0 } else { stolen as f64 / total as f64 }
    }
}

/// Names of threads of the control plane begin with this. They wake up for liveness checks.
const CONTROL_THREAD: &str = "Name:\ttw-ctl";

/// How often the threads of a process have gone to sleep so far, without those of the control plane.
pub(super) fn sleeps_of(process: u32) -> u64 {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else { return 0 };
    threads.flatten().map(|thread| sleeps(&std::fs::read_to_string(thread.path().join("status")))).sum()
}

fn sleeps(status: &std::io::Result<String>) -> u64 {
    let Ok(status) = status else { return 0 };
    if status.starts_with(CONTROL_THREAD) {
        return 0;
    }
    let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// CPU time that the threads of a process have used so far, in nanoseconds; 0 if the kernel does not count it.
pub(super) fn cpu_ns_of(process: u32) -> u64 {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else { return 0 };
    let used = |stat: std::io::Result<String>| stat.ok()?.split_whitespace().next()?.parse().ok();
    threads
        .flatten()
        .map(|thread| used(std::fs::read_to_string(thread.path().join("schedstat"))).unwrap_or(0_u64))
        .sum()
}

/// The load average of the last minute: how busy other processes keep the machine.
pub(super) fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::{BenchError, CpuChoice, CpuTime, Placement, sleeps};

    #[test]
    fn steal_is_the_share_of_the_ticks_between() {
        let before = CpuTime::parse("cpu  10 0 10 70 0 0 0 10 0 0\ncpu0 1 1 1 1 1 1 1 1\n");
        let after = CpuTime::parse("cpu  20 0 20 140 0 0 0 20 5 5\n");
        assert!((after.stolen_since(before) - 0.1).abs() < 1e-9);
        assert_eq!(before.stolen_since(before), 0.0);
        assert_eq!(CpuTime::parse("nothing").stolen_since(before), 0.0);
    }

    #[test]
    fn sleeps_are_those_the_thread_chose() {
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t42\nnonvoluntary_ctxt_switches:\t7\n";
        assert_eq!(sleeps(&Ok(status.to_owned())), 42);
        assert_eq!(sleeps(&Ok(status.replace("x", "tw-ctl-1"))), 0);
        assert_eq!(sleeps(&Ok("gone".to_owned())), 0);
    }

    #[test]
    fn two_cpus_are_refused_where_there_is_one() {
        let refused = Placement::choose(CpuChoice::Two, 8, &[3]).unwrap_err();
        assert!(matches!(refused, BenchError::Cpus { value: "two", allowed: 1 }));
        assert_eq!(Placement::choose(CpuChoice::Auto, 8, &[3]).unwrap().name, "free");
    }

    #[test]
    fn auto_leaves_large_copies_to_the_scheduler() {
        let placed = |bytes| Placement::choose(CpuChoice::Auto, bytes, &[2, 5]).unwrap();
        assert_eq!((placed(1 << 20).own, placed(1 << 20).peer), (Some(2), Some(5)));
        assert_eq!(placed(16 << 20).own, None);
    }
}
