//! A process that breaks the rules with its own memory and descriptors. It spoils its own connection and nothing else:
//! the victim lives, and its other connections go on.

use std::{fs, io, os::fd::RawFd, sync::Arc};

use memory::GrantEnd;
use verbs_reactor::{Immediate, Role, Runtime};

use crate::{
    SETUP,
    contract::{
        Flavour, bounded,
        pair::{Pair, pattern, step, yield_once},
    },
    processes::{Half, Other, describe, is_child, listen, part, say, understand},
};

const TEST: &str = "hostile::a_hostile_process_spoils_its_own_connection_only";
const LENGTH: usize = 1 << 20;
const ROUNDS: u32 = 30;

/// What the hostile process does, and whether its connection must end by it.
const DEEDS: [(&str, bool); 6] = [
    ("scribble on rings", true),
    ("scribble on blocks", false),
    ("truncate", false),
    ("send frames", true),
    ("flood bells", false),
    ("block bells", false),
];

/// Writable mappings of memfds whose name holds `name`: address and length.
fn mappings(name: &str) -> Vec<(usize, usize)> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let lines = maps.lines().filter(|line| line.contains(name) && line.contains(" rw-s "));
    let range = |line: &str| {
        let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        (number(from), number(to) - number(from))
    };
    lines.map(range).collect()
}

/// Open descriptors whose target holds `name`.
fn descriptors(name: &str) -> Vec<RawFd> {
    let entries = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let matching = entries
        .filter(|entry| fs::read_link(entry.path()).is_ok_and(|to| to.to_string_lossy().contains(name)));
    matching.map(|entry| entry.file_name().to_string_lossy().parse().unwrap()).collect()
}

fn scribble(name: &str, seed: u64) {
    let mut random = seed;
    for (base, length) in mappings(name) {
        for at in (0..length).step_by(8) {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            let pointer = std::ptr::with_exposed_provenance_mut::<u64>(base + at);
            // SAFETY: a writable mapping of this process, which its other threads may be upset by: that is the point.
            unsafe { pointer.write_volatile(random >> (random % 64)) };
        }
    }
}

fn truncate_everything() {
    for fd in descriptors("memfd:tensorwire") {
        for length in [0, 1 << 30] {
            // SAFETY: no pointers are involved.
            assert_eq!(unsafe { libc::ftruncate(fd, length) }, -1, "a sealed file was resized");
            assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EPERM));
        }
        // SAFETY: no pointers are involved.
        assert_eq!(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_WRITE) }, -1, "seals were added");
        let flags = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: no pointers are involved.
        assert_eq!(unsafe { libc::fallocate(fd, flags, 0, 4096) }, -1, "a hole was punched");
    }
}

fn send_frames() {
    for fd in descriptors("socket:") {
        for length in [1_usize, 6, 14, 18, 64, 4000] {
            let bytes = vec![0x54; length];
            // SAFETY: `bytes` is readable for its length. Errors are the victim's good right.
            unsafe { libc::send(fd, bytes.as_ptr().cast(), length, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
        }
    }
}

/// Fills every eventfd's counter; with `blocking`, whoever writes it next is meant to hang.
fn flood_bells(blocking: bool) {
    for fd in descriptors("eventfd") {
        let most = u64::MAX - 1;
        // SAFETY: no pointers are involved but to `most`, which is readable for eight bytes.
        unsafe {
            libc::write(fd, (&raw const most).cast(), 8);
            let flags = libc::fcntl(fd, libc::F_GETFL);
            if blocking {
                libc::fcntl(fd, libc::F_SETFL, flags & !libc::O_NONBLOCK);
            }
        }
    }
}

fn commit(deed: &str, round: u64) {
    match deed {
        "scribble on rings" => scribble("memfd:tensorwire-ring", round + 1),
        "scribble on blocks" => scribble("memfd:tensorwire-block", round + 1),
        "truncate" => truncate_everything(),
        "send frames" => send_frames(),
        "flood bells" => flood_bells(false),
        "block bells" => flood_bells(true),
        _ => {}
    }
}

async fn be_hostile(runtime: Arc<dyn Runtime>) {
    let deed = part();
    let half = Half::new(runtime.clone());
    let lent = half.receive.lend(LENGTH);
    let connecting = half.connect(Role::Dialer, |mine| {
        say(mine);
        listen()
    });
    let queue_pair = connecting.await;
    say(&describe(&lent));
    let (region, range) = understand(&listen());
    queue_pair.add_remote_region(region);
    let source = half.source.filled(LENGTH, 1);
    for round in 0..ROUNDS {
        if round > 2 {
            commit(&deed, u64::from(round));
        }
        // Posted, not awaited: whatever became of it.
        drop(queue_pair.write_imm(source.clone(), range, Immediate(round)));
        runtime.sleep(std::time::Duration::from_millis(1)).await;
    }
    say("done");
    listen();
    std::process::exit(0);
}

/// Writes, lends and takes what comes on the connection with the hostile process, and works on another one.
async fn suffer(deed: &str, must_end: bool, runtime: Arc<dyn Runtime>) {
    let bystanders = Pair::new(SETUP, runtime.clone()).await;
    let mut other = Other::start_as(TEST, deed);
    let half = Half::new(runtime.clone());
    let lent = half.receive.lend(LENGTH);
    let theirs = other.hear();
    let connecting = half.connect(Role::Acceptor, |mine| {
        other.tell(mine);
        theirs
    });
    let queue_pair = connecting.await;
    let (region, range) = understand(&other.hear());
    queue_pair.add_remote_region(region);
    other.tell(&describe(&lent));
    let guard = half.receive.filled(4096, 5);
    for round in 0..3 * ROUNDS {
        let local = half.source.filled(LENGTH, u64::from(round));
        drop(queue_pair.write(local, range));
        drop(queue_pair.lend(half.source.filled(64, 1), Immediate(round)));
        let _whatever_comes = futures::FutureExt::now_or_never(queue_pair.next_arrival());
        bystanders.works(&bystanders.to_right, &bystanders.to_left).await;
        runtime.sleep(std::time::Duration::from_millis(1)).await;
    }
    assert_eq!(other.hear(), "done");
    for _ in 0..100 {
        bystanders.works(&bystanders.to_left, &bystanders.to_right).await;
        let _whatever_comes = futures::FutureExt::now_or_never(queue_pair.next_arrival());
    }
    if must_end {
        assert!(queue_pair.failure().is_some(), "{deed}: the connection lives on");
    }
    assert!(bystanders.to_right.failure().is_none() && bystanders.to_left.failure().is_none());
    step(&runtime, "the close", queue_pair.close()).await;
    assert!(guard[..] == pattern(4096, 5)[..], "{deed}: memory that was not granted changed");
    lent.granted.end(GrantEnd::QueuePairDrained).unwrap();
    // Dead, it holds nothing back.
    drop(other);
    let back = async {
        while half.source.pool.stats().used_bytes > 0 {
            yield_once().await;
        }
    };
    step(&runtime, "the memory to come back", back).await;
}

#[test]
fn a_hostile_process_spoils_its_own_connection_only() {
    if is_child() {
        return bounded(Flavour::CurrentThread, be_hostile);
    }
    for (deed, must_end) in DEEDS {
        bounded(Flavour::CurrentThread, move |runtime| suffer(deed, must_end, runtime));
    }
}
