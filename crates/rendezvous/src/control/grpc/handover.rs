//! Hand-over of the secret between processes of one user on one host.
//!
//! A plane that listens on loopback without a user's secret generates a random one. It gives the secret to every
//! process of the same user that connects to the abstract Unix socket `tensorwire-<port>`; the kernel reports the user
//! id (`SO_PEERCRED`). So nothing is on disk, and a crash leaves nothing behind. In a user namespace in which the
//! id of this process may be that of any unmapped user, nothing is handed over or taken.
//!
//! ```text
//!   dials localhost:4242                               listens on 127.0.0.1:4242, user 1000
//!   connects to @tensorwire-4242 ─────────────────▶  same user?
//!   same user?  ◀───────────────────── 32 bytes of secret, "127.0.0.1:4242"
//!   dials 127.0.0.1:4242, and proves the secret for this connection ─────▶
//! ```
//!
//! The secret comes with the plane's listen address, and this address is dialled instead of the requested one, because
//! another user may listen on another loopback address with the same port. A proof of the secret is bound to the
//! addresses of one connection, so that nobody can relay it.
//!
//! Abstract names have no owner: another user may bind the name first, as they may bind the port. So the side that
//! reads the secret checks the user id, too. Binding the name only makes listening fail, with an error that names this
//! cause. Names and ports are both per network namespace. Two planes that listen on the same port of different loopback
//! addresses need the same name; give them a secret file.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::{linux::net::SocketAddrExt, unix::net},
    time::Duration,
};

use tensorwire_memory::{Limit, NotOwnUser, check_own_user};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
};

use super::within;
use crate::control::{ControlError, Secret, address::parts};

/// Maximum time of a hand-over, on either side.
const LIMIT: Duration = Duration::from_secs(2);

/// Pause before another attempt to connect.
const PAUSE: Duration = Duration::from_millis(1);

/// After this many refused processes, which may come at once, there is a [`REFUSAL_PAUSE`]. The socket's queue has the
/// same length. So after a pause the queue has room for an honest process, however many others fill it, and an honest
/// process waits for at most one pause.
const REFUSALS_AT_ONCE: u8 = 128;

/// The pause after [`REFUSALS_AT_ONCE`] refused processes.
const REFUSAL_PAUSE: Duration = Duration::from_millis(20);

/// Maximum time to resolve the name of a host.
const LOOKUP_LIMIT: Duration = Duration::from_secs(10);

/// Maximum number of bytes that are read; a hand-over has fewer.
const HANDED_OVER_BYTES_MAX: u64 = 128;

/// The side that hands the secret over.
pub(super) struct Handover {
    listener: net::UnixListener,
    secret: Secret,
}

/// Checks a user id that the kernel reports.
type Check = fn(u32) -> Result<(), NotOwnUser>;

impl Handover {
    /// Binds the name for the port of a plane that listens on `address`, and generates a secret.
    pub(super) fn bind(address: SocketAddr) -> io::Result<Self> {
        let name = net::SocketAddr::from_abstract_name(name(address.port()))?;
        let listener = net::UnixListener::bind_addr(&name)?;
        // The standard library's queue would have thousands.
        rustix::net::listen(&listener, REFUSALS_AT_ONCE.into())?;
        listener.set_nonblocking(true)?;
        let secret = Secret::generate(address).map_err(io::Error::other)?;
        Ok(Self { listener, secret })
    }

    /// The secret.
    pub(super) fn secret(&self) -> &Secret {
        &self.secret
    }

    /// Hands the secret over to processes of the same user, one after the other.
    pub(super) async fn serve(self) {
        self.serve_those(check_own_user).await;
    }

    async fn serve_those(self, check: Check) {
        let mut refused = 0u32;
        let listener = match UnixListener::from_std(self.listener) {
            Ok(listener) => listener,
            Err(error) => return log!(ERROR, %error, "the secret cannot be handed over"),
        };
        loop {
            let answered = match listener.accept().await {
                Ok((stream, _)) => within(LIMIT, give(stream, &self.secret, check)).await,
                Err(error) => {
                    pause(REFUSAL_PAUSE).await;
                    Ok(Err(error))
                }
            };
            match answered {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => log!(DEBUG, %error, "the secret was not handed over"),
                Err(_) => log!(DEBUG, "the secret was not handed over: the other process does not read it"),
            }
            refused = refused.wrapping_add(1);
            if refused.is_multiple_of(REFUSALS_AT_ONCE.into()) {
                pause(REFUSAL_PAUSE).await;
            }
        }
    }
}

