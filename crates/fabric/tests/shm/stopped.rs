//! A target that is stopped in the middle of a copy, and resumed after the writer has closed and reused its memory.
//!
//! The target makes one page of the destination read-only before each write. The copy faults at that page, and the
//! handler of the fault lifts the protection and stops the process. So every round stops inside the copy, at the page
//! that was drawn.

use std::{
    env,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
};

use tensorwire_fabric::{Access, Immediate, QueuePair, Runtime};
use tensorwire_memory::GrantEnd;

use super::processes::{Half, describe, understand};
use crate::{
    contract::{
        Flavour, bounded,
        pair::{RegisteredPool, checksum, fill, immediate, pattern, step, yield_once},
    },
    process::{Other, is_child, listen, say},
};

/// Bytes of a write that is stopped: eight chunks.
const LENGTH: usize = 2 << 20;
const PAGE: usize = 4096;
const PAGES: usize = LENGTH / PAGE;

/// Pages of the last chunk. Only the check after the copy into this chunk can reject it.
const LAST_PAGES: usize = PAGES / 8;

/// Rounds of one of the five tests. `TENSORWIRE_STOP_ROUNDS` replaces the default.
fn rounds() -> u32 {
    env::var("TENSORWIRE_STOP_ROUNDS").map_or(100, |rounds| rounds.parse().unwrap())
}

/// Address of the page where the first write stops the process; 0 for none.
static GUARDED: AtomicUsize = AtomicUsize::new(0);

/// How often the process stopped itself.
static STOPS: AtomicU32 = AtomicU32::new(0);

/// Changes the protection of one page.
fn protect(page: usize, protection: libc::c_int) -> bool {
    // SAFETY: the page belongs to memory that this process has granted, which stays mapped meanwhile.
    unsafe { libc::mprotect(std::ptr::with_exposed_provenance_mut(page), PAGE, protection) == 0 }
}

/// The handler of SIGSEGV. Does nothing that a signal handler may not do.
extern "C" fn stop_here(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel hands over the information of a fault.
    let address = unsafe { (*info).si_addr() }.addr();
    let page = GUARDED.swap(0, Ordering::SeqCst);
    let is_ours = page != 0 && address & !(PAGE - 1) == page;
    if !is_ours || !protect(page, libc::PROT_READ | libc::PROT_WRITE) {
        // SAFETY: the fault strikes again as this returns, and then ends the process as usual.
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
        return;
    }
    STOPS.fetch_add(1, Ordering::SeqCst);
    // SAFETY: may be called in a handler. Goes on from here when someone sends SIGCONT.
    unsafe { libc::raise(libc::SIGSTOP) };
}

fn install_handler() {
    // SAFETY: all zeroes are a `sigaction`; the handler has the signature that SA_SIGINFO asks for.
    let installed = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = stop_here;
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGSEGV, &raw const action, std::ptr::null_mut())
    };
    assert_eq!(installed, 0);
}

/// The target: reports after each round how often it stopped, how many arrivals there were, and the checksum of the last.
async fn be_stopped(runtime: Arc<dyn Runtime>) {
    install_handler();
    let half = Half::new(runtime);
    let grant = half.receive.grant(LENGTH);
    assert_eq!(grant.address % PAGE, 0);
    for round in 0..rounds() {
        let queue_pair = half.dial().await;
        say(&describe(&grant));
        let page = grant.address + PAGE * listen().parse::<usize>().unwrap();
        assert!(protect(page, libc::PROT_READ));
        GUARDED.store(page, Ordering::SeqCst);
        say("guarded");
        let (mut arrivals, mut sum) = (0, 0);
        while let Ok(arrival) = queue_pair.next_arrival().await {
            assert_eq!(immediate(arrival), (round, LENGTH as u64));
            (arrivals, sum) = (arrivals + 1, checksum(&grant.bytes()));
        }
        queue_pair.close().await;
        say(&format!("{} {arrivals} {sum}", STOPS.load(Ordering::SeqCst)));
    }
    grant.granted.end(GrantEnd::QueuePairDrained).unwrap();
}

