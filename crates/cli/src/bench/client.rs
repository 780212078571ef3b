//! The client of a benchmark: it measures.

use std::{cell::Cell, future::ready, sync::Arc};

use futures::{StreamExt, stream};
use tensorwire::{Sharing, Worker, WorkerError, fabric::Runtime, settings::ControlError};

use super::{
    conversation::{CLIENT, Conversation, PUBLISHED, SERVER, VERSION},
    figures::{Figures, Length, Row, Samples},
    server::Process,
    worker,
};
use crate::{
    arguments::{
        Fabric,
        bench::{Bench, Op, WaitChoice},
    },
    failure::{BenchError, Failure},
    print,
};

/// Limits of the fetches of `write` under way: their number and their bytes.
const OUTSTANDING_MAX: u64 = 16;
const OUTSTANDING_BYTES_MAX: u64 = 64 << 20;

/// Measures all rows of a fabric with the server that the command line names, or with a second process.
pub(super) async fn measure(arguments: &Bench, fabric: Fabric, wait: WaitChoice) -> Result<(), Failure> {
    let own = worker(arguments, CLIENT, fabric, wait).start().await?;
    let measured = match &arguments.peer {
        Some(address) => rows(&own, arguments, wait, address).await,
        None => {
            let process = Process::start(arguments, fabric, wait)?;
            rows(&own, arguments, wait, process.address()).await
        }
    };
    own.shutdown().await;
    measured
}

async fn rows(own: &Worker, arguments: &Bench, wait: WaitChoice, address: &str) -> Result<(), Failure> {
    let length = Length { time: arguments.time, iterations: arguments.iterations.map(Into::into) };
    let (conversation, theirs) = connect(own, address).await?;
    let client = Client { conversation, runtime: own.runtime(), length };
    for op in arguments.op.iter().flat_map(|op| op.ops()).copied() {
        for (at, &size) in arguments.size.iter().enumerate() {
            let figures = client.figures(op, size).await.map_err(|error| BenchError::Row {
                row: format!("{op:?} of {size} bytes with {address}").to_lowercase(),
                error: Box::new(error.into()),
            })?;
            let Some(info) = own.peers().into_iter().find(|info| info.name == SERVER) else { continue };
            // The side that made the connection knows why it uses no better fabric.
            let not_used = if info.not_used.is_empty() { &theirs } else { &info.not_used };
            let row = Row { op, size, wait, address, transport: info.transport, not_used };
            print(&if arguments.console.json { row.json(&figures) } else { row.text(&figures, at == 0) })?;
        }
    }
    Ok(())
}

/// The server at `address`, of the same version, and its reasons to use no better fabric.
async fn connect(own: &Worker, address: &str) -> Result<(Conversation, Vec<String>), Failure> {
    let address = address.to_owned();
    let server = match own.peer_at(&address).await {
        Err(error @ WorkerError::NameTaken { .. }) => {
            return Err(BenchError::Busy { address, error: Box::new(error.into()) }.into());
        }
        Err(error @ WorkerError::Control(ControlError::Unreachable { .. })) => {
            return Err(BenchError::NotServed { address, error: Box::new(error.into()) }.into());
        }
        server => server?,
    };
    if server.name() != SERVER {
        return Err(BenchError::NotBench { address, name: server.name().to_owned() }.into());
    }
    let conversation = Conversation::new(own, server, own.incarnation());
    let answer = conversation.ask(&format!("version {VERSION}")).await.map_err(|error| BenchError::Row {
        row: format!(
            "the benchmark at {address} does not begin (see what `tensorwire bench --serve` says there)"
        ),
        error: Box::new(error.into()),
    })?;
    let mut lines = answer.lines().map(str::to_owned);
    match lines.next().unwrap_or_default() {
        theirs if theirs == VERSION => Ok((conversation, lines.collect())),
        theirs => Err(BenchError::Version { address, theirs, ours: VERSION }.into()),
    }
}

struct Client<'a> {
    conversation: Conversation,
    runtime: &'a Arc<dyn Runtime>,
    length: Length,
}

impl Client<'_> {
    async fn figures(&self, op: Op, size: u64) -> Result<Figures, WorkerError> {
        match op {
            Op::Pingpong => self.pingpong(size).await,
            Op::Write => self.write(size).await,
            Op::Pull | Op::All => self.pull(size).await,
        }
    }

    async fn pingpong(&self, size: u64) -> Result<Figures, WorkerError> {
        self.conversation.ask("echo").await?;
        let ball = self.conversation.tensor(size)?;
        let trip = async || {
            self.conversation.send(ball.clone())?;
            self.conversation.receive().await.map(drop)
        };
        let samples = self.timed(trip).await?;
        self.conversation.send(self.conversation.tensor(0)?)?;
        Ok(Figures::Latency(samples.halves()))
    }

    async fn pull(&self, size: u64) -> Result<Figures, WorkerError> {
        self.conversation.ask(&format!("publish {size}")).await?;
        Ok(Figures::Latency(self.timed(async || self.fetch().await).await?))
    }

    async fn write(&self, size: u64) -> Result<Figures, WorkerError> {
        self.conversation.ask(&format!("publish {size}")).await?;
        let width = (OUTSTANDING_BYTES_MAX / size).clamp(1, OUTSTANDING_MAX) as usize;
        self.fetch_many(self.length.warm_up(), width).await?;
        self.fetch_many(self.length, width).await
    }

    async fn fetch(&self) -> Result<(), WorkerError> {
        self.conversation.peer.fetch(PUBLISHED).sharing(Sharing::Copy).await.map(drop)
    }

    /// Times operations one by one, after a warm-up.
    async fn timed(
        &self,
        mut operation: impl AsyncFnMut() -> Result<(), WorkerError>,
    ) -> Result<Samples, WorkerError> {
        let mut samples = Samples::default();
        for length in [self.length.warm_up(), self.length] {
            samples = Samples::default();
            let (begin, mut count) = (self.runtime.now(), 0);
            let mut before = begin;
            while !length.is_over(count, before - begin) {
                operation().await?;
                let now = self.runtime.now();
                samples.add(now - before);
                (before, count) = (now, count + 1);
            }
        }
        Ok(samples)
    }

    /// Fetches, `width` at once, until `length` is over, and counts all fetches that were begun.
    async fn fetch_many(&self, length: Length, width: usize) -> Result<Figures, WorkerError> {
        let (begin, begun) = (self.runtime.now(), Cell::new(0));
        let goes_on = || {
            let is_over = length.is_over(begun.get(), self.runtime.now() - begin);
            begun.set(begun.get() + u64::from(!is_over));
            !is_over
        };
        let wanted = stream::repeat(()).take_while(|()| ready(goes_on()));
        let mut fetches = wanted.map(|()| self.fetch()).buffer_unordered(width);
        while let Some(fetched) = fetches.next().await {
            fetched?;
        }
        Ok(Figures::Bandwidth { iterations: begun.get(), time: self.runtime.now() - begin })
    }
}