/// Requests the secret of the plane that listens on `address`. `None` if no plane hands one over there.
pub(super) async fn ask(address: &str) -> Result<Option<Secret>, ControlError> {
    let (host, port) = parts(address)?;
    if !is_loopback_host(host, port).await {
        return Ok(None);
    }
    let fail = |detail: String| ControlError::Unreachable { address: address.to_owned(), detail };
    let refused = |error: io::Error| fail(error.to_string()).unless_limit(Limit::of_files(&error));
    let asked = within(LIMIT, async {
        let stream = connect(port).await.map_err(refused)?;
        let Some(stream) = stream else { return Ok(None) };
        take(stream, check_own_user).await.map(Some).map_err(|refusal| match refusal {
            Refusal::Untrue(detail) => ControlError::Misbehaved { address: address.to_owned(), detail },
            Refusal::Other(detail) => fail(detail),
        })
    });
    let late = "it did not hand over its secret in time: its process is stopped or has no file descriptor left, or its machine is overloaded";
    let asked = asked.await.unwrap_or_else(|_| Err(fail(late.to_owned())))?;
    match asked.as_ref().and_then(Secret::listening_address) {
        Some(listens_on) if !is_at(listens_on, host, port) => {
            let detail = format!("the worker with that port listens on {listens_on}: use that address");
            Err(ControlError::Unreachable { address: address.to_owned(), detail })
        }
        _ => Ok(asked),
    }
}

async fn connect(port: u16) -> io::Result<Option<UnixStream>> {
    use io::ErrorKind::{ConnectionRefused, ConnectionReset, WouldBlock};
    loop {
        match UnixStream::connect(format!("\0{}", name(port))).await {
            Ok(stream) => return Ok(Some(stream)),
            Err(error) if error.kind() == ConnectionRefused => return Ok(None),
            // The queue is full, or the process has ended since: then the next attempt is refused.
            Err(error) if matches!(error.kind(), WouldBlock | ConnectionReset) => pause(PAUSE).await,
            Err(error) => return Err(error),
        }
    }
}

async fn pause(length: Duration) {
    let _ = within(length, std::future::pending::<()>()).await;
}

/// Sends `secret` to the other process if `check` accepts its user.
async fn give(mut stream: UnixStream, secret: &Secret, check: Check) -> io::Result<()> {
    let refused = |why| io::Error::new(io::ErrorKind::PermissionDenied, why);
    check(stream.peer_cred()?.uid()).map_err(refused)?;
    stream.write_all(&secret.to_handed_over()).await?;
    stream.shutdown().await
}

/// The reason why no secret was accepted, as a message for users.
#[derive(Debug)]
enum Refusal {
    /// The other process violated a rule.
    Untrue(String),
    Other(String),
}

/// Reads a secret from the other process if `check` accepts its user.
async fn take(stream: UnixStream, check: Check) -> Result<Secret, Refusal> {
    let giving = stream.peer_cred().map_err(|error| Refusal::Other(error.to_string()))?.uid();
    check(giving).map_err(|why| {
        let remedy = "give both workers the same secret file";
        Refusal::Other(format!("no secret is taken from the socket that hands it over: {why}; {remedy}"))
    })?;
    let mut bytes = Vec::new();
    let read = stream.take(HANDED_OVER_BYTES_MAX).read_to_end(&mut bytes).await;
    // The process has this process's user, so it would not refuse the request: it has ended.
    let gone =
        |why| Refusal::Other(format!("its process ended before it answered{why}; is the worker running?"));
    read.map_err(|error| gone(format!(": {error}")))?;
    if bytes.is_empty() {
        return Err(gone(String::new()));
    }
    Secret::from_handed_over(&bytes).ok_or_else(|| {
        let count = bytes.len();
        Refusal::Untrue(format!(
            "it handed over {count} bytes, which are not a secret with its address: does it have another version?"
        ))
    })
}

fn name(port: u16) -> String {
    format!("tensorwire-{port}")
}