/// The random choices of one round.
struct Draw {
    page: usize,
    /// The writer closes and reuses the source while the target is stopped.
    closes: bool,
}

fn draw(random: &mut u64) -> Draw {
    *random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
    let bits = (*random >> 24) as usize;
    let page = if bits & 1 == 0 { bits / 16 % PAGES } else { PAGES - 1 - bits / 16 % LAST_PAGES };
    Draw { page, closes: bits & 6 != 0 }
}

/// The connection of one round, with the page of the target guarded.
async fn connect(half: &Half, other: &mut Other, page: usize) -> (QueuePair, tensorwire_fabric::RemoteRange) {
    let queue_pair = half.accept(other).await;
    let (region, range) = understand(&other.hear());
    queue_pair.add_remote_region(region);
    other.tell(&page.to_string());
    assert_eq!(other.hear(), "guarded");
    (queue_pair, range)
}

async fn stop_the_target(test: &str, seed: u64, runtime: Arc<dyn Runtime>) {
    let mut other = Other::start_as(&format!("shm::stopped::{test}"), "target");
    let half = Half::new(runtime.clone());
    // Room for one buffer, which returns as soon as the operation has ended.
    let one = RegisteredPool::new(&half.domain, "one buffer", Access::LOCAL, LENGTH as u64);
    let mut random = seed;
    for round in 0..rounds() {
        let Draw { page, closes } = draw(&mut random);
        let what = format!("round {round} of seed {seed}, page {page}, closes: {closes}");
        let (queue_pair, range) = connect(&half, &mut other, page).await;
        let payload = u64::from(round) * 2 + 1;
        let mut source = step(&runtime, "the source", one.pool.alloc(LENGTH)).await.unwrap();
        fill(&mut source, payload);
        let write = queue_pair.write_imm(source.freeze(), range, Immediate(round));
        let stopped = async {
            while !other.has_stopped() {
                yield_once().await;
            }
        };
        step(&runtime, &format!("{what}: the stop"), stopped).await;
        let expected = if closes {
            step(&runtime, "the close", queue_pair.close()).await;
            let mut reused = step(&runtime, "the buffer", one.pool.alloc(LENGTH)).await.unwrap();
            fill(&mut reused, payload + 1);
            other.signal(libc::SIGCONT);
            step(&runtime, "the write", write).await.expect_err("a copy that was never finished");
            format!("{} 0 0", round + 1)
        } else {
            other.signal(libc::SIGCONT);
            step(&runtime, "the write", write).await.unwrap();
            step(&runtime, "the close", queue_pair.close()).await;
            format!("{} 1 {}", round + 1, checksum(&pattern(LENGTH, payload)))
        };
        let report = other.hear_meanwhile(&runtime, &what).await;
        assert_eq!(report, expected, "{what}: stops, arrivals, checksum");
    }
}

macro_rules! stopped {
    ($($test:ident: $seed:literal,)*) => {$(
        #[test]
        fn $test() {
            if is_child() {
                return bounded(Flavour::CurrentThread, be_stopped);
            }
            bounded(Flavour::CurrentThread, |runtime| stop_the_target(stringify!($test), $seed, runtime));
        }
    )*};
}

// Five hundred rounds together.
stopped! {
    d_peer_sigstop_a_resumed_target_never_delivers_torn_bytes_1: 1,
    d_peer_sigstop_a_resumed_target_never_delivers_torn_bytes_2: 2,
    d_peer_sigstop_a_resumed_target_never_delivers_torn_bytes_3: 3,
    d_peer_sigstop_a_resumed_target_never_delivers_torn_bytes_4: 4,
    d_peer_sigstop_a_resumed_target_never_delivers_torn_bytes_5: 5,
}
