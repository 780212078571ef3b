//! Strangers that would hold every descriptor of a worker's process.

use std::{
    fs::{self, File},
    iter,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::future::join_all;
use rustix::process::{Resource, Rlimit, setrlimit};
use tensorwire_fabric::{FabricKind, Runtime};
use tensorwire_rendezvous::control::{GrpcConfig, GrpcPlane, Secret};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::watch,
};

use crate::{
    attacker::HALF_A_HELLO,
    harness::{Other, bounded, parents_lines, role, say},
    stage::{SECRET, SERVER, builder, one_honest_visit, publish, raise_descriptor_limit, until},
};

/// Descriptors that the server's process has left: fewer than a port keeps strangers.
const LEFT: u64 = 48;

/// Strangers at once. Each comes back when it is pushed out.
const STRANGERS: usize = 150;

/// How long strangers may stay: longer than any honest peer waits.
const STAY: Duration = Duration::from_secs(100);

const LIMIT: Duration = Duration::from_secs(100);

/// A server with few descriptors left, from the parent's line on.
async fn besieged(_: Arc<dyn Runtime>) {
    let config = GrpcConfig::new("127.0.0.1:0").secret(Secret::new(SECRET)).arrival_limit(STAY);
    let plane = Arc::new(GrpcPlane::bind(config).unwrap());
    let server = builder(SERVER, FabricKind::TCP).dangerous_control_plane(plane).start().await.unwrap();
    publish(&server, 1);
    say(server.address());
    let mut lines = parents_lines();
    let mut held = Vec::new();
    while let Some(line) = lines.recv().await {
        if line == "few descriptors" {
            let numbers = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().file_name());
            let highest =
                numbers.map(|number| number.to_str().unwrap().parse::<u64>().unwrap()).max().unwrap();
            let most = Some(highest + 1 + LEFT);
            setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).unwrap();
            say("few");
        } else {
            held.extend(iter::from_fn(|| File::open("/dev/null").ok()));
            assert!(!held.is_empty(), "strangers hold all that there is");
            say("none");
        }
    }
}

/// Connects, sends no more than this, and comes back when it is pushed out.
async fn besiege(port: u16, said: &[u8], came: &AtomicUsize, mut is_on: watch::Receiver<bool>) {
    let coming = async {
        loop {
            let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)).await else { continue };
            came.fetch_add(1, Ordering::Relaxed);
            let _may_be_cut = stream.write_all(said).await;
            let _until_it_is_pushed_out = stream.read(&mut [0; 1]).await;
        }
    };
    tokio::select! {
        () = coming => {}
        _ = is_on.wait_for(|on| !*on) => {}
    }
}

fn strangers_keep_nobody_out(test: &'static str, said: &'static [u8]) {
    if role().is_some() {
        return bounded(LIMIT, besieged);
    }
    let _turn = crate::stage::alone();
    bounded(LIMIT, |_| async move {
        raise_descriptor_limit();
        let mut server = Other::start(test, "besieged");
        let address = server.hear().await;
        one_honest_visit(&address, FabricKind::TCP).await;
        server.tell("few descriptors");
        assert_eq!(server.hear().await, "few");
        let port = address.rsplit(':').next().unwrap().parse().unwrap();
        let (came, (turn, is_on)) = (AtomicUsize::new(0), watch::channel(true));
        let siege = join_all((0..STRANGERS).map(|_| besiege(port, said, &came, is_on.clone())));
        let visits = async {
            until("the strangers", || came.load(Ordering::Relaxed) >= STRANGERS).await;
            for _ in 0..3 {
                one_honest_visit(&address, FabricKind::TCP).await;
            }
            // Now the process itself takes what is left: strangers make room out of what they have.
            server.tell("no descriptor");
            assert_eq!(server.hear().await, "none");
            one_honest_visit(&address, FabricKind::TCP).await;
            turn.send_replace(false);
        };
        futures::join!(siege, visits);
    });
}

#[test]
fn e_strangers_that_say_nothing_do_not_hold_every_descriptor() {
    strangers_keep_nobody_out("descriptors::e_strangers_that_say_nothing_do_not_hold_every_descriptor", b"");
}

#[test]
fn e_strangers_that_dial_for_data_do_not_hold_every_descriptor() {
    strangers_keep_nobody_out(
        "descriptors::e_strangers_that_dial_for_data_do_not_hold_every_descriptor",
        HALF_A_HELLO,
    );
}
