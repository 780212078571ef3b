//! The second process: executes orders until the control stream ends.

use std::sync::Arc;

use tensorwire::{DataType, Runtime, Tensor, TokioRuntime, Validation, Worker};
use tensorwire_fabric_shm::bare::BareMemory;
use tensorwire_verbs_reactor::Role;

use super::{
    control::{Answer, Order},
    error::BenchError,
    fabrics::{FabricChoice, Opened},
    limits::{
        bell::{Bells, Words},
        perftest::{Perftest, Server, VerbsSide},
        stream::RawStream,
    },
    process,
    side::{Side, Unconnected},
    workers::{SERVER, device_of, edge_name, start_worker, tensor_name},
};
use crate::arguments::bench::BenchPeer;

/// `tensorwire bench-peer`.
pub(crate) async fn serve(arguments: BenchPeer) -> Result<(), BenchError> {
    process::end_with_parent(arguments)?;
    let (mut control, bells, memory) = process::attach()?;
    let clock = TokioRuntime::current().ok_or(BenchError::Unexpected("no runtime".to_owned()))?;
    let mut peer = BenchServer {
        bells,
        memory,
        clock: Arc::new(clock),
        stream: None,
        opened: None,
        server: None,
        unconnected: None,
        side: None,
        worker: None,
    };
    while let Some(order) = control.receive::<Order>("the next order").await? {
        let answer = peer.obey(order).await.unwrap_or_else(|error| Some(Answer::Failed(error.to_string())));
        if let Some(answer) = answer {
            control.send(&answer, "an answer").await?;
        }
    }
    Ok(())
}

/// The resources that it was ordered to make.
#[derive(Debug)]
struct BenchServer {
    bells: Bells,
    memory: BareMemory,
    clock: Arc<dyn Runtime>,
    stream: Option<RawStream>,
    opened: Option<Opened>,
    server: Option<Server>,
    unconnected: Option<Unconnected>,
    side: Option<Side>,
    worker: Option<Worker>,
}

fn missing(what: &str) -> BenchError {
    BenchError::Unexpected(format!("an order that needs {what} first"))
}

impl BenchServer {
    /// Executes one order. An order whose effect the other process can see has no answer.
    async fn obey(&mut self, order: Order) -> Result<Option<Answer>, BenchError> {
        match order {
            Order::Bell { count } => return self.answer_bells(count).map(|()| None),
            Order::Ring { count } => return self.answer_words(count).map(|()| None),
            Order::StreamEcho { count, bytes } => return self.echo_stream(count, bytes).map(|()| None),
            Order::StreamTake { count, bytes } => return self.take_stream(count, bytes).map(|()| None),
            Order::StreamServe { count, bytes } => return self.serve_stream(count, bytes).map(|()| None),
            Order::Echo { count } => return self.side()?.echo(count).await.map(|()| None),
            Order::Take { count } => return self.side()?.take(count).await.map(|()| None),
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
            Order::Publish { value, bytes, copies } => self.publish(value, bytes, copies)?,
        }
        Ok(Some(Answer::Done))
    }

    fn answer_bells(&self, count: u64) -> Result<(), BenchError> {
        for _ in 0..count {
            self.bells.wait()?;
            self.bells.ring()?;
        }
        Ok(())
    }

    fn answer_words(&self, count: u64) -> Result<(), BenchError> {
        let words = Words::new(&self.memory, false);
        for value in 1..=count {
            words.await_value(value, &*self.clock)?;
            words.store(value);
        }
        Ok(())
    }

    fn stream(&self) -> Result<&RawStream, BenchError> {
        self.stream.as_ref().ok_or_else(|| missing("a stream"))
    }

    fn echo_stream(&self, count: u64, bytes: usize) -> Result<(), BenchError> {
        let (stream, mut message) = (self.stream()?, vec![0; bytes]);
        stream.prepare_message(bytes)?;
        for _ in 0..count {
            stream.read_message(&mut message)?;
            stream.write(&message)?;
        }
        stream.set_blocking(true)
    }

    fn take_stream(&self, count: u64, bytes: usize) -> Result<(), BenchError> {
        let (stream, mut message) = (self.stream()?, vec![0; bytes]);
        for _ in 0..count {
            stream.read(&mut message)?;
        }
        stream.write(&[0])
    }

    fn serve_stream(&self, count: u64, bytes: usize) -> Result<(), BenchError> {
        let (stream, message) = (self.stream()?, vec![7; bytes]);
        for _ in 0..count {
            stream.read(&mut [0])?;
            stream.write(&message)?;
        }
        Ok(())
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
        // The one before has ended with its client.
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

    fn fill(&self, value: u8, bytes: usize, pieces: usize) {
        let content = vec![value; bytes];
        for piece in 0..pieces {
            self.memory.write(piece * bytes, &content);
        }
    }

    fn worker(&self) -> Result<&Worker, BenchError> {
        self.worker.as_ref().ok_or_else(|| missing("a worker"))
    }

    fn publish(&self, value: u8, bytes: usize, copies: usize) -> Result<(), BenchError> {
        let worker = self.worker()?;
        for copy in 0..copies {
            let mut buffer = worker.pool().try_alloc(bytes)?;
            buffer.fill(value);
            worker.publish(&tensor_name(copy), Tensor::new(buffer, DataType::U8, &[bytes as u64])?)?;
        }
        Ok(())
    }

    fn send(&self, to: &str, step: i64, keys: usize) -> Result<(), BenchError> {
        let worker = self.worker()?;
        let (here, there) = (device_of(worker.name()), device_of(to));
        let step = worker.shared_step(step);
        for key in 0..keys {
            let key = worker.key(&here, &there, &edge_name(key))?;
            step.send(&key, Tensor::from_bytes(worker.pool(), DataType::U8, &[8], &[7; 8])?)?;
        }
        Ok(())
    }
}
