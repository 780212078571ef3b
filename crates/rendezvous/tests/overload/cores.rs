//! Who runs on which cores, so that an attacker takes from the attacked what it makes them do, and not their cores: one on
//! another host would not.

use std::fs;

use rustix::{
    process::Pid,
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};

/// The cores that this process may use, divided: one for the attackers, the others for the attacked. With but one core, all
/// have that.
pub(crate) fn divided() -> (usize, Vec<usize>) {
    let all = sched_getaffinity(None).unwrap();
    let mut cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| all.is_set(core)).collect();
    let last = *cores.last().unwrap();
    if cores.len() > 1 {
        cores.pop();
    }
    (last, cores)
}

/// Puts all threads of this process, and whatever they start, on these cores.
pub(crate) fn stay_on(cores: &[usize]) {
    let mut set = CpuSet::new();
    cores.iter().for_each(|&core| set.set(core));
    for entry in fs::read_dir("/proc/self/task").unwrap() {
        let thread: i32 = entry.unwrap().file_name().to_str().unwrap().parse().unwrap();
        // One that has ended meanwhile needs no core.
        let _ended = sched_setaffinity(Pid::from_raw(thread), &set);
    }
}
