//! The fabric contract as tests that every fabric runs under the same names.
//!
//! A fabric's test file defines how to make the fabric and calls [`contract_suite!`]; each rule then becomes one
//! test on a current-thread runtime and one on a two-worker runtime. Nothing here knows which fabric it runs on,
//! except where the contract itself lets a fabric know less (a NIC does not report why it refused).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test
#![allow(unreachable_pub)] // each test binary compiles this as its own module

pub mod endings;
pub mod loans;
pub mod pair;
pub mod reads;
pub mod refusals;
pub mod vectored;
pub mod writes;

use std::{
    cell::Cell,
    fs::File,
    future::Future,
    io::Write as _,
    net::SocketAddr,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use futures::{FutureExt, future::LocalBoxFuture};
use tensorwire_fabric::{Fabric, FabricKind, Runtime, TokioRuntime};

/// No test may take longer than this, whatever goes wrong in it.
pub const TEST_LIMIT: Duration = Duration::from_secs(20);

/// By how much the limits of tests and their steps grow on an emulated machine: `TENSORWIRE_TEST_PATIENCE`, or 1.
pub fn patience() -> u32 {
    std::env::var("TENSORWIRE_TEST_PATIENCE").ok().and_then(|value| value.parse().ok()).unwrap_or(1)
}

/// The rules that are not tried on some fabric. The file's first lines describe its format.
const EXCEPTIONS: &str = include_str!("exceptions.txt");

/// The fabrics that this file covers.
const LISTED: [FabricKind; 5] =
    [FabricKind::SIM, FabricKind::SHM, FabricKind::TCP, FabricKind::VERBS, FabricKind::new("loopback")];

/// Environment variable with the path of a file. [`is_able`] appends a line to it for each rule that was not tried.
const SKIPPED: &str = "TENSORWIRE_TEST_SKIPPED";

/// Whether the rule of the present test, which needs `ability`, can be tried on the fabric of `pair`. If not, the rule
/// must be among the exceptions, and this prints that the test was skipped.
pub fn is_able(pair: &pair::Pair, ability: &str, able: bool) -> bool {
    if !able {
        let test = TEST.get();
        let kind = pair.to_right.kind();
        let (place, reason) = match exception(kind.name(), rule_of(test)) {
            Some(listed) => listed,
            // A fabric outside this workspace has its own list.
            None if !LISTED.contains(&kind) => (kind.to_string(), ability),
            None => panic!("{test} needs `{ability}`, and is not among the exceptions"),
        };
        let line = format!("SKIPPED: {place} {test} {reason}\n");
        print!("{line}");
        if let Some(path) = std::env::var_os(SKIPPED) {
            File::options().create(true).append(true).open(path).unwrap().write_all(line.as_bytes()).unwrap();
        }
    }
    able
}

/// The line of the file for this fabric and rule, if there is one: the fabric as written there, and the reason.
fn exception(fabric: &str, rule: &str) -> Option<(String, &'static str)> {
    let apart = grants_whole_blocks().then(|| format!("{fabric}-between-processes"));
    let places = apart.into_iter().chain([fabric.to_owned(), format!("{fabric}-adapter")]);
    let reason_at = |place: String| {
        let of_rule = |line: &'static str| line.strip_prefix(&*place)?.strip_prefix(' ')?.strip_prefix(rule);
        let reason = EXCEPTIONS.lines().find_map(|line| of_rule(line)?.strip_prefix(' '))?;
        Some((place, reason))
    };
    places.into_iter().find_map(reason_at)
}

/// `MODULE::RULE` of a test's full name.
fn rule_of(test: &str) -> &str {
    test.rmatch_indices("::").nth(1).map_or(test, |(at, colons)| &test[at + colons.len()..])
}

thread_local! {
    static TEST: Cell<&'static str> = const { Cell::new("a test outside of the suite") };
    static WHOLE_BLOCKS: Cell<bool> = const { Cell::new(false) };
}

/// Sets the full name of the test that begins on this thread.
pub fn begin(test: &'static str) {
    TEST.set(test);
}

/// Sets for the test on this thread that its target grants and exposes whole blocks, as an RDMA adapter does, even if
/// its fabric can do better.
#[allow(dead_code)] // only RDMA adapters do
pub fn grant_whole_blocks() {
    WHOLE_BLOCKS.set(true);
}

/// Whether the target of the test on this thread grants and exposes whole blocks.
pub fn grants_whole_blocks() -> bool {
    WHOLE_BLOCKS.get()
}

/// The fabric under test.
#[derive(Clone, Copy)]
pub struct Setup {
    /// Makes the fabric of one process.
    pub fabric: fn(Arc<dyn Runtime>) -> Arc<dyn Fabric>,
    /// The address of the control connection to the peer, for fabrics that need one.
    pub peer_address: Option<SocketAddr>,
}

/// Which runtime a test runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// Everything on the test's own thread.
    CurrentThread,
    /// Two workers: both sides of a connection really run at once.
    TwoWorkers,
}

