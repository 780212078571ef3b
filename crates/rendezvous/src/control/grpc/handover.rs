//! Handing the secret over between processes of one user on one host.
//!
//! A plane that listens on loopback without a secret of its user's makes a random one, and gives it to everybody
//! who asks on the abstract Unix socket `tensorwire-<port>` and runs under the same user id, which the kernel
//! tells (`SO_PEERCRED`). So nothing is on disk, and a crash leaves nothing behind.
//!
//! Abstract names belong to nobody: another user may take the name first, as they may take the port. That is why
//! the asking end checks the user id too, before it believes what it reads; taking a name is a nuisance
//! (listening fails, with an error that says so), never a way in. Names and ports are both per network
//! namespace. Two planes that listen on one port of different loopback addresses collide here; give them a
//! secret file.

use std::{
    io,
    net::SocketAddr,
    os::{linux::net::SocketAddrExt, unix::net},
    time::Duration,
};

use memory::Limit;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
};

use super::{dial::host_and_port, within};
use crate::control::{ControlError, Secret};

/// The longest time that asking takes, and that one who asks is waited for.
const LIMIT: Duration = Duration::from_secs(2);

/// Pause before asking again when the queue of those who ask is full.
const PAUSE: Duration = Duration::from_millis(20);

/// Length of a secret that is handed over, in bytes.
const SECRET_BYTES: usize = 32;

/// The end that hands over.
pub(super) struct Handover {
    listener: net::UnixListener,
    secret: Secret,
    user: u32,
}

impl Handover {
    /// Takes the name that goes with `port`, and makes a secret.
    pub(super) fn bind(port: u16) -> io::Result<Self> {
        let name = net::SocketAddr::from_abstract_name(name(port))?;
        let listener = net::UnixListener::bind_addr(&name)?;
        listener.set_nonblocking(true)?;
        let secret = Secret::generate().map_err(io::Error::other)?;
        Ok(Self { listener, secret, user: own_user()? })
    }

    /// The secret.
    pub(super) fn secret(&self) -> &Secret {
        &self.secret
    }

    /// Hands over to everybody of the same user, one after the other.
    pub(super) async fn serve(self) {
        let listener = match UnixListener::from_std(self.listener) {
            Ok(listener) => listener,
            Err(error) => return tracing::error!(%error, "the secret cannot be handed over"),
        };
        loop {
            let answered = match listener.accept().await {
                Ok((stream, _)) => within(LIMIT, give(stream, &self.secret, self.user)).await,
                Err(error) => {
                    let _ = within(PAUSE, std::future::pending::<()>()).await;
                    Ok(Err(error))
                }
            };
            match answered {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "the secret was not handed over"),
                Err(_) => tracing::debug!("the secret was not handed over: the asking end does not read"),
            }
        }
    }
}

/// Asks for the secret of the plane that listens on `address`. `None`: there is nobody to ask.
pub(super) async fn ask(address: &str) -> Result<Option<Secret>, ControlError> {
    let (host, port) = host_and_port(address)?;
    if !is_loopback_host(host) {
        return Ok(None);
    }
    let fail = |detail: String| ControlError::Misbehaved { address: address.to_owned(), detail };
    let refused = |error: io::Error| fail(error.to_string()).unless_limit(Limit::of_files(&error));
    let asked = within(LIMIT, async {
        let user = own_user().map_err(refused)?;
        let stream = connect(port).await.map_err(refused)?;
        let Some(stream) = stream else { return Ok(None) };
        take(stream, user).await.map(Some).map_err(fail)
    });
    asked.await.unwrap_or_else(|_| Err(fail("it did not hand over its secret in time".to_owned())))
}

