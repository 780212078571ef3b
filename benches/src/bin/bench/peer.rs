//! The second process: executes orders until the control stream ends.

use std::{net::TcpListener, sync::Arc};

use tensorwire::{
    DataType, Tensor, Worker,
    fabric::{Runtime, TokioRuntime},
    pages::Exposed,
    settings::Validation,
};
use tensorwire_fabric::Role;

use super::{
    control::{Answer, Order},
    error::BenchError,
    fabrics::{FabricChoice, Opened},
    limits::{
        LimitWait,
        bare::{self, Answers},
        perftest::{Perftest, Server, VerbsSide},
        shared_memory::SharedMemory,
        signal::{Bells, Signals, WORDS_BYTES},
        stream::{RawStream, answer_once, listen},
    },
    pages::ARENA,
    process,
    ranks::Rank,
    side::{Side, Unconnected},
    workers::{Names, SERVER, device_of, edge_name, start_worker},
};
use crate::arguments::BenchPeer;

/// Executes the orders of the process that started this one, until that ends.
pub(crate) async fn serve(arguments: BenchPeer) -> Result<(), BenchError> {
    process::end_with_parent(arguments)?;
    let (mut control, bells, memory) = process::attach()?;
    let clock = TokioRuntime::current().ok_or(BenchError::Unexpected("no runtime".to_owned()))?;
    let mut peer = BenchServer {
        bells,
        memory,
        content: Vec::new(),
        clock: Arc::new(clock),
        listener: None,
        stream: None,
        opened: None,
        server: None,
        unconnected: None,
        side: None,
        worker: None,
        exposed: None,
        rank: None,
    };
    while let Some(order) = control.receive::<Order>("the next order").await? {
        let answer = peer.obey(order).await.unwrap_or_else(|error| Some(Answer::Failed(error.to_string())));
        if let Some(answer) = answer {
            control.send(&answer, "an answer").await?;
        }
    }
    Ok(())
}

/// The resources that orders have made.
#[derive(Debug)]
struct BenchServer {
    bells: Bells,
    memory: SharedMemory,
    /// The last content.
    content: Vec<u8>,
    clock: Arc<dyn Runtime>,
    listener: Option<TcpListener>,
    stream: Option<RawStream>,
    opened: Option<Opened>,
    server: Option<Server>,
    unconnected: Option<Unconnected>,
    side: Option<Side>,
    worker: Option<Worker>,
    exposed: Option<Exposed>,
    rank: Option<Rank>,
}

fn missing(what: &str) -> BenchError {
    BenchError::Unexpected(format!("an order that needs {what} first"))
}

impl BenchServer {
    /// Executes one order. An order whose effect the other process can see has no answer.
    async fn obey(&mut self, order: Order) -> Result<Option<Answer>, BenchError> {
        match order {
            Order::Answer { answers } => return self.answer(answers).map(|()| None),
            Order::StreamEcho { count, bytes, wait } => {
                return self.echo_stream(count, bytes, wait).map(|()| None);
            }
            Order::StreamTake { count, bytes, wait } => {
                return self.take_stream(count, bytes, wait).map(|()| None);
            }
            Order::StreamServe { count, asked, bytes, wait } => {
                return self.serve_stream(count, (asked, bytes), wait).map(|()| None);
            }
            Order::Listen => return self.listen().map(Some),
            Order::Accept { count } => return self.accept(count).map(|()| None),
            Order::Echo { count } => return self.side()?.echo(count).await.map(|()| None),
            Order::Take { count } => return self.side()?.take(count).await.map(|()| None),
            Order::WriteBothWays { count } => {
                let side = self.side()?;
                side.meet().await?;
                return side.write_both_ways(count).await.map(|()| None);
            }
            Order::Send { to, step, keys } => return self.send(&to, step, keys).map(|()| None),
            Order::Fill { value, bytes, pieces } => self.fill(value, bytes, pieces),
            Order::Stream { port } => self.stream = Some(RawStream::connect(port).await?),
            Order::Open { choice } => self.open(&choice)?,
            Order::Prepare { bytes } => return self.prepare(bytes).map(Some),
            Order::Perftest { test, operations, bytes } => {
                return self.serve_perftest(test, (operations, bytes)).await.map(Some);
            }
            Order::Connect { side } => {
                let unconnected = self.unconnected.take().ok_or_else(|| missing("a prepared side"))?;
                self.side = Some(unconnected.connect(side, Role::Dialer).await?);
            }
            Order::Worker => {
                let worker = start_worker(SERVER, self.opened()?, Validation::Off).await?;
                let address = worker.address().to_owned();
                self.worker = Some(worker);
                return Ok(Some(Answer::Address(address)));
            }
            Order::Publish { names, value, bytes, copies } => self.publish(names, value, bytes, copies)?,
            Order::Expose { pages, page_bytes } => {
                let arena = self.worker()?.arena(pages, page_bytes).await?;
                self.exposed = Some(self.worker()?.expose(ARENA, &arena)?);
            }
            Order::Join { seat, values } => {
                self.rank = Some(Rank::join(self.opened()?, &seat, values).await?);
            }
            Order::Collectives { count } => self.collectives(count).await?,
        }
        Ok(Some(Answer::Done))
    }

