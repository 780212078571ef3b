//! Frames by iceoryx2: a sample is written in shared memory, and read there. The reader sleeps until an event, and looks every so often
//! whether the writer's node is dead.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use iceoryx2::{
    node::NodeState,
    prelude::*,
    service::port_factory::{event, publish_subscribe},
};

use crate::{
    frames::{Check, Part, Policy, Reading, Writing, now, sign},
    iceoryx::node,
    plan::Fault,
};

/// How long the reader sleeps without an event.
const SLEEP_MAX: Duration = Duration::from_millis(10);

struct Stream {
    node: Node<ipc::Service>,
    frames: publish_subscribe::PortFactory<ipc::Service, [u64], ()>,
    name: String,
}

impl Stream {
    fn open(name: &str, part: &Part) -> Result<Self, Fault> {
        let node = node()?;
        let frames = node
            .service_builder(&format!("{name}/frames").as_str().try_into()?)
            .publish_subscribe::<[u64]>()
            .enable_safe_overflow(part.policy == Policy::Latest)
            .subscriber_max_buffer_size(usize::from(part.ahead))
            .subscriber_max_borrowed_samples(1)
            .max_publishers(1)
            .max_subscribers(1)
            .history_size(0)
            .open_or_create()?;
        Ok(Self { node, frames, name: name.to_owned() })
    }

    fn bell(&self) -> Result<event::PortFactory<ipc::Service>, Fault> {
        let name = format!("{}/bell", self.name);
        Ok(self.node.service_builder(&name.as_str().try_into()?).event().open_or_create()?)
    }

    fn a_node_is_dead(&self) -> Result<bool, Fault> {
        let mut is_dead = false;
        Node::<ipc::Service>::list(self.node.config(), |state| {
            is_dead |= matches!(state, NodeState::Dead(_));
            CallbackProgression::Continue
        })?;
        Ok(is_dead)
    }
}

pub(crate) fn run(part: &Part) -> Result<(), Fault> {
    if part.writes { write(part) } else { read(part) }
}

fn write(part: &Part) -> Result<(), Fault> {
    let stream = Stream::open(&format!("tensorwire-peers/{}", std::process::id()), part)?;
    let words = part.bytes / size_of::<u64>();
    let publisher = stream
        .frames
        .publisher_builder()
        .backpressure_strategy(BackpressureStrategy::RetryUntilDelivered)
        .initial_max_slice_len(words)
        .create()?;
    let bell = stream.bell()?.notifier_builder().create()?;
    let mut writing = Writing::begin(&stream.name, part.pause);
    while let Some((number, delay)) = writing.next_frame() {
        thread::sleep(delay);
        publisher.loan_slice_uninit(words)?.write_from_fn(|_| number).send()?;
        bell.notify()?;
        writing.published();
    }
    writing.report();
    loop {
        // The process ends with its standard input.
        thread::park();
    }
}

fn read(part: &Part) -> Result<(), Fault> {
    let stream = Stream::open(&part.address, part)?;
    let subscriber = stream.frames.subscriber_builder().create()?;
    let bell = stream.bell()?.listener_builder().create()?;
    // Only the node of a writer that is killed later is of interest.
    let mut was_dead = stream.a_node_is_dead()?;
    let stopped = Arc::new(AtomicBool::new(false));
    let stop = stopped.clone();
    let mut reading = Reading::begin(move || stop.store(true, Ordering::Relaxed));
    let mut looked = Instant::now();
    while !stopped.load(Ordering::Relaxed) {
        if let Some(frame) = subscriber.receive()? {
            let at = now();
            thread::sleep(part.pause);
            let mut check = Check::default();
            check.words(frame.iter().copied());
            reading.saw(check.number(), at, 0);
            continue;
        }
        bell.timed_wait(|_| (), SLEEP_MAX)?;
        if !was_dead && looked.elapsed() >= SLEEP_MAX {
            looked = Instant::now();
            was_dead = stream.a_node_is_dead()?;
            if was_dead {
                sign("`Node::list` has a dead node");
            }
        }
    }
    reading.report();
    Ok(())
}