async fn connect(port: u16) -> io::Result<Option<UnixStream>> {
    loop {
        match UnixStream::connect(format!("\0{}", name(port))).await {
            Ok(stream) => return Ok(Some(stream)),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let _ = within(PAUSE, std::future::pending::<()>()).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Gives `secret` to the other end if its user is `user`.
async fn give(mut stream: UnixStream, secret: &Secret, user: u32) -> io::Result<()> {
    let asking = stream.peer_cred()?.uid();
    if asking != user {
        let refused = format!("user {asking} asked, this process belongs to user {user}");
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, refused));
    }
    stream.write_all(secret.expose()).await?;
    stream.shutdown().await
}

/// Takes a secret from the other end if its user is `user`. Errors are texts for people.
async fn take(stream: UnixStream, user: u32) -> Result<Secret, String> {
    let giving = stream.peer_cred().map_err(|error| error.to_string())?.uid();
    if giving != user {
        return Err(format!(
            "the socket that hands over its secret belongs to user {giving}, this process to user {user}; \
             give both ends the same secret file"
        ));
    }
    let mut bytes = Vec::with_capacity(SECRET_BYTES + 1);
    let read = stream.take(SECRET_BYTES as u64 + 1).read_to_end(&mut bytes).await;
    read.map_err(|error| format!("it did not hand over its secret: {error}"))?;
    if bytes.len() != SECRET_BYTES {
        return Err(format!("it handed over {} bytes as its secret, not {SECRET_BYTES}", bytes.len()));
    }
    Secret::new(bytes).ok_or_else(|| "it handed over a short secret".to_owned())
}

fn name(port: u16) -> String {
    format!("tensorwire-{port}")
}

/// The user id under which others see this process, asked for in the way in which theirs is.
fn own_user() -> io::Result<u32> {
    let (one, _other) = UnixStream::pair()?;
    Ok(one.peer_cred()?.uid())
}

fn is_loopback_host(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|ip| super::is_loopback(&SocketAddr::new(ip, 0)))
}

#[cfg(test)]
mod tests {
    use super::{super::tests::bounded, *};

    #[test]
    fn e_another_user_is_not_given_the_secret() {
        bounded(|| async {
            let user = own_user().unwrap();
            let secret = Secret::generate().unwrap();
            let (giver, mut taker) = UnixStream::pair().unwrap();
            let refused = give(giver, &secret, user + 1).await.unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
            let mut bytes = Vec::new();
            taker.read_to_end(&mut bytes).await.unwrap();
            assert_eq!(bytes, b"");
        });
    }

    #[test]
    fn e_a_secret_of_another_user_is_not_taken() {
        bounded(|| async {
            let user = own_user().unwrap();
            let secret = Secret::generate().unwrap();
            let (giver, taker) = UnixStream::pair().unwrap();
            give(giver, &secret, user).await.unwrap();
            let refused = take(taker, user + 1).await.unwrap_err();
            assert!(refused.contains(&format!("belongs to user {user}")), "{refused}");
        });
    }

    #[test]
    fn e_only_a_whole_secret_is_taken() {
        bounded(|| async {
            let user = own_user().unwrap();
            for length in [0, 1, SECRET_BYTES - 1, SECRET_BYTES, SECRET_BYTES + 1, 100_000] {
                let (mut giver, taker) = UnixStream::pair().unwrap();
                let bytes = vec![1; length];
                let giving = async {
                    let _ = giver.write_all(&bytes).await;
                    drop(giver);
                };
                let (taken, ()) = futures::future::join(take(taker, user), giving).await;
                assert_eq!(taken.is_ok(), length == SECRET_BYTES, "{length} bytes");
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
    fn only_loopback_is_asked() {
        for (host, expected) in [
            ("127.0.0.1", true),
            ("127.9.9.9", true),
            ("::1", true),
            ("::ffff:127.0.0.1", true),
            ("localhost", true),
            ("10.0.0.1", false),
            ("0.0.0.0", false),
            ("example.org", false),
        ] {
            assert_eq!(is_loopback_host(host), expected, "{host}");
        }
    }
}
