//! The messages between the test's process and the other one. A frame is its length in 4 bytes, then the message.

use std::io::{self, Read, Write};

use tensorwire_fabric::{
    Access, Capabilities, ConnectParams, FabricError, Immediate, QueuePairConfig, RemoteRange, RemoteRegion,
};

use super::wire::{Wire, enums};

/// Number of an object of the other process. The test's process assigns the numbers.
pub(super) type Number = u64;

/// Commands, executed in the order in which they are sent.
#[derive(Debug)]
pub(super) enum Command {
    /// Answered by a `Made`.
    MakeFabric {
        call: Number,
        fabric: Number,
    },
    /// Its answer is empty.
    DropFabric {
        fabric: Number,
    },
    /// Its answer is empty, or an error.
    OpenDomain {
        call: Number,
        fabric: Number,
        domain: Number,
    },
    DropDomain {
        domain: Number,
    },
    /// Registers the memory behind a descriptor of the test's process. Answered by a `RemoteRegion`.
    Register {
        call: Number,
        domain: Number,
        block: Number,
        descriptor: u32,
        length: u64,
        access: Access,
    },
    /// Answered by the connection data.
    Prepare {
        call: Number,
        domain: Number,
        end: Number,
        config: QueuePairConfig,
    },
    /// Answered by `Connected`.
    Connect {
        end: Number,
        params: ConnectParams,
    },
    /// Drops a side that is not connected.
    Abandon {
        end: Number,
    },
    /// Answered by `Completed`. `regions` are the peer's regions that `work` uses.
    Submit {
        end: Number,
        key: u64,
        work: Work,
        regions: Vec<RemoteRegion>,
    },
    /// Takes one arrival. Answered by `Arrived` or `Failed`.
    TakeArrival {
        end: Number,
    },
    /// Answered by a `QueuePairStats`.
    Stats {
        call: Number,
        end: Number,
    },
    /// Answered by `Drained`.
    Close {
        end: Number,
    },
    /// Releases everything. Its answer is empty.
    EndTest {
        call: Number,
    },
}

/// Messages of the other process.
#[derive(Debug)]
pub(super) enum Event {
    Answered { call: Number, answer: Result<Vec<u8>, FabricError> },
    Connected { end: Number, result: Result<Capabilities, FabricError> },
    Completed { end: Number, key: u64, result: Result<(), FabricError> },
    Arrived { end: Number, immediate: Immediate, length: u64 },
    Failed { end: Number, failure: FabricError },
    Drained { end: Number },
}

/// A work request whose bytes lie in shared blocks.
#[derive(Debug)]
pub(super) enum Work {
    Write { local: Place, remote: Option<RemoteRange>, immediate: Option<Immediate> },
    WriteVectored { segments: Vec<Part>, immediate: Option<Immediate> },
    Read { part: Part },
    ReadVectored { segments: Vec<Part> },
}

/// Bytes of a block. If `length` is 0, the block does not matter.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) block: Number,
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// Bytes of a block, and the peer's range that they are written to or read from.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) local: Place,
    pub(super) remote: RemoteRange,
}

enums! {
    Command {
        MakeFabric { call fabric }
        DropFabric { fabric }
        OpenDomain { call fabric domain }
        DropDomain { domain }
        Register { call domain block descriptor length access }
        Prepare { call domain end config }
        Connect { end params }
        Abandon { end }
        Submit { end key work regions }
        TakeArrival { end }
        Stats { call end }
        Close { end }
        EndTest { call }
    }
    Event {
        Answered { call answer }
        Connected { end result }
        Completed { end key result }
        Arrived { end immediate length }
        Failed { end failure }
        Drained { end }
    }
    Work {
        Write { local remote immediate }
        WriteVectored { segments immediate }
        Read { part }
        ReadVectored { segments }
    }
}

impl Wire for Place {
    fn put(&self, out: &mut Vec<u8>) {
        [self.block, self.offset, self.length].iter().for_each(|number| number.put(out));
    }

    fn get(from: &mut &[u8]) -> Self {
        let [block, offset, length] = [(); 3].map(|()| u64::get(from));
        Self { block, offset, length }
    }
}

impl Wire for Part {
    fn put(&self, out: &mut Vec<u8>) {
        self.local.put(out);
        self.remote.put(out);
    }

    fn get(from: &mut &[u8]) -> Self {
        Self { local: Wire::get(from), remote: Wire::get(from) }
    }
}

/// Sends `message`.
pub(super) fn say(mut stream: impl Write, message: &impl Wire) -> io::Result<()> {
    let mut frame = vec![0; 4];
    message.put(&mut frame);
    let length = u32::try_from(frame.len() - 4).unwrap();
    frame[..4].copy_from_slice(&length.to_le_bytes());
    stream.write_all(&frame)
}

/// The next message; `None` once the sender is gone.
pub(super) fn hear<T: Wire>(mut stream: impl Read) -> Option<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).ok()?;
    let mut frame = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut frame).ok()?;
    let mut rest = &frame[..];
    let message = T::get(&mut rest);
    assert!(rest.is_empty(), "{} bytes too many in a frame", rest.len());
    Some(message)
}
