//! A real write between two queue pairs of one fabric, in this process.

use std::{fmt, sync::Arc, time::Duration};

use indicatif::BinaryBytes;
use tensorwire_fabric::{
    Access, Arrival, ConnectParams, Connected, ConnectionData, Domain, Fabric, FabricError, Immediate,
    QueuePair, QueuePairConfig, RegisteredPool, RemoteRange, Role, Runtime, timeout,
};
use tensorwire_memory::{Buf, GrantEnd, Granted, MemoryError, Pool, PoolConfig, copy::CopyReason};

/// Number of bytes that are written.
pub(super) const BYTES: usize = 1 << 20;
/// Limit of the whole proof.
const LIMIT: Duration = Duration::from_secs(20);
const DEPTHS: QueuePairConfig = QueuePairConfig { send_depth: 16, receive_depth: 16 };
const MARK: Immediate = Immediate(0x0D0C);

/// A write that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Proof {
    /// The time from the first call to the comparison of the last byte.
    pub(super) took: Duration,
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} arrived intact, in {:.1?} with all preparations", BinaryBytes(BYTES as u64), self.took)
    }
}

/// Why there is no proof.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProofError {
    #[error(transparent)]
    Fabric(#[from] FabricError),
    #[error("{}", chain(.0))]
    Memory(#[from] MemoryError),
    #[error("nothing has arrived within {LIMIT:?}")]
    TimedOut,
    #[error("{0} arrived instead of what was sent")]
    WrongArrival(String),
    #[error("{wrong} of {BYTES} bytes arrived damaged")]
    Damaged { wrong: usize },
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let words = error.to_string();
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        cause = error.source();
    }
    text
}

/// Writes [`BYTES`] bytes over `fabric` from one queue pair to another, and compares them.
///
/// # Cancel safety
/// Dropping the future gives everything back.
pub(super) async fn prove(fabric: &dyn Fabric, runtime: &dyn Runtime) -> Result<Proof, ProofError> {
    let begin = runtime.now();
    timeout(runtime, LIMIT, write_once(fabric, runtime)).await.map_err(|_| ProofError::TimedOut)??;
    Ok(Proof { took: runtime.now().saturating_sub(begin) })
}

async fn write_once(fabric: &dyn Fabric, runtime: &dyn Runtime) -> Result<(), ProofError> {
    let domain = fabric.open_domain()?;
    let source = registered(&domain, Access::LOCAL)?;
    let receive = registered(&domain, Access::RECEIVE)?;
    let mut payload = source.pool.try_alloc(BYTES)?;
    payload.iter_mut().zip(content()).for_each(|(byte, value)| *byte = value);
    let mut buffer = receive.pool.try_alloc(BYTES)?;
    buffer.fill(0);
    let granted = buffer.grant();
    let [near, far] = connect(&*domain).await?.map(|connected| connected.spawn(runtime));
    let sent = send(&near, payload.freeze(), &receive, &granted);
    // Stops at the first failure, after which the other side may wait in vain.
    let ((), arrived) = futures::try_join!(sent, far.next_arrival())?;
    check(&arrived, &granted)?;
    granted.end(GrantEnd::Content)?;
    futures::join!(near.close(), far.close());
    Ok(())
}

/// The written bytes: their period is no power of two, so that a part at a wrong position differs.
fn content() -> impl Iterator<Item = u8> {
    (0..=250).cycle().take(BYTES)
}

async fn connect(domain: &dyn Domain) -> Result<[Connected; 2], FabricError> {
    let (near, far) = (domain.prepare(DEPTHS)?, domain.prepare(DEPTHS)?);
    let params = |peer: ConnectionData, role| ConnectParams { peer, role, peer_address: None, limit: LIMIT };
    let to_far = params(far.connection_data(), Role::Dialer);
    let to_near = params(near.connection_data(), Role::Acceptor);
    futures::try_join!(near.connect(to_far), far.connect(to_near)).map(Into::into)
}

async fn send(
    near: &QueuePair,
    payload: Buf,
    receive: &RegisteredPool,
    granted: &Granted,
) -> Result<(), FabricError> {
    let region = granted.block().and_then(|block| receive.region(block.id())).ok_or(FabricError::Closed)?;
    near.add_remote_region(region);
    let (region, generation) = (region.region, region.generation);
    let target = RemoteRange { region, generation, offset: granted.offset() as u64, length: BYTES as u64 };
    near.write_imm(payload, target, MARK).await?;
    Ok(())
}

fn check(arrival: &Arrival, granted: &Granted) -> Result<(), ProofError> {
    match arrival {
        Arrival::Immediate { immediate, .. } if *immediate == MARK => {}
        other => return Err(ProofError::WrongArrival(format!("{other:?}"))),
    }
    let mut bytes = vec![0; BYTES];
    granted.read_at(0, &mut bytes, CopyReason::Local)?;
    match bytes.into_iter().zip(content()).filter(|(left, right)| left != right).count() {
        0 => Ok(()),
        wrong => Err(ProofError::Damaged { wrong }),
    }
}

/// A pool of one block, registered with a domain.
fn registered(domain: &Arc<dyn Domain>, access: Access) -> Result<RegisteredPool, MemoryError> {
    let cap_bytes = 2 * BYTES as u64;
    let config = PoolConfig { block_bytes: BYTES, cap_bytes, ..PoolConfig::new("doctor") };
    RegisteredPool::new(Pool::new(config)?, domain, access)
}

#[cfg(test)]
mod tests {
    use tensorwire_fabric::{BoxFuture, TokioRuntime};
    use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};
    use tensorwire_memory::Pool;

    use super::*;

    #[test]
    fn damaged_bytes_and_other_arrivals_are_no_proof() {
        let pool = Pool::new(PoolConfig { block_bytes: BYTES, ..PoolConfig::new("test") }).unwrap();
        let mut buffer = pool.try_alloc(BYTES).unwrap();
        buffer.iter_mut().zip(content()).for_each(|(byte, value)| *byte = value);
        buffer[70_000] ^= 1;
        let granted = buffer.grant();
        let arrival = |immediate| Arrival::Immediate { immediate, length: BYTES as u64 };
        let damaged = check(&arrival(MARK), &granted).unwrap_err().to_string();
        assert_eq!(damaged, "1 of 1048576 bytes arrived damaged");
        let other = check(&arrival(Immediate(7)), &granted).unwrap_err();
        assert!(matches!(other, ProofError::WrongArrival(_)), "{other}");
        let mut buffer = granted.end(GrantEnd::Content).unwrap();
        buffer[70_000] ^= 1;
        check(&arrival(MARK), &buffer.grant()).unwrap();
    }

    /// A runtime whose time limits end at once.
    #[derive(Debug)]
    struct Hasty(TokioRuntime);

    impl Runtime for Hasty {
        fn spawn(&self, name: &'static str, task: BoxFuture<'static, ()>) {
            self.0.spawn(name, task);
        }

        fn sleep(&self, _duration: Duration) -> BoxFuture<'static, ()> {
            Box::pin(std::future::ready(()))
        }

        fn now(&self) -> Duration {
            self.0.now()
        }

        fn random(&self) -> u64 {
            self.0.random()
        }
    }

    #[tokio::test]
    async fn write_that_takes_too_long_is_given_up() {
        let runtime = TokioRuntime::current().unwrap();
        let fabric = TcpFabric::new(Arc::new(runtime.clone()), TcpConfig::default());
        let late = prove(&fabric, &Hasty(runtime.clone())).await.unwrap_err();
        assert!(matches!(late, ProofError::TimedOut), "{late}");
        prove(&fabric, &runtime).await.unwrap();
    }
}
