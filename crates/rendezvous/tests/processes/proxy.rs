//! A proxy in front of TCP ports that treats what it passes on badly.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use rustix::net::sockopt::set_socket_linger;

/// How often a pump looks whether its connection is to end.
const LOOK: Duration = Duration::from_millis(5);

/// Bytes that are read at once.
const CHUNK: usize = 64 << 10;

/// The two directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// From who dialled to who listens.
    There,
    /// Back.
    Back,
}

/// What happens to one byte of a direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Harm {
    /// The connection ends in both directions, in order.
    Cut,
    /// This direction ends in order; the other goes on.
    HalfClose,
    /// The connection is reset at both sides.
    Reset,
    /// A bit of the byte is flipped.
    Flip(u8),
}

/// How bytes go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// As they come.
    AsTheyCome,
    /// Each chunk so much later.
    Late(Duration),
    /// Each byte alone.
    ByBytes,
    /// Not at all, until the pace is another: nothing is lost.
    Held,
}

#[derive(Debug)]
struct State {
    pace: Pace,
    /// What happens after so many more bytes of a direction, of all connections together.
    armed: Option<(Way, u64, Harm)>,
    /// Bytes that came there and back, of all connections together.
    came: [u64; 2],
    links: Vec<Weak<Link>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Harm done.
    done: AtomicU64,
    over: AtomicBool,
}

/// One connection through the proxy.
#[derive(Debug)]
struct Link {
    dialler: TcpStream,
    listener: TcpStream,
    over: AtomicBool,
}

/// A proxy. Its connections end with it.
#[derive(Debug)]
pub(crate) struct Proxy {
    shared: Arc<Shared>,
    /// Ports of the loopback that it is in front of, and its own.
    ports: Mutex<BTreeMap<u16, u16>>,
}

impl Proxy {
    /// In front of nothing yet.
    pub(crate) fn new() -> Self {
        let state = State { pace: Pace::AsTheyCome, armed: None, came: [0; 2], links: Vec::new() };
        let shared =
            Shared { state: Mutex::new(state), done: AtomicU64::new(0), over: AtomicBool::new(false) };
        Self { shared: Arc::new(shared), ports: Mutex::default() }
    }

    /// The port that leads to this port of the loopback.
    pub(crate) fn port(&self, to: u16) -> u16 {
        *self.ports.lock().unwrap().entry(to).or_insert_with(|| {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let own = listener.local_addr().unwrap().port();
            let shared = self.shared.clone();
            thread::spawn(move || {
                for dialler in listener.incoming() {
                    if shared.over.load(Ordering::SeqCst) {
                        return;
                    }
                    dialler.map(|dialler| shared.clone().serve(dialler, to)).ok();
                }
            });
            own
        })
    }

    pub(crate) fn pace(&self, pace: Pace) {
        self.shared.state.lock().unwrap().pace = pace;
    }

    /// `harm` happens to the byte after `bytes` more in direction `way`.
    pub(crate) fn arm(&self, way: Way, bytes: u64, harm: Harm) {
        self.shared.state.lock().unwrap().armed = Some((way, bytes, harm));
    }

    /// Nothing happens any more, if nothing has yet.
    pub(crate) fn disarm(&self) {
        self.shared.state.lock().unwrap().armed = None;
    }

    /// Bytes that came there and back, of all connections together.
    pub(crate) fn came(&self) -> [u64; 2] {
        self.shared.state.lock().unwrap().came
    }

    /// How much harm was done.
    pub(crate) fn done(&self) -> u64 {
        self.shared.done.load(Ordering::SeqCst)
    }

    /// Ends all connections, in order or by a reset.
    pub(crate) fn cut(&self, is_reset: bool) {
        let links: Vec<_> = self.shared.state.lock().unwrap().links.drain(..).collect();
        links.iter().filter_map(Weak::upgrade).for_each(|link| link.end(is_reset));
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut(false);
        self.shared.over.store(true, Ordering::SeqCst);
        for own in self.ports.lock().unwrap().values() {
            // Wakes who accepts.
            let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, *own));
        }
    }
}

