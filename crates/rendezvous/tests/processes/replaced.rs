//! A published tensor that is replaced as fast as possible, and neighbours that fetch it meanwhile: four processes, of which one
//! is stopped again and again, and one killed.

use std::{env, time::Duration};

use rustix::process::Signal;
use tensorwire_fabric::{FabricKind, Runtime};
use tensorwire_memory::copy::{CopyReason, count};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Peer, Sharing, Tensor, Worker};
use tokio::task::yield_now;

use crate::harness::{Other, PARENT, bounded, builder, parents_lines, role, say, step};

const TEST: &str = "replaced::s2_neighbours_of_a_tensor_that_is_replaced_never_find_a_mix";
const READERS: usize = 4;
/// In one cell, in memory, in two pieces of a copy.
const LENGTHS: [usize; 6] = [8, 48, 49, 3000, 64 << 10, 300 << 10];
/// Views that a reader holds.
const VIEWS: usize = 4;
/// Room for the edition that is published, the next one, and those that are viewed by, or sent to, each reader.
const SOURCE_BYTES: u64 = (2 + 6 * (READERS as u64 + 1)) << 20;
const LIMIT: Duration = Duration::from_secs(110);

/// Fetches of all readers together.
fn fetches() -> u64 {
    env::var("TENSORWIRE_REPLACED_FETCHES").map_or(100_000, |count| count.parse().unwrap())
}

/// Ten million fetches take an hour at most.
fn limit() -> Duration {
    LIMIT.max(Duration::from_micros(360 * fetches()))
}

/// A tensor whose every byte tells which publication it is of.
async fn edition(worker: &Worker, number: u64) -> Tensor {
    let length = LENGTHS[number as usize % LENGTHS.len()];
    let mut buffer = worker.pool().alloc(length).await.unwrap();
    buffer.fill(number as u8);
    buffer[..8].copy_from_slice(&number.to_le_bytes());
    Tensor::new(buffer, DataType::U8, &[length as u64]).unwrap()
}

/// Checks that `bytes` are the publication `number`, all of it and nothing else.
fn check(bytes: &[u8], number: u64) {
    let mut expected = vec![number as u8; LENGTHS[number as usize % LENGTHS.len()]];
    expected[..8].copy_from_slice(&number.to_le_bytes());
    assert!(bytes == expected, "{} bytes of publication {number} are wrong", bytes.len());
}

/// Fetches until it has fetched often enough, or longer. A reader that was stopped may have lost its session meanwhile.
async fn read(peer: &Peer, fetches: u64) -> (u64, u64) {
    let (mut fetched, mut lost, mut newest, mut views) = (0, 0, 0, Vec::new());
    while fetched < fetches {
        let sharing = if fetched % 4 == 3 { Sharing::View } else { Sharing::Copy };
        let Ok(found) = peer.fetch("x").sharing(sharing).versioned().await else {
            lost += 1;
            assert!(lost < 100, "the publisher is always there");
            continue;
        };
        let number = found.version.number();
        assert!(number >= newest, "version {number} after {newest}");
        newest = number;
        check(found.tensor.bytes(), number);
        fetched += 1;
        // A view stays what it was while the tensor is replaced many times.
        views.extend(found.tensor.buf().is_foreign().then_some((number, found.tensor)));
        if views.len() > VIEWS {
            let (number, view) = views.swap_remove(fetched as usize % VIEWS);
            check(view.bytes(), number);
        }
    }
    (fetched, lost)
}

async fn reader(address: String, number: String, fetches: u64) {
    let worker =
        builder(&format!("/job:reader/replica:0/task:{number}"), FabricKind::SHM).start().await.unwrap();
    let peer = worker.peer_at(&address).await.unwrap();
    let mut lines = parents_lines();
    say("ready");
    let (fetched, lost) = read(&peer, fetches).await;
    say(&format!("{fetched} {lost} {}", count(CopyReason::Catalogue).calls));
    let _the_parent_has_read = lines.recv().await;
    worker.shutdown().await;
}

/// Publishes as fast as it can until all readers have ended, and disturbs two of them.
async fn publish(runtime: &dyn Runtime, worker: &Worker, readers: &mut [Other]) -> Vec<(usize, String)> {
    let (mut number, mut disturbed, mut told) = (0, 0, Vec::new());
    let mut is_stopped = false;
    while told.len() < readers.len() {
        number += 1;
        let version = worker.publish("x", edition(worker, number).await).unwrap();
        assert_eq!(version.number(), number);
        yield_now().await;
        if number % 64 != 0 {
            continue;
        }
        for (index, reader) in readers.iter_mut().enumerate() {
            if let Some(line) = reader.heard().filter(|line| line != "ready") {
                told.push((index, line));
            }
        }
        // At moments that have nothing to do with the number of publications.
        let now = runtime.now().as_millis() / 37;
        if now != disturbed {
            disturbed = now;
            is_stopped = !is_stopped;
            readers[0].signal(if is_stopped { Signal::STOP } else { Signal::CONT });
        }
    }
    told
}

#[test]
fn s2_neighbours_of_a_tensor_that_is_replaced_never_find_a_mix() {
    if let Some(words) = role() {
        let [address, number, fetches] = [0, 1, 2].map(|index| words[index].clone());
        return bounded(limit(), |_| reader(address, number, fetches.parse().unwrap()));
    }
    bounded(limit(), |runtime| async move {
        let worker = builder(PARENT, FabricKind::SHM).memory(|memory| {
            memory.block_bytes = 1 << 20;
            memory.source_bytes = SOURCE_BYTES;
        });
        let worker = worker.start().await.unwrap();
        let start = |number: usize, fetches: u64| {
            Other::start(TEST, &format!("{} {number} {fetches}", worker.address()))
        };
        let share = fetches() / READERS as u64;
        let mut readers: Vec<_> = (0..READERS).map(|number| start(number, share)).collect();
        // This one would go on for ever, and is killed when it has begun.
        let mut killed = start(READERS, u64::MAX);
        let publishing = publish(&*runtime, &worker, &mut readers);
        let killing = async {
            assert_eq!(killed.hear().await, "ready");
            runtime.sleep(Duration::from_millis(100)).await;
            killed.kill();
        };
        let (told, ()) = tokio::join!(publishing, killing);
        for (index, line) in told {
            let counts: Vec<u64> = line.split(' ').map(|count| count.parse().unwrap()).collect();
            println!(
                "reader {index}: {} fetches, {} lost, {} copies out of the catalogue",
                counts[0], counts[1], counts[2]
            );
            assert!(counts[0] >= share && counts[2] > share / 100, "reader {index}: {line}");
        }
        readers.iter_mut().for_each(|reader| {
            reader.signal(Signal::CONT);
            reader.tell("end");
        });
        worker.withdraw("x");
        let free = async {
            while worker.pool().stats().used_bytes > 0 {
                runtime.sleep(Duration::from_millis(1)).await;
            }
        };
        step("the end of all views", free).await;
        worker.shutdown().await;
    });
}
