//! The conversation of a client and a server: tensors of text in a separate step, whose number is the client's
//! incarnation.
//!
//! | client sends | server sends |
//! | --- | --- |
//! | `version V` | its own version; then, if it made the connection, one line for each reason to use no better fabric |
//! | `publish BYTES` | `ready`, when a tensor of this many bytes is published under [`PUBLISHED`] |
//! | `echo` | `ready`, then returns each tensor, until one without bytes |

use std::time::Duration;

use tensorwire::{DataType, Peer, Step, Tensor, Worker, WorkerError};

/// The workers' names. One client measures with a server at a time.
pub(super) const SERVER: &str = "/job:bench/replica:0/task:0";
pub(super) const CLIENT: &str = "/job:bench/replica:0/task:1";

/// The version that both sides must have.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The name of the tensor that is fetched.
pub(super) const PUBLISHED: &str = "measured";

/// How long a server may take to answer: allocating the largest tensor takes a fraction of it.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// How long a client may measure without sending a request.
const ASK_LIMIT: Duration = Duration::from_secs(2 * 3600);
/// How long one tensor may take.
const TENSOR_LIMIT: Duration = Duration::from_secs(60);

/// One side of a conversation.
pub(super) struct Conversation {
    worker: Worker,
    pub(super) peer: Peer,
    step: Step,
}

impl Conversation {
    /// The conversation of `worker` with `peer`. `incarnation` is the client's.
    pub(super) fn new(worker: &Worker, peer: Peer, incarnation: u64) -> Self {
        let step = worker.step((incarnation >> 1).cast_signed());
        Self { worker: worker.clone(), peer, step }
    }

    /// The client's next request.
    pub(super) async fn asked(&self) -> Result<String, WorkerError> {
        self.text("ask", ASK_LIMIT).await
    }

    /// Answers the client.
    pub(super) fn answer(&self, text: &str) -> Result<(), WorkerError> {
        self.say("answer", text)
    }

    /// Asks the server, and returns its answer.
    pub(super) async fn ask(&self, text: &str) -> Result<String, WorkerError> {
        self.say("ask", text)?;
        self.text("answer", ANSWER_LIMIT).await
    }

    /// Sends a tensor that is measured.
    pub(super) fn send(&self, tensor: Tensor) -> Result<(), WorkerError> {
        self.step.to(&self.peer).send("ball", tensor)
    }

    /// Receives a tensor that is measured.
    pub(super) async fn receive(&self) -> Result<Tensor, WorkerError> {
        self.step.from(&self.peer).recv("ball").timeout(TENSOR_LIMIT).await
    }

    /// A tensor of `bytes` bytes.
    pub(super) fn tensor(&self, bytes: u64) -> Result<Tensor, WorkerError> {
        let mut buffer = self.worker.pool().try_alloc(usize::try_from(bytes).unwrap_or(usize::MAX))?;
        buffer.fill(7);
        Tensor::new(buffer, DataType::U8, &[bytes])
    }

    fn say(&self, name: &str, text: &str) -> Result<(), WorkerError> {
        let bytes = text.as_bytes();
        let tensor = Tensor::from_bytes(self.worker.pool(), DataType::U8, &[bytes.len() as u64], bytes)?;
        self.step.to(&self.peer).send(name, tensor)
    }

    async fn text(&self, name: &str, limit: Duration) -> Result<String, WorkerError> {
        let tensor = self.step.from(&self.peer).recv(name).timeout(limit).await?;
        Ok(String::from_utf8_lossy(tensor.bytes()).into_owned())
    }
}