/// Whether the addresses of `host` are those of this host. False for a host without addresses: dialling it reports the
/// reason.
async fn is_loopback_host(host: &str, port: u16) -> bool {
    match within(LOOKUP_LIMIT, tokio::net::lookup_host((host, port))).await {
        Ok(Ok(addresses)) => super::are_loopback(&addresses.collect::<Vec<_>>()),
        _ => false,
    }
}

/// Whether a plane that listens on `address` is the one at the loopback `host` and `port`. A host name matches every
/// loopback address. Planes hand their secret over only on loopback addresses.
fn is_at(address: SocketAddr, host: &str, port: u16) -> bool {
    let is_host = |ip: IpAddr| ip.to_canonical() == address.ip().to_canonical();
    super::are_loopback(&[address]) && address.port() == port && host.parse().map_or(true, is_host)
}

#[cfg(test)]
mod tests {
    use super::{super::tests::bounded, *};

    /// A secret that is the same each time.
    fn secret() -> Secret {
        Secret::from_handed_over(&[&[7; 32][..], b"127.0.0.1:4242"].concat()).unwrap()
    }

    fn no_one(theirs: u32) -> Result<(), NotOwnUser> {
        Err(NotOwnUser::Other { theirs, own: theirs + 1 })
    }

    #[test]
    fn e_another_user_is_not_given_the_secret() {
        bounded(|| async {
            let secret = secret();
            let (giver, mut taker) = UnixStream::pair().unwrap();
            let refused = give(giver, &secret, no_one).await.unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
            let mut bytes = Vec::new();
            taker.read_to_end(&mut bytes).await.unwrap();
            assert_eq!(bytes, b"");
        });
    }

    #[test]
    fn e_a_secret_of_another_user_is_not_taken() {
        bounded(|| async {
            let secret = secret();
            let (giver, taker) = UnixStream::pair().unwrap();
            let user = taker.peer_cred().unwrap().uid();
            give(giver, &secret, check_own_user).await.unwrap();
            let Refusal::Other(refused) = take(taker, no_one).await.unwrap_err() else { panic!("a rule") };
            assert!(refused.contains(&format!("belongs to user {user}")), "{refused}");
        });
    }

    #[test]
    fn e_only_a_whole_secret_is_taken() {
        bounded(|| async {
            let whole = secret().to_handed_over();
            let cut = [0, 1, 31, 32, 33, whole.len() - 1].map(|length| whole[..length].to_vec());
            let (mut longer, mut other) = (whole.clone(), whole.clone());
            longer.resize(100_000, b'2');
            other[32] = 0xff;
            // The longest cut text ends with a port, too, but with a wrong one.
            let readable = |bytes: &[u8]| {
                bytes.len() >= whole.len() - 1 && bytes.len() <= whole.len() && bytes[32] < 0x80
            };
            for bytes in cut.into_iter().chain([whole.clone(), longer, other]) {
                let (mut giver, taker) = UnixStream::pair().unwrap();
                let giving = async {
                    let _ = giver.write_all(&bytes).await;
                    drop(giver);
                };
                let (taken, ()) = futures::future::join(take(taker, check_own_user), giving).await;
                assert_eq!(taken.is_ok(), readable(&bytes), "{} bytes", bytes.len());
                assert_eq!(
                    taken.is_ok_and(|taken| taken == secret()),
                    bytes == whole,
                    "{} bytes",
                    bytes.len()
                );
            }
        });
    }

    #[test]
    fn e_asking_a_silent_owner_of_the_name_ends() {
        bounded(|| async {
            let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let address = tcp.local_addr().unwrap();
            let name = net::SocketAddr::from_abstract_name(name(address.port())).unwrap();
            let _silent = net::UnixListener::bind_addr(&name).unwrap();
            let error = ask(&address.to_string()).await.unwrap_err();
            assert!(error.to_string().contains("in time"), "{error}");
        });
    }

