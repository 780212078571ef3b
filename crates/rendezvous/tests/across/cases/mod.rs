//! Cases of two and more workers, each written once: they run over shm and tcp here, and on the simulator in its own
//! package's test `across`.

pub(crate) mod basics;
pub(crate) mod faults;
pub(crate) mod incarnations;
pub(crate) mod limits;
pub(crate) mod manager;
pub(crate) mod outputs;
pub(crate) mod steps;

use std::{future::poll_fn, pin::Pin, sync::Arc, task::Poll, time::Duration};

use tensorwire_fabric::{BoxFuture, Runtime};
use tensorwire_protocol::{Counters, DataType, Key};
use tensorwire_rendezvous::{Tensor, Worker, WorkerBuilder};

/// Hands the name of every case to a macro: `MODULE::CASE`.
macro_rules! every_case {
    ($tests:ident) => {
        $tests! {
            basics::s2_9_02_send_recv
            basics::s2_9_03_recv_send
            basics::s2_9_04_ping_pong
            basics::s2_9_05_cancel_before_recv
            basics::s2_9_06_cancel_after_recv
            basics::s2_9_07_cancel_empty_queue
            basics::s2_5_a_value_that_waits_wins_over_a_cancelled_token
            basics::s2_9_08_cancel_multiple
            basics::s2_9_09_random_send_recv
            basics::s2_9_10_multi_sends
            basics::s2_9_11_recv_abort
            basics::s2_9_12_recv_sleep_abort
            basics::s2_9_13_abort_then_recv_or_send
            basics::s2_9_14_transfer_dummy_device_context
            manager::s2_9_m01_local_send_recv
            manager::s2_9_m02_local_abort
            manager::s2_9_m03_local_cancel
            manager::s2_9_m04_cancel_after_received
            manager::s2_9_m05_transfer_dummy_device_context
            manager::s2_9_m06_cleanup_all
            manager::s2_9_m07_remote_recv_one
            manager::s2_9_m08_remote_recv_async_many
            steps::s2_7_requests_before_the_step_are_served_in_their_order
            steps::s2_7_a_step_that_nobody_begins_ends_its_requests
            steps::s2_7_a_receive_cancelled_before_the_step_leaves_nothing
            steps::s2_7_a_peer_may_wait_for_so_many_steps_only
            steps::s2_7_the_status_of_a_step_comes_before_the_check_of_its_devices
            steps::s2_7_task_1_is_not_task_10
            steps::s2_7_a_key_works_at_its_two_ends_only
            steps::s2_8_a_late_request_gets_the_tombstones_answer
            steps::s2_8_a_step_ends_with_its_last_clone
            steps::s2_8_a_step_that_is_used_up_is_gone_and_begins_again
            steps::s4_a_full_table_names_its_cap
            steps::s12_01_both_eras_of_duplicates_can_be_chosen
            incarnations::s3_5_a_stale_incarnation_is_aborted_and_both_are_named
            incarnations::d_restart_at_the_same_address_keeps_keys_working
            incarnations::d_restart_at_another_address_keeps_keys_working
            outputs::s2_5_a_root_cause_wins_over_what_follows_from_it
            outputs::s2_3_a_dead_output_is_an_error_that_names_its_key
            outputs::s2_3_inputs_and_outputs_go_by_key
            limits::s12_03_keys_of_512_513_and_1024_bytes_travel_and_longer_ones_are_refused
            limits::s12_03_ranks_0_6_7_and_254_travel
            limits::s12_03_dimensions_of_65534_65535_and_2_to_the_32_travel
            limits::s12_03_nothing_and_dead_values_travel
            limits::s12_03_proto_values_change_their_size
            limits::s12_03_ten_thousand_outstanding_receives
            faults::s12_04_abort_at_the_sender_in_each_state
            faults::s12_04_abort_at_the_receiver_in_each_state
            faults::s12_04_peer_killed_in_each_state
            faults::s12_04_restart_with_a_new_incarnation
            faults::s12_04_exhausted_queues_delay_and_break_nothing
            faults::s12_04_late_content_after_cancel_spoils_nothing
            faults::s12_05_a_failure_is_a_status_of_its_own_request_alone
        }
    };
}
pub(crate) use every_case;

pub(crate) const SENDER: &str = "/job:ps/replica:0/task:0";
pub(crate) const RECEIVER: &str = "/job:worker/replica:0/task:0";
pub(crate) const SENDER_CPU: &str = "/job:ps/replica:0/task:0/device:CPU:0";
pub(crate) const RECEIVER_CPU: &str = "/job:worker/replica:0/task:0/device:CPU:0";

/// Elements of a tensor that is too long to travel inside a message.
const LONG: usize = 1500;

/// No wait for something that must come is longer.
const WAIT: Duration = Duration::from_secs(30);