    fn answer(&self, answers: Answers) -> Result<(), BenchError> {
        let signals = Signals::new(&self.memory, &self.bells, &*self.clock, answers.wait, false);
        bare::answer(signals, &self.memory, &self.content, answers)
    }

    fn stream(&self) -> Result<&RawStream, BenchError> {
        self.stream.as_ref().ok_or_else(|| missing("a stream"))
    }

    fn echo_stream(&self, count: u64, bytes: usize, wait: LimitWait) -> Result<(), BenchError> {
        let (stream, mut message) = (self.stream()?, vec![0; bytes]);
        let wait = stream.prepare(wait, bytes)?;
        for _ in 0..count {
            stream.read(&mut message, wait, &*self.clock)?;
            stream.write(&message, wait, &*self.clock)?;
        }
        Ok(())
    }

    fn take_stream(&self, count: u64, bytes: usize, wait: LimitWait) -> Result<(), BenchError> {
        let (stream, mut message) = (self.stream()?, vec![0; bytes]);
        let wait = stream.prepare(wait, bytes)?;
        for _ in 0..count {
            stream.read(&mut message, wait, &*self.clock)?;
        }
        stream.write(&[0], wait, &*self.clock)
    }

    fn serve_stream(
        &self,
        count: u64,
        (asked, bytes): (usize, usize),
        wait: LimitWait,
    ) -> Result<(), BenchError> {
        let (stream, mut ask, message) = (self.stream()?, vec![0; asked], vec![7; bytes]);
        let wait = stream.prepare(wait, bytes)?;
        for _ in 0..count {
            stream.read(&mut ask, wait, &*self.clock)?;
            stream.write(&message, wait, &*self.clock)?;
        }
        Ok(())
    }

    fn listen(&mut self) -> Result<Answer, BenchError> {
        let (listener, port) = listen()?;
        self.listener = Some(listener);
        Ok(Answer::Port(port))
    }

    fn accept(&self, count: u64) -> Result<(), BenchError> {
        let listener = self.listener.as_ref().ok_or_else(|| missing("a listener"))?;
        (0..count).try_for_each(|_| answer_once(listener))
    }

    fn side(&self) -> Result<&Side, BenchError> {
        self.side.as_ref().ok_or_else(|| missing("a connection"))
    }

    fn open(&mut self, choice: &FabricChoice) -> Result<(), BenchError> {
        self.opened = Some(choice.open(self.clock.clone())?);
        Ok(())
    }

    fn opened(&self) -> Result<&Opened, BenchError> {
        self.opened.as_ref().ok_or_else(|| missing("a fabric"))
    }

    async fn serve_perftest(&mut self, test: Perftest, size: (u64, usize)) -> Result<Answer, BenchError> {
        // The previous server has ended with its client.
        self.server = None;
        let verbs = self.opened()?.verbs.as_ref().ok_or_else(|| missing("a device"))?;
        let (server, port) = Server::start(test, &VerbsSide::new(verbs), size, &*self.clock).await?;
        self.server = Some(server);
        Ok(Answer::Port(port))
    }

    fn prepare(&mut self, bytes: usize) -> Result<Answer, BenchError> {
        let unconnected = Unconnected::prepare(self.opened()?, bytes)?;
        let data = unconnected.data();
        self.unconnected = Some(unconnected);
        Ok(Answer::Side(data))
    }

    fn fill(&mut self, value: u8, bytes: usize, pieces: usize) {
        self.content.clear();
        self.content.resize(bytes, value);
        for piece in 0..pieces {
            self.memory.write(WORDS_BYTES + piece * bytes, &self.content);
        }
    }

    fn worker(&self) -> Result<&Worker, BenchError> {
        self.worker.as_ref().ok_or_else(|| missing("a worker"))
    }

    fn publish(&self, names: Names, value: u8, bytes: usize, copies: usize) -> Result<(), BenchError> {
        let worker = self.worker()?;
        for copy in 0..copies {
            let mut buffer = worker.pool().try_alloc(bytes)?;
            buffer.fill(value);
            worker.publish(&names.of(copy), Tensor::new(buffer, DataType::U8, &[bytes as u64])?)?;
        }
        Ok(())
    }

    /// A rank that fails leaves the group, so that the others need not wait for it.
    async fn collectives(&mut self, count: u64) -> Result<(), BenchError> {
        let mut rank = self.rank.take().ok_or_else(|| missing("a group"))?;
        rank.begin().await?;
        for _ in 0..count {
            rank.call().await?;
        }
        self.rank = Some(rank);
        Ok(())
    }

    fn send(&self, to: &str, step: i64, keys: usize) -> Result<(), BenchError> {
        let worker = self.worker()?;
        let (here, there) = (device_of(worker.name()), device_of(to));
        let step = worker.shared_step(step);
        let alike = worker.key(&here, &there, &edge_name(0))?;
        for key in 0..keys {
            let key = alike
                .with_edge(&edge_name(key))
                .map_err(|invalid| BenchError::Unexpected(invalid.to_string()))?;
            step.send(&key, Tensor::from_bytes(worker.pool(), DataType::U8, &[8], &[7; 8])?)?;
        }
        Ok(())
    }
}
