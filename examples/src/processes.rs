//! Child processes on this machine, which are restarted when they are killed, and never outlive their parent.
//!
//! The parent holds the writing side of each child's standard input. When the parent ends in any way, the kernel closes
//! it; the child reads the end of its input and exits, too.

use std::{
    error::Error,
    io,
    net::{Ipv4Addr, TcpListener},
    ops::Range,
    process::{ExitStatus, Stdio},
    thread,
    time::Duration,
};

use futures::{
    future::select_all,
    stream::{FuturesUnordered, StreamExt as _},
};
use tokio::{
    process::{Child, ChildStdin, Command},
    sync::oneshot,
};

use crate::report::{Progress, warn};

/// The ports to try: below those that Linux assigns to outgoing connections, so that a port is still free when a
/// process is restarted.
const PORTS: Range<u16> = 10_000..32_000;
/// The distance of the first ports of programs that run at the same time.
const PORTS_APART: u32 = 131;
/// How long a child may take to close its connections after its input has ended.
const FAREWELL: Duration = Duration::from_secs(8);

/// Addresses on this machine on which nothing listens.
///
/// # Errors
/// There are not enough free ports.
pub fn free_addresses(count: usize) -> io::Result<Vec<String>> {
    let start = (std::process::id().wrapping_mul(PORTS_APART) % u32::from(PORTS.end - PORTS.start)) as u16;
    let ports = PORTS.cycle().skip(usize::from(start)).take(PORTS.len());
    // All are bound until the last is found.
    let listening = ports.filter_map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok()).take(count);
    let free: Vec<TcpListener> = listening.collect();
    if free.len() < count {
        let problem =
            format!("fewer than {count} ports are free on 127.0.0.1 from {} to {}", PORTS.start, PORTS.end);
        return Err(io::Error::other(problem));
    }
    free.iter().map(|listener| Ok(listener.local_addr()?.to_string())).collect()
}

/// In a child: ends when the parent has ended or closes the child's input. The process ends within eight seconds after
/// that in any case.
pub async fn parent_lets_go() {
    let (close, closed) = oneshot::channel::<()>();
    thread::spawn(move || {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        drop(close);
        thread::sleep(FAREWELL);
        std::process::exit(1);
    });
    let _ = closed.await;
}

/// The children of this process; killed when dropped.
#[derive(Debug)]
pub struct Children<'run> {
    children: Vec<(Start, Child, Option<ChildStdin>)>,
    progress: &'run Progress,
    restarts_left: u32,
}

/// The start of a child: its name in messages, and the arguments of this program.
pub type Start = (String, Vec<String>);

impl<'run> Children<'run> {
    /// Starts this program once for each of `starts`. Killed children are restarted with `--again`, `restarts` times in all.
    /// Prints each start beside `progress`.
    ///
    /// # Errors
    /// A process can't be started.
    pub fn start(starts: Vec<Start>, restarts: u32, progress: &'run Progress) -> io::Result<Self> {
        let mut children = Self { children: Vec::new(), progress, restarts_left: restarts };
        for start in starts {
            let (child, pipe) = children.spawn(&start, "")?;
            children.children.push((start, child, pipe));
        }
        Ok(children)
    }

    fn spawn(&self, (name, arguments): &Start, why: &str) -> io::Result<(Child, Option<ChildStdin>)> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(arguments).args((!why.is_empty()).then_some("--again"));
        let mut child = command.stdin(Stdio::piped()).kill_on_drop(true).spawn()?;
        self.progress.print(format!("{name:<12} pid {:<8}{why}", child.id().unwrap_or(0)).trim_end());
        let pipe = child.stdin.take();
        Ok((child, pipe))
    }

    /// Restarts killed children. Returns the reason when children are killed more often than allowed, or when a child
    /// ends by itself: it has printed why, and would end in the same way again.
    pub async fn keep_running(&mut self) -> Box<dyn Error> {
        loop {
            let waiting = self.children.iter_mut().map(|(_, child, _)| Box::pin(child.wait()));
            let (status, index, _) = select_all(waiting).await;
            if let Err(error) = status.map_err(Into::into).and_then(|status| self.again(index, status)) {
                return error;
            }
        }
    }

    fn again(&mut self, index: usize, status: ExitStatus) -> Result<(), Box<dyn Error>> {
        let start = self.children[index].0.clone();
        if status.code().is_some() || self.restarts_left == 0 {
            return Err(format!("the {} ended before the training did: {status}", start.0).into());
        }
        self.restarts_left -= 1;
        let (child, pipe) = self.spawn(&start, &format!(" again, after {status}"))?;
        self.children[index] = (start, child, pipe);
        Ok(())
    }

    /// Closes the input of all children, and waits for each.
    ///
    /// # Errors
    /// A child ended with an error.
    pub async fn let_go(mut self) -> io::Result<()> {
        self.children.iter_mut().for_each(|(_, _, pipe)| *pipe = None);
        for ((name, _), child, _) in &mut self.children {
            let status = child.wait().await?;
            if !status.success() {
                return Err(io::Error::other(format!("the {name} did not end well: {status}")));
            }
        }
        Ok(())
    }
}

/// Starts this program once for each rank, with the environment that `variables` gives it and `--launched`, and waits
/// for all. Killed ranks are no failure as long as one succeeds, because the others continue without them.
///
/// # Errors
/// A rank cannot be started, or ends with an error, or all are killed.
pub async fn run_ranks<const COUNT: usize>(
    ranks: u16,
    variables: impl Fn(u16) -> [(&'static str, String); COUNT],
    is_shown: bool,
) -> Result<(), Box<dyn Error>> {
    let this_program = std::env::current_exe()?;
    let mut running = FuturesUnordered::new();
    for rank in 0..ranks {
        let mut command = Command::new(&this_program);
        command.args(std::env::args_os().skip(1)).arg("--launched").envs(variables(rank));
        let mut child = command.stdin(Stdio::piped()).kill_on_drop(true).spawn()?;
        if is_shown {
            println!("{:<12} pid {}", format!("rank {rank}"), child.id().unwrap_or(0));
        }
        running.push(async move {
            // `wait` would close the child's input, which lives as long as this process.
            let _pipe = child.stdin.take();
            (rank, child.wait().await)
        });
    }
    let mut ended_well = false;
    while let Some((rank, status)) = running.next().await {
        match status? {
            status if status.success() => ended_well = true,
            status if status.code().is_none() => warn(format_args!("rank {rank} was killed: {status}")),
            status => return Err(format!("rank {rank} failed: {status}").into()),
        }
    }
    if ended_well { Ok(()) } else { Err("no rank is left".into()) }
}
