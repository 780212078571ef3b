//! How fast parameters and gradients move, beside gRPC in the same run.
//!
//! One server and two workers, each a process, are connected in every way that is measured. A round is one exchange over
//! one of them: both workers pull all parameters and push all gradients, which were computed before, and the round ends
//! when the server has both. Ways take turns, so that whatever else the machine does meets all of them. The same again
//! with the server's arithmetic gives the whole step.

mod grpc;
mod outcome;
mod server;
mod tensors;
mod transport;
mod update;
mod worker;

use std::{
    collections::BTreeMap,
    io,
    sync::mpsc::{self, Receiver, SyncSender},
    time::Duration,
};

use tensorwire::{Tensor, Worker, WorkerError};

use self::{
    outcome::{Outcome, Row},
    transport::Transport,
};
use crate::{
    block_on,
    children::{Event, Process},
    failure::Failure,
    options::{Flags, RoleName},
    report::Report,
};

/// Workers that exchange at the same time.
const WORKERS: usize = 2;
/// The server's name.
const SERVER: RoleName = RoleName::Server(0);
/// What gRPC's tensors are made of: no memory that the kernel has not made yet.
const FILL: u8 = 7;
/// Rounds that are not counted: memory is made in them.
const WARM_UP: u64 = 2;
/// How long a round may take.
const ROUND_MAX: Duration = Duration::from_secs(120);
/// Events that wait to be read, at most.
const EVENTS_MAX: usize = 64;

/// Is one process of the bench, or starts all of them.
pub(crate) fn run(flags: &Flags) -> Result<(), Failure> {
    let sizes = tensors::sizes(flags.parameters);
    match flags.bench_role {
        None => launch(flags, &sizes),
        Some(RoleName::Server(_)) => block_on(server::run(&sizes)),
        Some(RoleName::Worker(index)) => block_on(worker::run(index, &sizes)),
    }
}

/// A runtime as a service written with tonic has.
fn grpc_runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()
}

fn device(transport: Transport, role: RoleName) -> String {
    format!("{}/device:CPU:0", transport.worker_name(role))
}

/// Whether the server is to make the update, as a worker tells it.
struct Flag(bool);

impl Flag {
    fn to_tensor(&self, worker: &Worker) -> Result<Tensor, WorkerError> {
        Tensor::from_values(worker.pool(), &[], &[u8::from(self.0)])
    }

    fn is_set(tensor: &Tensor) -> Result<bool, WorkerError> {
        Ok(tensor.values::<u8>()?.first() == Some(&1))
    }
}

fn launch(flags: &Flags, sizes: &[usize]) -> Result<(), Failure> {
    let mut bench = Processes::start(flags)?;
    let uses = bench.connect()?;
    let mut rows: BTreeMap<Transport, Row> =
        uses.into_iter().map(|(transport, uses)| (transport, Row::new(uses))).collect();
    for round in 0..flags.rounds + WARM_UP {
        let mut order = Transport::ALL;
        order.rotate_left((round % Transport::ALL.len() as u64) as usize);
        for (transport, update) in
            order.into_iter().flat_map(|transport| [(transport, false), (transport, true)])
        {
            let times = bench.round(transport, update)?;
            if round >= WARM_UP
                && let Some(row) = rows.get_mut(&transport)
            {
                row.note(update, times);
            }
        }
        if !flags.json {
            eprintln!("round {} of {}", round + 1, flags.rounds + WARM_UP);
        }
    }
    let outcome = Outcome::new(sizes, flags.rounds, rows);
    if flags.json {
        println!("{}", outcome.json());
    } else {
        println!("{outcome}");
    }
    bench.end()
}

/// The server and the workers, in this order.
struct Processes {
    children: Vec<Process>,
    events: Receiver<(usize, Event)>,
}

impl Processes {
    fn start(flags: &Flags) -> Result<Self, Failure> {
        let (sender, events) = mpsc::sync_channel(EVENTS_MAX);
        let mut children = Vec::new();
        for role in
            std::iter::once("ps:0".to_owned()).chain((0..WORKERS).map(|index| format!("worker:{index}")))
        {
            let arguments = ["--bench", "--bench-role", &role, "--parameters", &flags.parameters.to_string()]
                .map(str::to_owned);
            let sender: SyncSender<_> = sender.clone();
            children.push(Process::start(&arguments, children.len(), sender).map_err(Failure::Start)?);
        }
        Ok(Self { children, events })
    }

    /// Connects the workers to the server, in every way. Gives the fabric that each uses.
    fn connect(&mut self) -> Result<BTreeMap<Transport, String>, Failure> {
        let mut addresses = Vec::new();
        while addresses.len() < Transport::ALL.len() {
            addresses.push(self.next_report()?.1);
        }
        let mut uses = BTreeMap::new();
        for address in &addresses {
            for worker in 1..=WORKERS {
                self.tell(worker, address)?;
            }
            for _ in 0..WORKERS {
                let (_, connected) = self.next_report()?;
                if let (Some(transport), Some(name)) = (connected.value("connected"), connected.value("uses"))
                {
                    uses.insert(transport, name);
                }
            }
        }
        self.tell(0, &Report::of("workers", "connected"))?;
        Ok(uses)
    }

    /// One round: how long pull and push took, of the worker that took longer.
    fn round(&mut self, transport: Transport, update: bool) -> Result<(f64, f64), Failure> {
        for worker in 1..=WORKERS {
            self.tell(worker, &Report::of("transport", transport).with("update", update))?;
        }
        let mut slowest = (0.0, 0.0);
        for _ in 0..WORKERS {
            let (_, report) = self.next_report()?;
            let times = (report.value("pull").unwrap_or(f64::NAN), report.value("push").unwrap_or(f64::NAN));
            if times.0 + times.1 > slowest.0 + slowest.1 {
                slowest = times;
            }
        }
        Ok(slowest)
    }

    fn tell(&mut self, index: usize, report: &Report) -> Result<(), Failure> {
        self.children[index].tell(report).map_err(Failure::Pipe)
    }

    fn next_report(&mut self) -> Result<(usize, Report), Failure> {
        loop {
            match self.events.recv_timeout(ROUND_MAX) {
                Ok((index, Event::Report(report))) => return Ok((index, report)),
                Ok((_, Event::Text(line))) => eprintln!("{line}"),
                Ok((index, Event::Ended)) => {
                    let status = self.children[index].wait().map_err(Failure::Start)?;
                    return Err(Failure::ChildEnded { name: process_name(index), status });
                }
                Err(_) => return Err(Failure::Silence { limit: ROUND_MAX }),
            }
        }
    }

    /// Lets go of all, the server first, since it waits for the workers' next round, and waits for each.
    fn end(&mut self) -> Result<(), Failure> {
        for (index, child) in self.children.iter_mut().enumerate() {
            let status = child.wait().map_err(Failure::Start)?;
            if !status.success() {
                return Err(Failure::ChildEnded { name: process_name(index), status });
            }
        }
        Ok(())
    }
}

fn process_name(index: usize) -> String {
    index.checked_sub(1).map_or(SERVER, RoleName::Worker).to_string()
}
