//! The URL of a store.

use std::{fmt, path::PathBuf, str::FromStr};

use percent_encoding::percent_decode_str;
use tensorwire_rendezvous::control::host_and_port;

use super::StoreError;

pub(super) const REDIS: (&str, u16) = ("redis", 6379);
pub(super) const ETCD: (&str, u16) = ("etcd", 2379);

/// The URL of a store.
///
/// | text | store |
/// | --- | --- |
/// | `tcp://HOST:PORT`, or `HOST:PORT` | [`WorkerStore`](super::WorkerStore): that of the worker that listens there |
/// | `file:///FOLDER` | [`FileStore`](super::FileStore) |
/// | `redis://USER:PASSWORD@HOST:PORT/DATABASE` | `RedisStore`, with the feature `redis` |
/// | `etcd://USER:PASSWORD@HOST:PORT/PREFIX` | `EtcdStore`, with the feature `etcd` |
/// | `memory:` | [`MemoryStore`](super::MemoryStore) |
///
/// `USER:PASSWORD@`, `:PORT` (default 6379 and 2379) and the path may be left out. Redis also accepts a password without a user
/// (`:PASSWORD@`). In users, passwords, folders and prefixes, other characters than those of a URL are written as `%` with two
/// hexadecimal digits: `/` as `%2F`, `%` as `%25`. The prefix is that of a [`PrefixStore`](super::PrefixStore).
///
/// Its `Display` and `Debug` text has `…` in place of a password.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreUrl(pub(super) Location);

#[derive(Clone, PartialEq, Eq)]
pub(super) enum Location {
    Memory,
    Tcp { host: String, port: u16 },
    File(PathBuf),
    Redis(Service, i64),
    Etcd(Service, String),
}

/// The address and credentials of a server.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Service {
    pub(super) user: String,
    pub(super) password: Option<String>,
    /// A host name or an IP address; IPv6 without brackets.
    pub(super) host: String,
    pub(super) port: u16,
}

impl StoreUrl {
    /// A store within this process.
    pub const MEMORY: Self = Self(Location::Memory);

    /// The store of the worker that listens at `host` and `port`.
    pub fn tcp(host: &str, port: u16) -> Self {
        Self(Location::Tcp { host: host.to_owned(), port })
    }

    /// `HOST:PORT` of a store that a worker serves; `None` for other stores.
    pub fn tcp_address(&self) -> Option<String> {
        match &self.0 {
            Location::Tcp { host, port } => Some(address(host, *port)),
            _ => None,
        }
    }

    /// The server and the database, for Redis.
    #[cfg(feature = "redis")]
    pub(super) fn redis(&self) -> Result<(&Service, i64), StoreError> {
        match &self.0 {
            Location::Redis(service, database) => Ok((service, *database)),
            _ => Err(self.of_another_store("redis://HOST:PORT/DATABASE")),
        }
    }

    /// The server, for etcd.
    #[cfg(feature = "etcd")]
    pub(super) fn etcd(&self) -> Result<&Service, StoreError> {
        match &self.0 {
            Location::Etcd(service, _) => Ok(service),
            _ => Err(self.of_another_store("etcd://HOST:PORT")),
        }
    }

    #[cfg(any(feature = "redis", feature = "etcd"))]
    fn of_another_store(&self, form: &str) -> StoreError {
        StoreError::BadUrl { url: self.to_string(), remedy: format!("use the form {form} here") }
    }
}

impl FromStr for StoreUrl {
    type Err = StoreError;

    /// # Errors
    /// [`StoreError::BadUrl`].
    fn from_str(text: &str) -> Result<Self, StoreError> {
        let bad = |remedy: String| StoreError::BadUrl { url: without_password(text), remedy };
        location(text).map(Self).map_err(bad)
    }
}

fn location(text: &str) -> Result<Location, String> {
    const SCHEMES: &str = "begin it with tcp://, file:///, redis:// or etcd://, or write HOST:PORT";
    if text == "memory:" {
        return Ok(Location::Memory);
    }
    let Some((scheme, rest)) = text.split_once("://") else { return tcp(text) };
    match scheme {
        "tcp" => tcp(rest),
        "file" if rest.starts_with('/') => Ok(Location::File(decoded(rest)?.into())),
        "file" => Err("the folder is not absolute: write file:///FOLDER".to_owned()),
        "redis" => service(rest, REDIS.1).and_then(redis),
        "etcd" => service(rest, ETCD.1).map(|(service, path)| Location::Etcd(service, path)),
        _ => Err(SCHEMES.to_owned()),
    }
}

fn tcp(text: &str) -> Result<Location, String> {
    let (host, port) = host_with_port(text)?;
    Ok(Location::Tcp { host, port })
}

fn redis((service, path): (Service, String)) -> Result<Location, String> {
    let database = if path.is_empty() { "0" } else { &path };
    let digits = database.bytes().all(|digit| digit.is_ascii_digit());
    match database.parse() {
        Ok(number) if digits => Ok(Location::Redis(service, number)),
        _ => Err(format!("the database `{database}` is not a whole number: write redis://HOST:PORT/0")),
    }
}

