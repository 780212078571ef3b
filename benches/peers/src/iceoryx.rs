//! iceoryx2: shared memory. The value stays in a sample that the client holds. The client asks by a request of 8 bytes
//! whether it is current, and copies it after the answer. So the source is written once, and a pull is two messages and
//! one copy, the minimum for this work.

use std::{
    hint::black_box,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use iceoryx2::{
    config::Config,
    port::{
        client::Client, listener::Listener, notifier::Notifier, server::Server,
        update_connections::UpdateConnections,
    },
    prelude::*,
    service::port_factory::{publish_subscribe, request_response},
};

use crate::plan::{Fault, Figure, Plan, check_length, ready, wait_for_parent};

type Asks = request_response::PortFactory<ipc::Service, u64, (), u64, ()>;

/// How long a sleeper waits for one event: a sleeping server notices the end of its parent within this time.
const SLEEP_MAX: Duration = Duration::from_millis(200);
static PARENT_IS_DONE: AtomicBool = AtomicBool::new(false);

/// The services of one measurement, whose names both processes know.
#[derive(Debug)]
struct Services {
    node: Node<ipc::Service>,
    asks: Asks,
    values: publish_subscribe::PortFactory<ipc::Service, [u8], ()>,
    name: String,
}

impl Services {
    fn open(name: &str) -> Result<Self, Fault> {
        let node = node()?;
        let asks = node
            .service_builder(&format!("{name}/asks").as_str().try_into()?)
            .request_response::<u64, u64>()
            .open_or_create()?;
        let values = node
            .service_builder(&format!("{name}/values").as_str().try_into()?)
            .publish_subscribe::<[u8]>()
            .history_size(1)
            .open_or_create()?;
        Ok(Self { node, asks, values, name: name.to_owned() })
    }

    /// The bells of one side: `mine`, which it waits for, and `theirs`, which it rings.
    fn bells(&self, mine: &str, theirs: &str) -> Result<Bells, Fault> {
        let event = |side: &str| -> Result<_, Fault> {
            let name = format!("{}/{side}", self.name);
            Ok(self.node.service_builder(&name.as_str().try_into()?).event().open_or_create()?)
        };
        let (mine, theirs) = (event(mine)?, event(theirs)?);
        Ok(Bells { mine: mine.listener_builder().create()?, theirs: theirs.notifier_builder().create()? })
    }
}

/// A node of this process.
pub(crate) fn node() -> Result<Node<ipc::Service>, Fault> {
    set_log_level(LogLevel::Error);
    // The default place may contain files of another user's run.
    let mut config = Config::default();
    let folder = std::env::temp_dir().join("iceoryx2");
    config.global.set_root_path(&Path::new(folder.to_string_lossy().as_bytes())?);
    Ok(NodeBuilder::new().config(&config).create::<ipc::Service>()?)
}

#[derive(Debug)]
struct Bells {
    mine: Listener<ipc::Service>,
    theirs: Notifier<ipc::Service>,
}

impl Bells {
    fn wait(&self) -> Result<(), Fault> {
        self.mine.timed_wait(|_| (), SLEEP_MAX)?;
        Ok(())
    }

    fn ring(&self) -> Result<(), Fault> {
        self.theirs.notify()?;
        Ok(())
    }
}

pub(crate) fn serve(plan: &Plan) -> Result<(), Fault> {
    let services = Services::open(&format!("tensorwire-peers/{}", std::process::id()))?;
    let publisher = services.values.publisher_builder().initial_max_slice_len(plan.bytes).create()?;
    let server = services.asks.server_builder().create()?;
    let bells = services.bells("server", "client")?;
    publisher.loan_slice_uninit(plan.bytes)?.write_from_fn(|_| 7).send()?;
    ready(&services.name);
    std::thread::spawn(|| {
        wait_for_parent();
        PARENT_IS_DONE.store(true, Ordering::Relaxed);
    });
    while !PARENT_IS_DONE.load(Ordering::Relaxed) {
        // A late subscriber gets the sample when the publisher updates its connections.
        publisher.update_connections()?;
        answer(&server, &bells, plan.looks)?;
    }
    Ok(())
}

/// Answers requests; returns after some time without requests.
fn answer(server: &Server<ipc::Service, u64, (), u64, ()>, bells: &Bells, looks: bool) -> Result<(), Fault> {
    let mut idle = 0;
    while idle < if looks { 1_000_000 } else { 2 } {
        match server.receive()? {
            Some(request) => {
                idle = 0;
                request.send_copy(*request)?;
                if !looks {
                    bells.ring()?;
                }
            }
            None if looks => {
                idle += 1;
                std::hint::spin_loop();
            }
            None => {
                idle += 1;
                bells.wait()?;
            }
        }
    }
    Ok(())
}

fn ask(client: &Client<ipc::Service, u64, (), u64, ()>, bells: &Bells, looks: bool) -> Result<(), Fault> {
    let pending = client.send_copy(8)?;
    if !looks {
        bells.ring()?;
    }
    loop {
        match pending.receive()? {
            Some(_) => return Ok(()),
            None if looks => std::hint::spin_loop(),
            None => bells.wait()?,
        }
    }
}

pub(crate) async fn measure(plan: &Plan, address: &str) -> Result<Figure, Fault> {
    let services = Services::open(address)?;
    let subscriber = services.values.subscriber_builder().create()?;
    let client = services.asks.client_builder().create()?;
    let bells = services.bells("client", "server")?;
    // The server looks for subscribers when it is idle.
    let sample = loop {
        match subscriber.receive()? {
            Some(sample) => break sample,
            None => std::thread::yield_now(),
        }
    };
    let mut target = vec![0; plan.bytes];
    plan.time(async || {
        ask(&client, &bells, plan.looks)?;
        check_length(target.len(), sample.len())?;
        target.copy_from_slice(&sample);
        black_box(&target);
        Ok(())
    })
    .await
}
