//! The child processes of a launcher.

use std::{
    collections::BTreeMap,
    io,
    net::{Ipv4Addr, TcpListener},
    process::ExitStatus,
    sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    time::Duration,
};

use tensorwire::ClusterSpec;

use crate::{
    children::{Event, Process},
    failure::Failure,
    options::{RoleName, Settings},
};

/// Events that wait to be read, at most.
const EVENTS_MAX: usize = 256;
/// How long all children may be silent.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How long the children may take to end after the launcher has let go of them, or after one of them has died.
const END_MAX: Duration = Duration::from_secs(10);
/// Where ports are looked for: below those that Linux gives to outgoing connections, so that one is still free when a
/// process is started again.
const PORTS: std::ops::Range<u16> = 10_000..32_000;
/// Launchers that run at the same time begin to look this far from each other.
const PORTS_APART: u32 = 131;
/// A training with so many reports shows smooth progress, however short it is.
const REPORTS: u64 = 200;
/// Steps from one report to the next, at most, however long it is.
const REPORT_STEPS_MAX: u64 = 100;

#[derive(Debug)]
struct Child {
    role: RoleName,
    arguments: Vec<String>,
    process: Process,
}

/// Servers and workers on this host.
#[derive(Debug)]
pub(super) struct Cluster {
    addresses: BTreeMap<RoleName, String>,
    children: Vec<Child>,
    sender: SyncSender<(usize, Event)>,
    events: Receiver<(usize, Event)>,
    /// Children whose output has not ended.
    running: usize,
    restarts_left: u64,
}

impl Cluster {
    /// Starts all processes.
    pub(super) fn start(settings: &Settings) -> Result<Self, Failure> {
        let roles =
            (0..settings.servers).map(RoleName::Server).chain((0..settings.workers).map(RoleName::Worker));
        let roles: Vec<RoleName> = roles.collect();
        let addresses: BTreeMap<_, _> = roles.iter().copied().zip(free_addresses(roles.len())?).collect();
        let (sender, events) = mpsc::sync_channel(EVENTS_MAX);
        let restarts_left = settings.flags.restarts;
        let mut cluster = Self { addresses, children: Vec::new(), sender, events, running: 0, restarts_left };
        for role in roles {
            cluster.start_child(role, cluster.arguments(settings, role))?;
        }
        Ok(cluster)
    }

    fn start_child(&mut self, role: RoleName, arguments: Vec<String>) -> Result<(), Failure> {
        let index = self.children.len();
        let process = Process::start(&arguments, index, self.sender.clone()).map_err(Failure::Start)?;
        println!("{:<12} pid {:<8} at {}", role.to_string(), process.id(), self.addresses[&role]);
        self.children.push(Child { role, arguments, process });
        self.running += 1;
        Ok(())
    }

    /// Who is where.
    pub(super) fn spec(&self) -> ClusterSpec {
        let add = |spec: ClusterSpec, (role, address): (&RoleName, &String)| {
            spec.worker(role.worker_name(), address)
        };
        self.addresses.iter().fold(ClusterSpec::new(), add)
    }

    /// The addresses of one job, as a flag gives them.
    fn hosts(&self, job: &str) -> String {
        let of_job = self.addresses.iter().filter(|(role, _)| role.job() == job);
        of_job.map(|(_, address)| address.as_str()).collect::<Vec<_>>().join(",")
    }

    /// The command line of one process: what a user would type, and that it has a launcher.
    fn arguments(&self, settings: &Settings, role: RoleName) -> Vec<String> {
        let is_exact = !settings.flags.kill.is_empty();
        let report_steps = if is_exact { 1 } else { settings.steps.div_ceil(REPORTS).min(REPORT_STEPS_MAX) };
        let delay =
            settings.flags.slow.iter().filter(|fault| fault.role == role).map(|fault| fault.value.0).max();
        let mut arguments = settings.flags.training_arguments();
        arguments.extend([
            format!("--ps-hosts={}", self.hosts("ps")),
            format!("--worker-hosts={}", self.hosts("worker")),
            format!("--job-name={}", role.job()),
            format!("--task-index={}", role.index()),
            "--launched".to_owned(),
            format!("--report-steps={report_steps}"),
            format!("--delay={}", delay.unwrap_or_default().as_millis()),
        ]);
        arguments
    }

