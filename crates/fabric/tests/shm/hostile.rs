//! A process that breaks the rules with its own memory and descriptors. It breaks only its own connection: the victim
//! survives, and its other connections continue.

use std::{
    fs, io,
    os::fd::RawFd,
    process::{Command, Stdio},
    sync::Arc,
};

use tensorwire_fabric::{Immediate, Runtime};
use tensorwire_memory::GrantEnd;

use super::{
    SETUP,
    processes::{Half, describe, understand},
};
use crate::{
    contract::{
        Flavour, bounded,
        pair::{Pair, pattern, step, yield_once},
    },
    process::{Other, is_child, listen, part, say},
};

const LENGTH: usize = 1 << 20;
const ROUNDS: u32 = 30;

/// Before this round, the hostile process follows the rules.
const FIRST_DEED: u32 = 3;

/// In this round, bells that block are filled.
const FILL_BLOCKING: u32 = 15;

/// Writable mappings of memfds whose name contains `name`: address and length.
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

/// Open descriptors whose target contains `name`.
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
            // SAFETY: a writable mapping of this process. Changing it may upset the process's other threads, which is
            // the purpose.
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
            // SAFETY: `bytes` is readable for its length. The victim may cause errors.
            unsafe { libc::send(fd, bytes.as_ptr().cast(), length, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
        }
    }
}

/// Fills the eventfd's counter, if that can be done without waiting.
fn fill_bell(fd: RawFd) {
    let most = u64::MAX - 1;
    // SAFETY: `most` is readable for eight bytes.
    unsafe { libc::write(fd, (&raw const most).cast(), 8) };
}

fn set_blocking(fd: RawFd, blocks: bool) {
    // SAFETY: no pointers are involved.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    let flags = if blocks { flags & !libc::O_NONBLOCK } else { flags | libc::O_NONBLOCK };
    // SAFETY: as above.
    unsafe { libc::fcntl(fd, libc::F_SETFL, flags) };
}

/// Makes bells block. When the victim must have noticed that, fills them as well: any thread that writes one now hangs.
/// (This process would hang, too, if it filled them once more.)
fn block_bells(round: u32, bells: impl Iterator<Item = RawFd>) {
    for fd in bells {
        match round {
            FIRST_DEED => set_blocking(fd, true),
            FILL_BLOCKING => {
                set_blocking(fd, false);
                fill_bell(fd);
                set_blocking(fd, true);
            }
            _ => {}
        }
    }
}

