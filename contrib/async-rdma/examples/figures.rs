//! The speed of async-rdma without the fabric around it: writes in one direction, and half round trips of a write with
//! immediate, between two processes. Prints one line of JSON.
//!
//! ```text
//! figures writes|pingpong SIZE OPERATIONS DEVICE PEER_DEVICE
//! ```
#![forbid(unsafe_code)]

use std::{
    alloc::Layout,
    env, io,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use async_rdma::{LocalMr, LocalMrWriteAccess, MTU, Rdma, RdmaBuilder, RemoteMr};
use futures::future::try_join_all;
use tensorwire_fabric::{Runtime, TokioRuntime};

/// Writes under way at once. Each has its own source and destination, because the crate allows no others at once.
const WRITES_OPEN: usize = 16;
/// Operations that are not counted.
const WARM_UP: usize = 16;
/// How long the other process may take to listen.
const LISTEN_LIMIT: Duration = Duration::from_secs(20);
const USAGE: &str = "usage: figures writes|pingpong SIZE OPERATIONS DEVICE PEER_DEVICE";

#[derive(Debug, Clone, PartialEq)]
struct Plan {
    test: String,
    size: usize,
    operations: usize,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["serve", test, size, operations, device, port] => {
            Ok(runtime.block_on(serve(plan(test, size, operations)?, device, port.parse()?))?)
        }
        [test @ ("writes" | "pingpong"), size, operations, device, peer] => {
            runtime.block_on(measure(plan(test, size, operations)?, device, peer))
        }
        _ => Err(USAGE.into()),
    }
}

fn plan(test: &str, size: &str, operations: &str) -> Result<Plan, std::num::ParseIntError> {
    Ok(Plan { test: test.to_owned(), size: size.parse()?, operations: operations.parse()? })
}

/// The other process. Dropping this kills and reaps it.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn measure(plan: Plan, device: &str, peer: &str) -> Result<(), Box<dyn std::error::Error>> {
    let clock = TokioRuntime::current().ok_or("no runtime")?;
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    let (size, operations) = (plan.size.to_string(), plan.operations.to_string());
    let mut command = Command::new(env::current_exe()?);
    command.args(["serve", &plan.test, &size, &operations, peer, &port.to_string()]);
    let mut server = Server(command.stdout(Stdio::null()).spawn()?);
    let rdma = Arc::new(connect(device, port, &clock, &mut server.0).await?);
    let ns = match plan.test.as_str() {
        "writes" => writes(&rdma, &plan, &clock).await?,
        _ => pingpong(&rdma, &plan, &clock).await?,
    };
    let (test, size) = (&plan.test, plan.size);
    println!(r#"{{"who":"async-rdma","op":"{test}","size":{size},"median_ns":{ns:.1}}}"#);
    Ok(())
}

fn builder(device: &str) -> RdmaBuilder {
    RdmaBuilder::default().set_dev(device).set_gid_index(1).set_mtu(MTU::MTU4096).set_qp_max_send_wr(128)
}

fn address(port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)
}

/// Tries to connect until the other process listens.
async fn connect(device: &str, port: u16, clock: &TokioRuntime, server: &mut Child) -> io::Result<Rdma> {
    let begin = clock.now();
    loop {
        match builder(device).connect(address(port)).await {
            Ok(rdma) => return Ok(rdma),
            Err(error) if server.try_wait()?.is_some() || clock.now() - begin > LISTEN_LIMIT => {
                return Err(error);
            }
            Err(_) => clock.sleep(Duration::from_millis(50)).await,
        }
    }
}

fn layout(size: usize) -> io::Result<Layout> {
    Layout::from_size_align(size, 64).map_err(io::Error::other)
}

async fn memory(rdma: &Rdma, size: usize) -> io::Result<(LocalMr, RemoteMr)> {
    let mut local = rdma.alloc_local_mr(layout(size)?)?;
    local.as_mut_slice().fill(7);
    Ok((local, rdma.request_remote_mr(layout(size)?).await?))
}

/// Average nanoseconds per write.
async fn writes(rdma: &Arc<Rdma>, plan: &Plan, clock: &TokioRuntime) -> io::Result<f64> {
    let mut lanes = Vec::new();
    for _ in 0..WRITES_OPEN {
        lanes.push(memory(rdma, plan.size).await?);
    }
    let each = plan.operations.div_ceil(WRITES_OPEN);
    let begin = clock.now();
    try_join_all(lanes.iter_mut().map(|(local, remote)| async move {
        for _ in 0..each {
            rdma.write(local, remote).await?;
        }
        Ok::<_, io::Error>(())
    }))
    .await?;
    let spent = clock.now() - begin;
    // The other process waits for this write.
    let (local, mut remote) = memory(rdma, 8).await?;
    rdma.write_with_imm(&local, &mut remote, 1).await?;
    Ok(spent.as_nanos() as f64 / (each * WRITES_OPEN) as f64)
}

/// Median nanoseconds of half a round trip.
async fn pingpong(rdma: &Rdma, plan: &Plan, clock: &TokioRuntime) -> io::Result<f64> {
    let (local, mut remote) = memory(rdma, plan.size).await?;
    let mut times = Vec::with_capacity(plan.operations);
    for number in 0..plan.operations + WARM_UP {
        let begin = clock.now();
        rdma.write_with_imm(&local, &mut remote, number as u32).await?;
        rdma.receive_write_imm().await?;
        times.push((clock.now() - begin).as_nanos() as f64 / 2.0);
    }
    let mut counted = times.split_off(WARM_UP.min(times.len()));
    counted.sort_by(f64::total_cmp);
    Ok(counted.get(counted.len() / 2).copied().unwrap_or(0.0))
}

async fn serve(plan: Plan, device: &str, port: u16) -> io::Result<()> {
    let rdma = builder(device).listen(address(port)).await?;
    if plan.test == "writes" {
        rdma.receive_write_imm().await?;
        return Ok(());
    }
    let (local, mut remote) = memory(&rdma, plan.size).await?;
    for number in 0..plan.operations + WARM_UP {
        rdma.receive_write_imm().await?;
        rdma.write_with_imm(&local, &mut remote, number as u32).await?;
    }
    // The last write must be sent before the queue pair is destroyed: so this process waits until the other one ends
    // it.
    std::future::pending().await
}