/// Runs `test` on a runtime of its own and fails after [`TEST_LIMIT`] times [`patience`], even if a runtime thread is
/// blocked.
pub fn bounded<T, F>(flavour: Flavour, test: T)
where
    T: FnOnce(Arc<dyn Runtime>) -> F + Send + 'static,
    F: Future<Output = ()> + 'static,
{
    bounded_by(TEST_LIMIT, flavour, test);
}

/// Like [`bounded`], with another limit, for a test of many rounds.
pub fn bounded_by<T, F>(limit: Duration, flavour: Flavour, test: T)
where
    T: FnOnce(Arc<dyn Runtime>) -> F + Send + 'static,
    F: Future<Output = ()> + 'static,
{
    run_boxed(limit, flavour, Box::new(|runtime| test(runtime).boxed_local()));
}

/// A test whose type is erased: more than a thousand tests share the code that runs them. Otherwise that code would be
/// most of the code that is compiled for them.
pub type Test = Box<dyn FnOnce(Arc<dyn Runtime>) -> LocalBoxFuture<'static, ()> + Send>;

fn run_boxed(limit: Duration, flavour: Flavour, test: Test) {
    let (done, watchdog) = mpsc::channel();
    let worker = thread::spawn(move || {
        let runtime = match flavour {
            Flavour::CurrentThread => tokio::runtime::Builder::new_current_thread().enable_all().build(),
            Flavour::TwoWorkers => {
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()
            }
        }
        .unwrap();
        runtime.block_on(async { test(Arc::new(TokioRuntime::current().unwrap())).await });
        drop(runtime);
        let _ = done.send(());
    });
    let limit = limit * patience();
    match watchdog.recv_timeout(limit) {
        Ok(()) => worker.join().unwrap(),
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("the test took longer than {limit:?}"),
        // The worker panicked: its panic is the message.
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            if let Err(panic) = worker.join() {
                std::panic::resume_unwind(panic);
            }
        }
    }
}