/// Where workers live: what a case needs of the fabric it runs on.
pub(crate) trait Ground: Send + Sync {
    fn runtime(&self) -> Arc<dyn Runtime>;
    /// Starts a worker, at this address or at a new one.
    fn start(&self, builder: WorkerBuilder, address: Option<&str>) -> BoxFuture<'static, Worker>;
    /// Ends a worker as suddenly as can be done here.
    fn kill(&self, worker: Worker) -> BoxFuture<'static, ()>;
    /// Waits until that part of a transfer is over, where time can be that fine; else for so many turns of other tasks.
    fn moment(&self, turns: u32, part: Duration) -> BoxFuture<'static, ()>;
    /// The runs of the case reach these states, all together. On real fabrics that depends on the machine.
    fn must_reach(&self, states: &[&'static str]);
    /// It has reached this one.
    fn reached(&self, state: &'static str);
    /// Runs a task beside the case; in the simulator as part of it.
    fn beside(&self, task: BoxFuture<'static, ()>) -> BoxFuture<'static, ()>;
}

pub(crate) type Given = Arc<dyn Ground>;

/// A sender and a receiver that know each other.
pub(crate) struct Two {
    pub(crate) ground: Given,
    pub(crate) sender: Worker,
    pub(crate) receiver: Worker,
}

impl Two {
    pub(crate) async fn new(ground: &Given) -> Self {
        Self::with(ground, |builder| builder).await
    }

    /// Two workers with these settings.
    pub(crate) async fn with(ground: &Given, settings: impl Fn(WorkerBuilder) -> WorkerBuilder) -> Self {
        let sender = ground.start(settings(Worker::builder(SENDER)), None).await;
        let receiver = ground.start(settings(Worker::builder(RECEIVER)), None).await;
        receiver.peer_at(sender.address()).await.unwrap();
        until(ground, || !sender.peers().is_empty()).await;
        Self { ground: ground.clone(), sender, receiver }
    }

    /// The key of an edge from the sender to the receiver.
    pub(crate) fn key(&self, edge: &str) -> Key {
        self.receiver.key(SENDER_CPU, RECEIVER_CPU, edge).unwrap()
    }

    /// Sends a value of step 1.
    pub(crate) fn send(&self, key: &Key, value: u64) {
        self.sender.shared_step(1).send(key, number(&self.sender, value)).unwrap();
    }

    pub(crate) fn peer_counters(worker: &Worker) -> Counters {
        worker.peers().first().map(|peer| peer.counters).unwrap_or_default()
    }

    /// Requests that have reached the sender.
    pub(crate) fn asked(&self) -> u64 {
        Self::peer_counters(&self.sender).received.tensor_request
    }

    /// Runs until so many requests have reached the sender.
    pub(crate) async fn until_asked(&self, requests: u64) {
        until(&self.ground, || self.asked() >= requests).await;
    }

    /// Polls `receives` until so many requests have reached the sender.
    pub(crate) async fn ask<F: Future>(&self, receives: &mut [Pin<Box<F>>], requests: u64) {
        let runtime = self.ground.runtime();
        let began = runtime.now();
        while self.asked() < requests {
            assert!(runtime.now() - began < WAIT, "nobody asks");
            for receive in receives.iter_mut() {
                assert!(polled(receive.as_mut()).await.is_none(), "there was a value");
            }
            runtime.sleep(Duration::from_micros(50)).await;
        }
    }

    /// Runs until no memory of the receiver is granted or in use, and stops both.
    pub(crate) async fn end(self) {
        let used = || self.receiver.receive_memory().used_bytes;
        until(&self.ground, || used() == 0).await;
        assert_eq!(self.receiver.receive_memory().leaked_bytes, 0);
        self.receiver.shutdown().await;
        self.sender.shutdown().await;
    }
}

/// Lets time pass until `is_so`.
pub(crate) async fn until(ground: &Given, is_so: impl Fn() -> bool) {
    let runtime = ground.runtime();
    let began = runtime.now();
    while !is_so() {
        assert!(runtime.now() - began < WAIT, "it does not come");
        runtime.sleep(Duration::from_micros(100)).await;
    }
}

/// A scalar.
pub(crate) fn number(worker: &Worker, value: u64) -> Tensor {
    Tensor::from_values(worker.pool(), &[], &[value]).unwrap()
}

/// A tensor that does not fit a message, and contains its number.
pub(crate) fn long(worker: &Worker, value: u64) -> Tensor {
    Tensor::from_values(worker.pool(), &[LONG as u64], &[value; LONG]).unwrap()
}

/// What the two above hold; the long one whole.
pub(crate) fn value_of(tensor: &Tensor) -> u64 {
    assert_eq!((tensor.dtype(), tensor.is_dead()), (DataType::U64, false));
    let values = tensor.values::<u64>().unwrap();
    assert!(values.len() == 1 || values.len() == LONG);
    assert!(values.iter().all(|value| *value == values[0]), "torn");
    values[0]
}

/// Polls once.
pub(crate) async fn polled<F: Future + ?Sized>(mut future: Pin<&mut F>) -> Option<F::Output> {
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

/// Numbers that are alike in every run.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    pub(crate) fn shuffled<T>(&mut self, mut items: Vec<T>) -> Vec<T> {
        for index in (1..items.len()).rev() {
            items.swap(index, self.below(index as u64 + 1) as usize);
        }
        items
    }
}