    /// What happens next, to whom.
    pub(super) fn next_event(&mut self) -> Result<(RoleName, Event), Failure> {
        match self.events.recv_timeout(SILENCE_MAX) {
            Ok((index, event)) => {
                self.running -= usize::from(matches!(event, Event::Ended));
                Ok((self.children[index].role, event))
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                Err(Failure::Silence { limit: SILENCE_MAX })
            }
        }
    }

    /// Kills a process.
    pub(super) fn kill(&mut self, role: RoleName) {
        self.children.iter_mut().filter(|child| child.role == role).for_each(|child| child.process.kill());
    }

    /// Starts a process that was killed again, in place and with the flags of the former one. A process that ended by
    /// itself has said why, and would only do so again: that is an error.
    pub(super) fn start_again(&mut self, role: RoleName) -> Result<String, Failure> {
        let found = self.children.iter().position(|child| child.role == role);
        let Some(index) = found else { return Ok(String::new()) };
        let child = &mut self.children[index];
        let status = child.process.wait().map_err(Failure::Start)?;
        if status.code().is_some() || self.restarts_left == 0 {
            return Err(Failure::ChildEnded { name: role.to_string(), status });
        }
        self.restarts_left -= 1;
        child.process =
            Process::start(&child.arguments, index, self.sender.clone()).map_err(Failure::Start)?;
        self.running += 1;
        Ok(format!("{:<12} pid {:<8} again, after {status}", role.to_string(), child.process.id()))
    }

    /// Lets go of the children and waits for each.
    pub(super) fn end(&mut self) -> Result<(), Failure> {
        self.children.iter_mut().for_each(|child| child.process.release());
        for (role, status) in self.ended_children() {
            if !status.success() {
                return Err(Failure::ChildEnded { name: role.to_string(), status });
            }
        }
        Ok(())
    }

    /// After a failure: which children end by themselves once they are let go. The others are killed on drop.
    pub(super) fn tell_how_children_end(&mut self) {
        self.children.iter_mut().for_each(|child| child.process.release());
        for (role, status) in self.ended_children() {
            eprintln!("{role} ended by itself: {status}");
        }
    }

    /// Children that end within [`END_MAX`] of each other.
    fn ended_children(&mut self) -> Vec<(RoleName, ExitStatus)> {
        let mut ended = Vec::new();
        while self.running > 0 {
            match self.events.recv_timeout(END_MAX) {
                Ok((index, Event::Ended)) => {
                    self.running -= 1;
                    let child = &mut self.children[index];
                    ended.extend(child.process.wait().map(|status| (child.role, status)));
                }
                Ok(_) => {}
                Err(_) => break,
            }
        }
        ended
    }
}

/// Addresses that nothing listens on.
fn free_addresses(count: usize) -> Result<Vec<String>, Failure> {
    let span = u32::from(PORTS.end - PORTS.start);
    let start = (std::process::id().wrapping_mul(PORTS_APART) % span) as u16;
    let ports = (PORTS.start + start..PORTS.end).chain(PORTS.start..PORTS.start + start);
    let listens = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
    // All are held until the last is found.
    let free: Vec<TcpListener> = ports.map(listens).filter_map(Result::ok).take(count).collect();
    let addresses: io::Result<Vec<String>> =
        free.iter().map(|listener| Ok(listener.local_addr()?.to_string())).collect();
    match addresses {
        Ok(addresses) if addresses.len() == count => Ok(addresses),
        _ => Err(Failure::NoPorts { first: PORTS.start, last: PORTS.end - 1 }),
    }
}