/// One test per rule of the contract and flavour of runtime, for the fabric that `$setup` describes. With
/// `run: $run`, one test per rule, run by `$run` instead of [`bounded`]. The form `@attribute` puts an attribute on
/// each test, for a suite that needs hardware.
#[macro_export]
macro_rules! contract_suite {
    ($setup:expr) => {
        $crate::contract_suite!(@flavour current_thread, CurrentThread, $setup, $crate::contract::bounded);
        $crate::contract_suite!(@flavour two_workers, TwoWorkers, $setup, $crate::contract::bounded);
    };
    ($setup:expr, run: $run:path) => {
        $crate::contract_suite!(@flavour contract_rules, CurrentThread, $setup, $run);
    };
    (@flavour $module:ident, $flavour:ident, $setup:expr, $run:path) => {
        $crate::contract_suite!(@attribute [cfg(all())], $module, $flavour, $setup, $run);
    };
    (@attribute $attribute:tt, $module:ident, $flavour:ident, $setup:expr, $run:path) => {
        mod $module {
            $crate::contract_suite!(@rules $attribute, $flavour, $setup, $run,
                writes: [
                    a_write_is_visible_at_its_immediate,
                    a_plain_write_is_visible_at_the_next_immediate,
                    immediates_arrive_in_posting_order,
                    a_notification_carries_no_bytes,
                    posts_that_are_complete_at_once_find_room_while_the_peer_executes_them,
                    bytes_around_a_write_stay_untouched,
                    length_0,
                    length_1,
                    length_63,
                    length_64,
                    length_65,
                    length_4096,
                    length_1_mib,
                    length_16_mib,
                    the_address_granted_is_the_address_written,
                    many_writes_may_be_outstanding,
                    a_full_send_queue_makes_the_next_write_wait,
                    post_now_says_that_the_send_queue_is_full,
                    a_dropped_future_still_completes_and_then_frees_its_buffer,
                    an_arrival_not_taken_is_not_lost,
                    a_sink_takes_arrivals_one_at_a_time_and_in_order,
                    traffic_both_ways_under_load_keeps_its_checksums,
                    both_directions_of_one_connection_work_at_once,
                    writes_from_many_tasks_all_land,
                    counters_count_operations_and_bytes,
                    waiting_operations_are_posted_in_the_order_they_began_to_wait,
                ]
                vectored: [
                    many_segments_are_one_completion_and_one_notification,
                    pages_land_where_the_table_says,
                    a_plain_vectored_write_is_visible_at_the_next_immediate,
                    one_bad_segment_fails_the_whole_before_anything_is_posted,
                    an_unregistered_segment_fails_the_whole,
                    overlapping_segments_fail_the_whole,
                    a_segment_that_was_not_granted_ends_the_connection,
                    more_segments_than_the_send_queue_holds_are_too_many_pieces,
                    a_vectored_write_without_segments_is_a_notification,
                    a_vectored_write_that_waits_for_room_posts_whole_and_in_order,
                    a_heavy_write_is_not_passed_by_light_ones_for_ever,
                    a_write_one_byte_below_the_piece_limit,
                    a_write_at_the_piece_limit,
                    a_write_one_byte_above_the_piece_limit,
                    a_write_of_more_pieces_than_the_send_queue_holds,
                ]
                reads: [
                    a_read_gives_the_exposed_bytes,
                    a_read_may_be_as_long_as_the_memory,
                    many_reads_may_be_outstanding,
                    a_read_sees_the_writes_posted_before_it,
                    reads_and_writes_both_ways_at_once,
                    a_dropped_read_keeps_its_destination_until_it_is_over,
                    a_read_outlives_the_end_of_its_exposure,
                    what_is_not_exposed_is_not_read,
                    what_is_exposed_no_more_is_not_read,
                    a_region_without_the_read_right_is_not_read,
                    a_read_past_the_exposed_bytes_is_refused,
                    a_read_with_a_wrong_key_or_generation_is_refused,
                    a_read_that_cannot_be_posted_fails_alone,
                    a_close_ends_reads_under_way,
                    many_ranges_are_read_by_one_operation,
                    one_range_is_scattered_to_many_buffers,
                    a_range_longer_than_a_piece_is_read_among_short_ones,
                    many_vectored_reads_may_be_outstanding,
                    a_vectored_read_of_nothing_completes,
                    one_bad_range_fails_the_whole_before_anything_is_asked,
                    an_unregistered_buffer_fails_the_whole,
                    a_range_without_the_read_right_ends_the_connection,
                    more_ranges_than_the_send_queue_holds_are_too_many_pieces,
                    a_vectored_read_that_waits_for_room_is_posted_whole,
                    a_dropped_vectored_read_keeps_its_buffers_until_it_is_over,
                    a_close_ends_vectored_reads_under_way,
                ]
                refusals: [
                    an_unknown_remote_region_fails_that_operation_only,
                    a_length_mismatch_fails_that_operation_only,
                    an_unregistered_source_fails_that_operation_only,
                    a_removed_remote_region_fails_that_operation_only,
                    a_wrong_generation_is_refused,
                    a_wrong_region_is_refused,
                    a_wrong_key_is_refused,
                    a_range_outside_the_region_is_refused,
                    a_range_that_overflows_is_refused,
                    memory_that_was_never_granted_is_refused,
                    memory_past_the_grant_is_refused,
                    a_grant_that_has_ended_is_refused,
                    a_region_without_the_right_is_refused,
                    memory_of_another_domain_is_refused,
                    an_immediate_without_a_receive_fails_both_ends,
                    taking_an_arrival_gives_its_receive_back,
                ]
                loans: [
                    lend_gives_the_peer_a_view_of_the_bytes,
                    lend_keeps_its_place_among_writes,
                    lend_keeps_the_bytes_until_the_last_view_is_gone,
                    lend_gives_memory_back_to_a_waiting_caller,
                    lend_of_nothing_or_of_strange_memory_is_refused_alone,
                    lend_takes_a_receive,
                    lend_outlives_its_dropped_future,
                    lend_outlives_its_connection,
                    lend_of_many_buffers_ends_in_any_order,
                ]
                endings: [
                    close_ends_every_outstanding_operation_once,
                    close_of_both_ends_at_once_ends,
                    operations_after_close_are_refused,
                    after_close_a_grant_can_end_as_drained,
                    the_peer_learns_of_a_close,
                    the_peer_learns_of_a_drop,
                    arrivals_before_the_loss_are_still_taken,
                    writers_waiting_for_a_slot_end_with_the_connection,
                    connections_of_one_pair_of_domains_are_independent,
                    a_prepared_end_can_be_dropped,
                    closing_with_many_outstanding_ends_each_once,
                    closing_from_several_tasks_is_one_close,
                    closing_after_a_panic_of_whoever_waited,
                    closing_after_domain_and_pools_were_dropped,
                ]
            );
        }
    };
    (@rules $attribute:tt, $flavour:ident, $setup:expr, $run:path, $($module:ident: [$($rule:ident,)*])*) => {
        $(mod $module {
            $(
                #[test]
                #$attribute
                fn $rule() {
                    $run($crate::contract::Flavour::$flavour, |runtime| {
                        $crate::contract::begin(concat!(module_path!(), "::", stringify!($rule)));
                        $crate::contract::$module::$rule($setup, runtime)
                    });
                }
            )*
        })*
    };
}
