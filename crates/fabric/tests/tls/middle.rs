//! A proxy between two ends that records the bytes, and may change them.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Mutex},
};

use tensorwire_fabric::ConnectionData;

use crate::tls::HOST;

/// Position of the port in connection data.
const PORT: std::ops::Range<usize> = 19..21;

/// The bytes that passed in each direction.
#[derive(Clone, Default)]
pub(crate) struct Seen {
    pub(crate) from_dialer: Arc<Mutex<Vec<u8>>>,
    pub(crate) from_acceptor: Arc<Mutex<Vec<u8>>>,
}

/// Connection data that leads to the same side through the middle, which flips a bit of the byte number `flip` from the
/// dialer.
pub(crate) fn through(data: &ConnectionData, flip: Option<usize>) -> (ConnectionData, Seen) {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let mut led = data.clone();
    led.0[PORT].copy_from_slice(&listener.local_addr().unwrap().port().to_le_bytes());
    let to = port(data);
    let seen = Seen::default();
    let recorded = seen.clone();
    std::thread::spawn(move || {
        let (dialer, _) = listener.accept().unwrap();
        let acceptor = TcpStream::connect((HOST, to)).unwrap();
        let back = (acceptor.try_clone().unwrap(), dialer.try_clone().unwrap());
        let from_acceptor = recorded.from_acceptor;
        std::thread::spawn(move || pass(back.0, back.1, &from_acceptor, None));
        pass(dialer, acceptor, &recorded.from_dialer, flip);
    });
    (led, seen)
}

pub(crate) fn port(data: &ConnectionData) -> u16 {
    u16::from_le_bytes(data.0[PORT].try_into().unwrap())
}

fn pass(mut from: TcpStream, mut to: TcpStream, seen: &Mutex<Vec<u8>>, flip: Option<usize>) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        let bytes = &mut buffer[..read];
        let mut seen = seen.lock().unwrap();
        if let Some(at) = flip.and_then(|flip| flip.checked_sub(seen.len()))
            && at < read
        {
            bytes[at] ^= 4;
        }
        seen.extend_from_slice(bytes);
        drop(seen);
        if to.write_all(bytes).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
}
