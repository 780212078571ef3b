//! The measuring process's handle on the second process.

use std::{
    env,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Child, Command, Stdio},
};

use super::{
    control::{Answer, Control, Order, receive_descriptors, send_descriptors},
    error::{BenchError, system},
    limits::{
        shared_memory::SharedMemory,
        signal::{Bells, bell},
    },
};
use crate::arguments::BenchPeer;

/// A running second process. Dropping this kills and reaps it.
#[derive(Debug)]
pub(super) struct Peer {
    control: Control,
    pub(super) bells: Bells,
    pub(super) memory: SharedMemory,
    child: Reaped,
}

#[derive(Debug)]
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        // The process may have ended by itself: then there is nothing to kill.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Peer {
    /// Starts this program again as the second process, on CPU `cpu`, with `shared_bytes` of bare shared memory.
    pub(super) fn start(cpu: Option<usize>, shared_bytes: usize) -> Result<Self, BenchError> {
        let memory = SharedMemory::create(shared_bytes).map_err(system("shared memory"))?;
        let (stream, theirs) = UnixStream::pair().map_err(BenchError::Spawn)?;
        let mut command = Command::new(env::current_exe().map_err(BenchError::Spawn)?);
        command.arg(BenchPeer::COMMAND).stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
        if let Some(cpu) = cpu {
            command.arg("--cpu").arg(cpu.to_string());
        }
        let child = Reaped(command.spawn().map_err(BenchError::Spawn)?);
        // The command holds the child's socket. It must be closed here, so that the stream ends when the child does.
        drop(command);
        let (mine, their_bell) = (bell()?, bell()?);
        send_descriptors(&stream, &[mine.as_fd(), their_bell.as_fd(), memory.fd()])?;
        let bells = Bells::new(mine, their_bell, stream.as_fd())?;
        Ok(Self { control: Control::new(stream)?, bells, memory, child })
    }

    /// Its process id.
    pub(super) fn id(&self) -> u32 {
        self.child.0.id()
    }

    /// Sends an order without waiting for an answer.
    pub(super) async fn order(&mut self, order: &Order, during: &'static str) -> Result<(), BenchError> {
        self.control.send(order, during).await
    }

    /// The answer to the last order.
    pub(super) async fn answer(&mut self, during: &'static str) -> Result<Answer, BenchError> {
        match self.control.receive(during).await? {
            Some(Answer::Failed(why)) => Err(BenchError::PeerFailed(why)),
            Some(answer) => Ok(answer),
            None => Err(BenchError::PeerGone { during }),
        }
    }

    /// Sends an order, and waits until it is executed.
    pub(super) async fn ask(&mut self, order: &Order, during: &'static str) -> Result<Answer, BenchError> {
        self.order(order, during).await?;
        self.answer(during).await
    }
}

/// The second process's side of [`Peer::start`].
pub(super) fn attach() -> Result<(Control, Bells, SharedMemory), BenchError> {
    let stdin = std::io::stdin();
    let stream = stdin.as_fd().try_clone_to_owned().map_err(system("the control stream"))?;
    let stream = UnixStream::from(stream);
    let [their_bell, mine, memory] = receive_descriptors(&stream)?;
    let bells = Bells::new(mine, their_bell, stream.as_fd())?;
    let memory = SharedMemory::open(memory).map_err(system("shared memory"))?;
    Ok((Control::new(stream)?, bells, memory))
}

/// Ends this process when the process that started it ends.
pub(super) fn end_with_parent(arguments: BenchPeer) -> Result<(), BenchError> {
    use rustix::process::{Signal, set_parent_process_death_signal};
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(system("prctl"))?;
    // If the parent ended before this call, the control stream ends.
    match arguments.cpu {
        Some(cpu) => super::cpus::pin(&[cpu]),
        None => Ok(()),
    }
}