impl Shared {
    fn serve(self: Arc<Self>, dialler: TcpStream, to: u16) {
        // Nobody listens there: whoever dialled finds the connection closed.
        let Ok(listener) = TcpStream::connect((Ipv4Addr::LOCALHOST, to)) else { return };
        for socket in [&dialler, &listener] {
            socket.set_nodelay(true).unwrap();
            socket.set_read_timeout(Some(LOOK)).unwrap();
        }
        let link = Arc::new(Link { dialler, listener, over: AtomicBool::new(false) });
        {
            let links = &mut self.state.lock().unwrap().links;
            links.retain(|link| link.strong_count() > 0);
            links.push(Arc::downgrade(&link));
        }
        for way in [Way::There, Way::Back] {
            let (shared, link) = (self.clone(), link.clone());
            thread::spawn(move || {
                let ended = shared.pump(&link, way);
                if ended.is_err() {
                    link.end(false);
                }
            });
        }
    }

    /// Passes bytes on until the stream is over.
    fn pump(&self, link: &Link, way: Way) -> io::Result<()> {
        let (mut from, mut to) = match way {
            Way::There => (&link.dialler, &link.listener),
            Way::Back => (&link.listener, &link.dialler),
        };
        let mut chunk = vec![0; CHUNK];
        while !link.over.load(Ordering::SeqCst) {
            if self.state.lock().unwrap().pace == Pace::Held {
                thread::sleep(LOOK);
                continue;
            }
            let length = match from.read(&mut chunk) {
                Ok(0) => return to.shutdown(Shutdown::Write),
                Ok(length) => length,
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    continue;
                }
                Err(error) => return Err(error),
            };
            let (whole, harm) = self.harm(way, &mut chunk[..length]);
            self.pass(&chunk[..whole], &mut to)?;
            match harm {
                Some(Harm::Cut) => link.end(false),
                Some(Harm::Reset) => link.end(true),
                Some(Harm::HalfClose) => return to.shutdown(Shutdown::Write),
                Some(Harm::Flip(_)) | None => {}
            }
        }
        Ok(())
    }

    /// What happens to these bytes: how many of them go on, and what then.
    fn harm(&self, way: Way, bytes: &mut [u8]) -> (usize, Option<Harm>) {
        let mut state = self.state.lock().unwrap();
        state.came[way as usize] += bytes.len() as u64;
        let Some((armed, left, harm)) = &mut state.armed else { return (bytes.len(), None) };
        if *armed != way {
            return (bytes.len(), None);
        }
        if *left >= bytes.len() as u64 {
            *left -= bytes.len() as u64;
            return (bytes.len(), None);
        }
        let (at, harm) = (*left as usize, *harm);
        state.armed = None;
        self.done.fetch_add(1, Ordering::SeqCst);
        if let Harm::Flip(bit) = harm {
            bytes[at] ^= 1 << (bit % 8);
            return (bytes.len(), Some(harm));
        }
        (at, Some(harm))
    }

    fn pass(&self, bytes: &[u8], to: &mut &TcpStream) -> io::Result<()> {
        let pace = self.state.lock().unwrap().pace;
        match pace {
            Pace::ByBytes => bytes.chunks(1).try_for_each(|byte| to.write_all(byte)),
            Pace::Late(delay) => {
                thread::sleep(delay);
                to.write_all(bytes)
            }
            Pace::AsTheyCome | Pace::Held => to.write_all(bytes),
        }
    }
}

impl Link {
    fn end(&self, is_reset: bool) {
        self.over.store(true, Ordering::SeqCst);
        for socket in [&self.dialler, &self.listener] {
            if is_reset {
                // Its close, once both pumps have let go of it, is a reset.
                let _ = set_socket_linger(socket, Some(Duration::ZERO));
            } else {
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
    }
}
