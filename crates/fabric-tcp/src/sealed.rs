//! The records of an encrypted stream: rustls' record layer, between the socket and the sender and receiver.
//!
//! Sent bytes are encrypted into records, and are not needed afterwards. The connection buffers the records that the
//! socket does not take at once. Received bytes are decrypted record by record, and copied once, to their
//! destination. Both directions share one lock, which is held for a few records at a time.

use std::{
    fmt,
    io::{self, BufRead, IoSlice, Read, Write},
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustls::Connection;
use tensorwire_memory::{
    RemoteAccess,
    copy::{CopyReason, copy_bytes, copy_raw},
};

/// Bytes read from the socket at once. A record has at most 16 KiB of payload.
const TAKEN_BYTES: usize = 64 << 10;

/// The most bytes that are encrypted at once and may wait for the socket.
const SEALED_BYTES_MAX: usize = 128 << 10;

/// The bare stream under the records.
pub(super) trait Bare {
    /// Passes bytes of `slices`, in order, to the kernel, and returns how many it accepted.
    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Receives the bytes that have arrived; 0 at the end of the stream.
    fn receive(&self, into: &mut [u8]) -> io::Result<usize>;
}

/// An encrypted stream's records.
pub(super) struct Sealed(Mutex<Records>);

impl fmt::Debug for Sealed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sealed")
    }
}

struct Records {
    connection: Connection,
    /// Bytes read from the socket.
    taken: Box<[u8]>,
    /// The range of `taken` that is not decrypted yet.
    rest: (usize, usize),
    is_finished: bool,
}

impl Sealed {
    /// The records of a connection after its handshake.
    pub(super) fn new(mut connection: Connection) -> Self {
        connection.set_buffer_limit(Some(SEALED_BYTES_MAX));
        let taken = vec![0; TAKEN_BYTES].into_boxed_slice();
        Self(Mutex::new(Records { connection, taken, rest: (0, 0), is_finished: false }))
    }

    /// Encrypts bytes of `slices`, in order, and passes records to the socket. Returns how many bytes were accepted.
    /// Some of their records may still wait here; see [`flush`](Self::flush).
    pub(super) fn send(&self, bare: &impl Bare, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut records = self.records();
        records.flush(bare)?;
        let taken = records.connection.writer().write_vectored(slices)?;
        match records.flush(bare) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(taken),
        }
    }

    /// Passes the waiting records to the kernel.
    ///
    /// # Errors
    /// `WouldBlock`: the kernel did not take all of them.
    pub(super) fn flush(&self, bare: &impl Bare) -> io::Result<()> {
        self.records().flush(bare)
    }

    /// Sends TLS's close alert: nothing more follows.
    pub(super) fn finish(&self, bare: &impl Bare) -> io::Result<()> {
        let mut records = self.records();
        if !std::mem::replace(&mut records.is_finished, true) {
            records.connection.send_close_notify();
        }
        records.flush(bare)
    }

    /// Receives decrypted bytes; 0 at the end of the stream.
    pub(super) fn receive(&self, bare: &impl Bare, into: &mut [u8]) -> io::Result<usize> {
        let mut records = self.records();
        if !records.fill(bare)? {
            return Ok(0);
        }
        let mut reader = records.connection.reader();
        let bytes = copy_bytes(into, reader.fill_buf()?, CopyReason::Decrypted);
        reader.consume(bytes);
        Ok(bytes)
    }

    /// Receives decrypted bytes into granted memory, and the following ones, if they have arrived, into `next`; 0 at
    /// the end.
    pub(super) fn receive_into(
        &self,
        bare: &impl Bare,
        access: &RemoteAccess<'_>,
        next: &mut [u8],
    ) -> io::Result<usize> {
        let mut records = self.records();
        let mut total = 0;
        while total < access.length() {
            let found = match records.fill(bare) {
                Ok(found) => found,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && total > 0 => return Ok(total),
                Err(error) => return Err(error),
            };
            if !found {
                return Ok(total);
            }
            total += records.copy_out(access, total)?;
        }
        Ok(total + records.read_ahead(next)?)
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Records {
    fn flush(&mut self, bare: &impl Bare) -> io::Result<()> {
        while self.connection.wants_write() {
            self.connection.write_tls(&mut ToKernel(bare))?;
        }
        Ok(())
    }

    /// Decrypts bytes, if any have arrived. Returns false at the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock`: none have arrived. `InvalidData`, with the reason: the records are not those that the peer sent.
    fn fill(&mut self, bare: &impl Bare) -> io::Result<bool> {
        loop {
            match self.connection.reader().fill_buf() {
                Ok(chunk) => return Ok(!chunk.is_empty()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            if self.rest.0 == self.rest.1 {
                let bytes = bare.receive(&mut self.taken)?;
                if bytes == 0 {
                    return Ok(false);
                }
                self.rest = (0, bytes);
            }
            self.open(bare)?;
        }
    }

    /// Decrypts some of `taken`.
    fn open(&mut self, bare: &impl Bare) -> io::Result<()> {
        let mut rest = self.taken.get(self.rest.0..self.rest.1).unwrap_or_default();
        self.rest.0 += self.connection.read_tls(&mut rest)?;
        let opened = self.connection.process_new_packets();
        // Sends alerts and answers of TLS. Bytes that the socket does not accept now are sent with the next ones.
        match self.flush(bare) {
            Err(error) if opened.is_ok() && error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            _ => {}
        }
        opened.map(drop).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Copies decrypted bytes into granted memory, after the first `done` bytes.
    fn copy_out(&mut self, access: &RemoteAccess<'_>, done: usize) -> io::Result<usize> {
        let mut reader = self.connection.reader();
        let chunk = reader.fill_buf()?;
        let bytes = chunk.len().min(access.length() - done);
        // SAFETY: a `RemoteAccess` is writable for its length while it lives, which is beyond the call, and `done + bytes`
        // is within it; the chunk is the connection's own memory.
        unsafe { copy_raw(access.pointer().add(done), chunk.as_ptr(), bytes, CopyReason::Decrypted) };
        reader.consume(bytes);
        Ok(bytes)
    }

    /// Reads bytes that are decrypted already.
    fn read_ahead(&mut self, next: &mut [u8]) -> io::Result<usize> {
        if next.is_empty() {
            return Ok(0);
        }
        match self.connection.reader().read(next) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            // The next read reports it again.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
            answer => answer,
        }
    }
}

/// The kernel as the destination of records.
struct ToKernel<'socket, B>(&'socket B);

impl<B: Bare> Write for ToKernel<'_, B> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.send(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
