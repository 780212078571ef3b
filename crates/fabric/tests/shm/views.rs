//! Two processes: one replaces a content of its catalogue and reuses the previous content's memory as soon as it may;
//! the other views the content. The models try every order of these steps; here the fabric itself takes them.

use std::{hint::black_box, sync::Arc, time::Duration};

use tensorwire_fabric::{Access, CELL_WORDS, CellContent, PeerCatalogue, Runtime};
use tensorwire_memory::Buf;

use super::processes::Half;
use crate::{
    contract::{
        Flavour, bounded,
        pair::{RegisteredPool, step, yield_once},
    },
    process::{Other, is_child, say},
};

const TEST: &str =
    "shm::views::s1_what_another_process_views_is_one_edition_though_its_memory_is_reused_at_once";
/// Longer than the content of a cell, and short, so that reused memory has its new bytes at once.
const LENGTH: usize = 64;
/// Room for the content, the next one, and two contents that have views, or had them when they were replaced.
const EDITIONS: usize = 4;
/// How often the reader checks a view. It stops earlier if the content was replaced often enough.
const LOOKS: u32 = 20;
/// How long the reader views the content. It continues until it has seen some editions: on a busy machine the other
/// process may not run for a second.
const READING: Duration = Duration::from_secs(5);
const VIEWS: u64 = 200_000;
const EDITIONS_SEEN: u64 = 100;

/// A pool with only [`EDITIONS`] free pieces of memory, so each is soon reused. Also returns the buffers that occupy
/// the rest.
fn tight_pool(half: &Half) -> (RegisteredPool, Vec<Buf>) {
    let pool = RegisteredPool::new(&half.domain, "editions", Access::LOCAL, 1 << 20);
    let mut all: Vec<_> = std::iter::from_fn(|| Some(pool.pool.try_alloc(LENGTH).ok()?.freeze())).collect();
    all.truncate(all.len() - EDITIONS);
    (pool, all)
}

/// Replaces the content until the process is killed.
async fn replace(half: Half) {
    let (editions, _rest) = tight_pool(&half);
    let queue_pair = half.dial().await;
    let offered = queue_pair.catalogue().unwrap();
    let cell = offered.catalogue().cell("x").unwrap();
    for number in 0_u64.. {
        let mut buffer = loop {
            match editions.pool.try_alloc(LENGTH) {
                Ok(buffer) => break buffer,
                Err(_all_are_viewed) => yield_once().await,
            }
        };
        buffer.fill(number as u8);
        let bytes = buffer.freeze();
        if number == 0 {
            offered.share(&bytes);
        }
        drop(offered.catalogue().write(cell, Some(CellContent { words: [number; CELL_WORDS], bytes })));
        if number == 0 {
            say("published");
        }
        if number.is_multiple_of(256) {
            yield_once().await;
        }
    }
}

/// The number of the content and a view of the content; `None` if it was replaced meanwhile.
fn view(catalogue: &dyn PeerCatalogue) -> Option<(u64, Buf)> {
    let reading = catalogue.find("x")?;
    Some((reading.words[0], catalogue.view(&reading)?))
}

/// Makes the memory of contents resident, because only resident memory can be viewed.
async fn first_view(runtime: &Arc<dyn Runtime>, catalogue: &dyn PeerCatalogue) {
    let viewing = async {
        while view(catalogue).is_none() {
            if let Some(reading) = catalogue.find("x") {
                catalogue.copy(&reading, 0, &mut [0; LENGTH]);
            }
            yield_once().await;
        }
    };
    step(runtime, "the first view", viewing).await;
}

#[test]
fn s1_what_another_process_views_is_one_edition_though_its_memory_is_reused_at_once() {
    if is_child() {
        return bounded(Flavour::CurrentThread, |runtime| replace(Half::new(runtime)));
    }
    bounded(Flavour::CurrentThread, |runtime| async move {
        let mut other = Other::start_as(TEST, "1");
        let half = Half::new(runtime.clone());
        let queue_pair = half.accept(&mut other).await;
        assert_eq!(other.hear_meanwhile(&runtime, "the first content").await, "published");
        let catalogue = queue_pair.shared_memory().unwrap().peer_catalogue().unwrap();
        first_view(&runtime, &*catalogue).await;
        let (began, mut views, mut editions, mut latest) = (runtime.now(), 0, 0_u64, 0);
        while editions <= EDITIONS_SEEN || views < VIEWS && runtime.now() - began < READING {
            for _ in 0..256 {
                let Some((number, view)) = view(&*catalogue) else { continue };
                // Long enough that the memory would have been reused if the publisher ignored the claim.
                for look in 0..LOOKS {
                    let now = catalogue.find("x").map_or(0, |reading| reading.words[0]);
                    let seen: [u8; LENGTH] = black_box(&view)[..].try_into().unwrap();
                    assert_eq!(seen, [number as u8; LENGTH], "look {look} at a view of edition {number}");
                    if now > number + EDITIONS as u64 {
                        break;
                    }
                }
                views += 1;
                editions += u64::from(number != latest);
                latest = number;
            }
            yield_once().await;
        }
        println!("{views} views of {editions} editions, the last is {latest}");
    });
}
