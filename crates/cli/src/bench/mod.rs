//! `tensorwire bench`: how fast workers are, between two hosts or between two processes of this one.
//!
//! ```text
//! tensorwire bench [--fabric F] [--op O] [--size N] [--wait W] [--time S | --iterations N] [--json]    two processes, here
//! tensorwire bench --serve [HOST[:PORT]] [--fabric F] [--wait W]                                       until Ctrl-C
//! tensorwire bench HOST[:PORT] [--fabric F] ...                                                        with that server
//! ```
//!
//! Both sides are workers, and use only what other programs can use, too. The server serves one client at a time, by
//! its name. The client requests its measurements in tensors of a step ([`conversation`]). On one host the server is a
//! second process of this program. Output is one table for each operation and transport, with the columns of perftest:
//!
//! ```text
//! pull over tcp, adaptive, with 10.77.0.1:4250; not used: shm: …
//!     #bytes  #iterations  t_min[usec]  t_typical[usec]   99%[usec]
//!          8        14712         31.2             33.9        52.0
//! write over tcp, adaptive, with 10.77.0.1:4250
//!     #bytes  #iterations  BW average[MB/sec]  MsgRate[Mpps]
//! ```

mod client;
mod conversation;
mod figures;
mod server;

use tensorwire::{Worker, WorkerBuilder};

use crate::{
    arguments::{
        Fabric,
        bench::{Bench, WaitChoice},
    },
    failure::Failure,
};

/// Measures, or serves measurements.
pub(crate) async fn bench(arguments: &Bench) -> Result<(), Failure> {
    if let Some(bind) = &arguments.serve {
        return server::serve(arguments, bind).await;
    }
    let fabrics = match (&arguments.fabric[..], &arguments.peer) {
        ([], Some(_)) => &[Fabric::Auto][..],
        ([], None) => &[Fabric::Shm, Fabric::Tcp],
        (named, _) => named,
    };
    for &fabric in fabrics {
        for &wait in &arguments.wait {
            client::measure(arguments, fabric, wait).await?;
        }
    }
    Ok(())
}

/// A worker's settings.
fn worker(arguments: &Bench, name: &str, fabric: Fabric, wait: WaitChoice) -> WorkerBuilder {
    let mut builder = Worker::builder(name).wait(wait.wait());
    if let Some(kind) = fabric.required() {
        builder = builder.require(kind);
    }
    match &arguments.secret.secret_file {
        Some(path) => builder.secret_file(path),
        None => builder,
    }
}