/// Parses `USER:PASSWORD@HOST:PORT/PATH` into the server and the path.
fn service(text: &str, usual_port: u16) -> Result<(Service, String), String> {
    if text.contains(['?', '#']) {
        return Err("it has a `?` or a `#`: leave out what follows, or write them as %3F and %23".to_owned());
    }
    let (authority, path) = text.split_once('/').unwrap_or((text, ""));
    let (credentials, host) = match authority.rsplit_once('@') {
        Some((credentials, host)) => (Some(credentials), host),
        None => (None, authority),
    };
    let has_port = host.rsplit_once(']').map_or(host, |(_, after)| after).contains(':');
    let (host, port) =
        if has_port { host_with_port(host)? } else { host_with_port(&format!("{host}:{usual_port}"))? };
    let (user, password) = match credentials.map(|both| both.split_once(':').unwrap_or((both, ""))) {
        Some((user, password)) => (decoded(user)?, Some(decoded(password)?)),
        None => (String::new(), None),
    };
    Ok((Service { user, password, host, port }, decoded(path.trim_end_matches('/'))?))
}

fn host_with_port(text: &str) -> Result<(String, u16), String> {
    match host_and_port(text)? {
        (_, 0) => Err("its port is not a number from 1 to 65535".to_owned()),
        (host, port) => Ok((host.to_owned(), port)),
    }
}

fn decoded(text: &str) -> Result<String, String> {
    let decoded = percent_decode_str(text).decode_utf8();
    decoded.map(Into::into).map_err(|_| "its `%` escapes are not valid UTF-8".to_owned())
}

/// The text without the part that may be a password. The text may be an invalid URL.
fn without_password(text: &str) -> String {
    let Some((before, host)) = text.rsplit_once('@') else { return text.to_owned() };
    let user_at = before.find("://").map_or(0, |at| at + 3);
    match before[user_at..].find(':') {
        Some(colon) => format!("{}:…@{host}", &before[..user_at + colon]),
        None => text.to_owned(),
    }
}

/// `HOST:PORT`, with brackets around an IPv6 address.
pub(super) fn address(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

impl Service {
    #[cfg(feature = "etcd")]
    pub(super) fn address(&self) -> String {
        address(&self.host, self.port)
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.password.is_some() {
            write!(f, "{}:…@", self.user)?;
        }
        f.write_str(&address(&self.host, self.port))
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Location::Memory => f.write_str("memory:"),
            Location::Tcp { host, port } => write!(f, "tcp://{}", address(host, *port)),
            Location::File(folder) => write!(f, "file://{}", folder.display()),
            Location::Redis(service, database) => write!(f, "{}://{service}/{database}", REDIS.0),
            Location::Etcd(service, prefix) if prefix.is_empty() => write!(f, "{}://{service}", ETCD.0),
            Location::Etcd(service, prefix) => write!(f, "{}://{service}/{prefix}", ETCD.0),
        }
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreUrl({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(url: &str) -> String {
        url.parse::<StoreUrl>().map_or_else(|error| error.to_string(), |url| url.to_string())
    }

    #[test]
    fn a_url_names_its_store_and_keeps_the_password_to_itself() {
        let taken = [
            ("memory:", "memory:"),
            ("node1:29500", "tcp://node1:29500"),
            ("tcp://[fd00::1]:1", "tcp://[fd00::1]:1"),
            ("file:///tmp/a%20b", "file:///tmp/a b"),
            ("redis://h", "redis://h:6379/0"),
            ("redis://[::1]/2", "redis://[::1]:6379/2"),
            ("redis://:s@h:1/", "redis://:…@h:1/0"),
            ("redis://u:p%40%2F@h:1/15", "redis://u:…@h:1/15"),
            ("etcd://h", "etcd://h:2379"),
            ("etcd://u:p@h:7/jobs/a/", "etcd://u:…@h:7/jobs/a"),
        ];
        for (url, shown) in taken {
            assert_eq!(text(url), shown);
        }
        let Ok(StoreUrl(Location::Redis(service, 15))) = "redis://u%3A:p%40%2F:@h:1/15".parse() else {
            unreachable!("it is one of Redis")
        };
        assert_eq!((&*service.user, service.password.as_deref()), ("u:", Some("p@/:")));
    }

    #[test]
    fn what_names_no_store_says_what_to_write() {
        let refused = [
            ("host", "no port"),
            ("tcp://host:0", "1 to 65535"),
            ("http://h:1", "begin it with tcp://"),
            ("rediss://h:1", "begin it with tcp://"),
            ("file://folder", "file:///FOLDER"),
            ("redis://h:1/one", "`one` is not a whole number"),
            ("redis://h:1/-1", "`-1` is not a whole number"),
            ("redis://h:1/0?x=1", "`?`"),
            ("redis://u:p/q@h:1", "1 to 65535"),
            ("etcd://a,b:1", "host names"),
            ("etcd://u:%ff@h:1", "UTF-8"),
            ("redis://", "no host"),
        ];
        for (url, expected) in refused {
            assert!(text(url).contains(expected), "{url}: {}", text(url));
        }
        let secret = text("http://user:secret@host:1/x");
        assert!(secret.contains("`http://user:…@host:1/x`") && !secret.contains("secret"), "{secret}");
    }
}