/// Sends every memfd of this process over every socket.
fn send_descriptors() {
    for socket in descriptors("socket:") {
        for fd in descriptors("memfd:tensorwire") {
            // SAFETY: the message and what it points to live until `sendmsg` has returned, and the control buffer has
            // the room for one descriptor that its length names. The victim may refuse any of them.
            unsafe {
                let mut byte = 0x54_u8;
                let mut part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
                let mut control = [0_u64; 4];
                let mut message: libc::msghdr = std::mem::zeroed();
                (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
                message.msg_control = control.as_mut_ptr().cast();
                message.msg_controllen = libc::CMSG_SPACE(4) as _;
                let header = libc::CMSG_FIRSTHDR(&raw const message);
                (*header).cmsg_level = libc::SOL_SOCKET;
                (*header).cmsg_type = libc::SCM_RIGHTS;
                (*header).cmsg_len = libc::CMSG_LEN(4) as _;
                libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(fd);
                libc::sendmsg(socket, &raw const message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
            }
        }
    }
}

/// Starts a process that holds every descriptor of this one, and lives until the victim has finished with this process.
#[allow(clippy::zombie_processes)] // it outlives this process, which is killed: that is the point
fn pass_descriptors_on() {
    let all = ["socket:", "memfd:tensorwire", "eventfd"];
    for fd in all.into_iter().flat_map(descriptors) {
        // SAFETY: no pointers are involved.
        unsafe { libc::fcntl(fd, libc::F_SETFD, 0) };
    }
    let mut holder = Command::new("cat");
    holder.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
}

fn commit(deed: &str, round: u32, spared: &[RawFd]) {
    let bells = descriptors("eventfd").into_iter().filter(|fd| !spared.contains(fd));
    match deed {
        "scribble_on_rings" => scribble("memfd:tensorwire-ring", u64::from(round) + 1),
        "scribble_on_blocks" => scribble("memfd:tensorwire-block", u64::from(round) + 1),
        "truncate" => truncate_everything(),
        "send_frames" => send_frames(),
        "fill_bells" => bells.for_each(fill_bell),
        "block_bells" => block_bells(round, bells),
        "send_descriptors" => send_descriptors(),
        "pass_descriptors_on" if round == FIRST_DEED => pass_descriptors_on(),
        "pass_descriptors_on" => {}
        other => panic!("unknown deed {other}"),
    }
}

async fn be_hostile(runtime: Arc<dyn Runtime>) {
    let deed = part();
    // The eventfds of its own runtime are spared: a process that stops itself proves nothing.
    let spared = descriptors("eventfd");
    let half = Half::new(runtime.clone());
    let grant = half.receive.grant(LENGTH);
    let queue_pair = half.dial().await;
    let (region, range) = understand(&listen());
    say(&describe(&grant));
    queue_pair.add_remote_region(region);
    let source = half.source.filled(LENGTH, 1);
    for round in 0..ROUNDS {
        if round >= FIRST_DEED {
            commit(&deed, round, &spared);
        }
        // Posted and not awaited: its result does not matter.
        drop(queue_pair.write_imm(source.clone(), range, Immediate(round)));
        while let Some(Ok(_taken)) = futures::FutureExt::now_or_never(queue_pair.next_arrival()) {}
        runtime.sleep(std::time::Duration::from_millis(1)).await;
    }
    say("done");
    listen();
    std::process::exit(0);
}

/// Writes, lends and takes arrivals on the connection with the hostile process, and uses another connection meanwhile.
async fn suffer(test: &str, deed: &str, must_end: bool, runtime: Arc<dyn Runtime>) {
    let bystanders = Pair::new(SETUP, runtime.clone()).await;
    let mut other = Other::start_as(&format!("shm::hostile::{test}"), deed);
    let half = Half::new(runtime.clone());
    let grant = half.receive.grant(LENGTH);
    let queue_pair = half.accept(&mut other).await;
    other.tell(&describe(&grant));
    let (region, range) = understand(&other.hear());
    queue_pair.add_remote_region(region);
    let guard = half.receive.filled(4096, 5);
    for round in 0..3 * ROUNDS {
        // A source that still waits for the other process may hold all memory: then this round has none.
        if let Ok(mut local) = half.source.pool.try_alloc(LENGTH) {
            local.fill(round as u8);
            drop(queue_pair.write(local.freeze(), range));
        }
        drop(queue_pair.lend(half.source.filled(64, 1), Immediate(round)));
        let _whatever_comes = futures::FutureExt::now_or_never(queue_pair.next_arrival());
        bystanders.works(&bystanders.to_right, &bystanders.to_left).await;
        runtime.sleep(std::time::Duration::from_millis(1)).await;
    }
    let report = other.hear_meanwhile(&runtime, &format!("{deed}: the end of the deeds")).await;
    assert_eq!(report, "done");
    for _ in 0..100 {
        bystanders.works(&bystanders.to_right, &bystanders.to_left).await;
        let _whatever_comes = futures::FutureExt::now_or_never(queue_pair.next_arrival());
    }
    if must_end {
        assert!(queue_pair.failure().is_some(), "{deed}: the connection lives on");
    }
    step(&runtime, "the close", queue_pair.close()).await;
    assert!(guard[..] == pattern(4096, 5)[..], "{deed}: memory that was not granted changed");
    grant.granted.end(GrantEnd::QueuePairDrained).unwrap();
    // A dead process holds no memory back, even if another process holds its descriptors.
    other.signal(libc::SIGKILL);
    let back = async {
        while half.source.pool.stats().used_bytes > 0 {
            yield_once().await;
        }
    };
    step(&runtime, "the memory to come back", back).await;
    bystanders.works(&bystanders.to_right, &bystanders.to_left).await;
    assert!(bystanders.to_right.failure().is_none() && bystanders.to_left.failure().is_none());
}

/// One test for each deed: what the hostile process does, and whether its connection must end by it.
macro_rules! deeds {
    ($($test:ident: $deed:ident, must_end: $must_end:literal,)*) => {$(
        #[test]
        fn $test() {
            if is_child() {
                return bounded(Flavour::CurrentThread, be_hostile);
            }
            let (test, deed) = (stringify!($test), stringify!($deed));
            bounded(Flavour::CurrentThread, move |runtime| suffer(test, deed, $must_end, runtime));
        }
    )*};
}

deeds! {
    a_hostile_process_that_scribbles_on_rings_spoils_its_own_connection_only: scribble_on_rings, must_end: true,
    a_hostile_process_that_scribbles_on_blocks_spoils_its_own_bytes_only: scribble_on_blocks, must_end: false,
    a_hostile_process_cannot_resize_unseal_or_punch_what_it_shares: truncate, must_end: false,
    a_hostile_process_that_sends_frames_spoils_its_own_connection_only: send_frames, must_end: true,
    a_hostile_process_that_fills_bells_spoils_its_own_connection_only: fill_bells, must_end: false,
    a_hostile_process_that_makes_bells_block_spoils_its_own_connection_only: block_bells, must_end: true,
    a_hostile_process_that_sends_descriptors_spoils_its_own_connection_only: send_descriptors, must_end: true,
    a_hostile_process_whose_descriptors_outlive_it_keeps_no_memory: pass_descriptors_on, must_end: false,
}