    #[test]
    fn e_a_process_that_ends_before_it_hands_over_is_gone_and_broke_no_rule() {
        bounded(|| async {
            let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let address = tcp.local_addr().unwrap();
            let named = || net::SocketAddr::from_abstract_name(name(address.port())).unwrap();
            // The process ends with a connection in its queue, or after it has accepted one.
            for accepts in [false, true] {
                let listener = net::UnixListener::bind_addr(&named()).unwrap();
                listener.set_nonblocking(true).unwrap();
                let listener = UnixListener::from_std(listener).unwrap();
                let dies = async move {
                    if accepts {
                        drop(listener.accept().await.unwrap());
                    }
                };
                let address = address.to_string();
                let (asked, ()) = futures::future::join(ask(&address), dies).await;
                let error = match asked {
                    Ok(None) if !accepts => continue,
                    asked => asked.unwrap_err(),
                };
                assert!(matches!(error, ControlError::Unreachable { .. }), "{error}");
                assert!(error.to_string().contains("its process ended before"), "{error}");
            }
        });
    }

    #[tokio::test]
    async fn s4_the_queue_has_as_many_as_are_refused_at_once() {
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = tcp.local_addr().unwrap();
        let _unserved = Handover::bind(address).unwrap();
        let mut waiting = Vec::new();
        let full = loop {
            match UnixStream::connect(format!("\0{}", name(address.port()))).await {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        assert_eq!(waiting.len(), usize::from(REFUSALS_AT_ONCE) + 1, "Linux lets one more in");
    }

    #[test]
    #[allow(clippy::disallowed_methods)] // sockets live in real time
    fn e_those_who_are_refused_are_looked_at_at_a_pace() {
        bounded(|| async {
            let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let address = tcp.local_addr().unwrap();
            let handover = Handover::bind(address).unwrap();
            let name = net::SocketAddr::from_abstract_name(name(address.port())).unwrap();
            let began = std::time::Instant::now();
            let strangers = std::thread::spawn(move || {
                for _ in 0..=10 * u32::from(REFUSALS_AT_ONCE) {
                    let stream = net::UnixStream::connect_addr(&name).unwrap();
                    let _ = io::Read::read(&mut &stream, &mut [0]);
                }
            });
            let served = std::pin::pin!(handover.serve_those(no_one));
            let over = async {
                while !strangers.is_finished() {
                    pause(PAUSE).await;
                }
            };
            futures::future::select(served, std::pin::pin!(over)).await;
            assert!(began.elapsed() >= 10 * REFUSAL_PAUSE, "{:?}", began.elapsed());
        });
    }

    #[test]
    fn e_a_secret_is_of_use_at_the_address_that_was_asked_for() {
        let listens = |on: &str, host: &str| is_at(on.parse().unwrap(), host, 4242);
        for (on, host) in [
            ("127.0.0.1:4242", "127.0.0.1"),
            ("127.0.0.1:4242", "::ffff:127.0.0.1"),
            ("127.0.0.1:4242", "localhost"),
            ("127.9.9.9:4242", "localhost"),
            ("[::1]:4242", "localhost"),
            ("[::1]:4242", "::1"),
        ] {
            assert!(listens(on, host), "{on} for {host}");
        }
        for (on, host) in [
            ("127.0.0.1:4242", "::1"),
            ("[::1]:4242", "127.0.0.1"),
            ("127.0.0.1:4242", "127.0.0.2"),
            ("127.0.0.1:4243", "127.0.0.1"),
            ("127.0.0.1:4243", "localhost"),
            // No plane listens there without a user's secret.
            ("192.0.2.1:4242", "localhost"),
            ("0.0.0.0:4242", "localhost"),
        ] {
            assert!(!listens(on, host), "{on} for {host}");
        }
    }

    #[test]
    fn only_loopback_is_asked() {
        let hosts = [
            ("127.0.0.1", true),
            ("127.9.9.9", true),
            ("::1", true),
            ("::ffff:127.0.0.1", true),
            ("localhost", true),
            // Rust treats this as a name, which resolves to 127.0.0.1.
            ("127.1", true),
            ("10.0.0.1", false),
            ("0.0.0.0", false),
            ("no such host", false),
        ];
        bounded(move || async move {
            for (host, expected) in hosts {
                assert_eq!(is_loopback_host(host, 4242).await, expected, "{host}");
            }
        });
        // A name may have several addresses.
        let addresses = |all: &[&str]| all.iter().map(|one| one.parse().unwrap()).collect::<Vec<_>>();
        assert!(super::super::are_loopback(&addresses(&["127.0.1.1:1", "[::1]:1"])));
        assert!(!super::super::are_loopback(&addresses(&["127.0.1.1:1", "10.0.0.1:1"])));
        assert!(!super::super::are_loopback(&[]));
    }
}
