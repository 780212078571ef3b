//! Several tensors that one call requests.

use tensorwire_protocol::Key;
use tensorwire_rendezvous::Tensor;
use tensorwire_sim::Rng;

use super::{
    Kind, Run,
    member::{Ended, Member, SMALL, Target, any_small_length, device, name},
    traffic::{Job, pause, send, sharing, spawn},
};

/// Keys of each step that are received together.
const KEYS: usize = 3;

/// Fetches some of the small tensors of worker `from`, in any order.
pub(super) async fn fetch(member: &Member, from: usize, rng: &mut Rng) {
    let peer = member.worker.peer(&name(from)).unwrap();
    let (first, count) = (rng.below(SMALL), rng.within(2..SMALL + 1));
    let wanted: Vec<usize> = (0..count).map(|number| (first + number) % SMALL).collect();
    let oldest: Vec<u64> = wanted.iter().map(|which| member.newest(from, *which)).collect();
    let names: Vec<String> = wanted.iter().map(|which| member.run.setup.published(*which)).collect();
    let what = format!("fetch {wanted:?} of worker {from}");
    let fetch = peer.fetch_many(&names).sharing(sharing(rng)).into_future();
    let target = Target::any_life(from);
    let fetched = if rng.chance(1, 4) {
        member.impatient(target, what, rng.below(12), fetch).await.ok().flatten()
    } else {
        member.operation(target, what, fetch).await.ok()
    };
    for ((which, oldest), tensor) in wanted.iter().zip(oldest).zip(fetched.iter().flatten()) {
        let allowed = member.run.truth().published[from][*which].clone();
        member.check_numbered(tensor, &allowed, oldest);
        member.run.count(Kind::Published);
        member.run.count(Kind::OfMany);
    }
}

/// Sends values under several keys of a step from `peer` to `member`, which receives one of each at a time and cancels
/// some of these receives: the values of each key arrive once, whole and in order.
pub(super) fn stream(
    run: &Run,
    member: &Member,
    peer: &Member,
    step: i64,
    rng: &mut Rng,
    jobs: &mut Vec<Job>,
) {
    let mut value = |_| {
        let length = any_small_length(rng);
        (run.new_transfer(length), length)
    };
    let rows: Vec<[(u64, usize); KEYS]> = (0..3).map(|_| std::array::from_fn(&mut value)).collect();
    let (to, sent) = (member.index, rows.clone());
    jobs.push(spawn(
        peer,
        rng,
        move |member, rng| async move { sender(&member, to, step, &sent, rng).await },
    ));
    let (from, incarnation) = (peer.index, peer.worker.incarnation());
    let target = Target { incarnation: Some(incarnation), ..Target::any_life(from) };
    jobs.push(spawn(member, rng, move |member, mut rng| async move {
        let keys = keys(&member, from, member.index);
        let keys = keys.map(|key| key.with_incarnation(incarnation));
        for row in rows {
            let Ok(tensors) = receive(&member, target, step, &keys, &mut rng).await else { return };
            for (tensor, (transfer, _)) in tensors.iter().zip(row) {
                member.check(tensor, transfer);
                member.run.count(Kind::Sent);
                member.run.count(Kind::OfMany);
            }
        }
    }));
}

fn keys(member: &Member, from: usize, to: usize) -> [Key; KEYS] {
    let edge = |which| member.run.setup.edge_of(which);
    std::array::from_fn(|which| member.worker.key(&device(from), &device(to), &edge(which)).unwrap())
}

async fn sender(member: &Member, to: usize, step: i64, rows: &[[(u64, usize); KEYS]], mut rng: Rng) {
    let keys = keys(member, member.index, to);
    for row in rows {
        for (key, (transfer, length)) in keys.iter().zip(row) {
            pause(member, &mut rng).await;
            let tensor = member.tensor(*transfer, *length, false).await;
            send(member, to, &member.worker.shared_step(step), key, tensor);
        }
    }
}

/// Receives one value under each key, by the first attempt that is not cancelled.
async fn receive(
    member: &Member,
    target: Target,
    step: i64,
    keys: &[Key],
    rng: &mut Rng,
) -> Result<Vec<Tensor>, Ended> {
    let mut attempt = 0;
    loop {
        let what = format!("attempt {attempt} at {KEYS} keys of step {step} from worker {}", target.peer);
        let step = member.worker.shared_step(step);
        let receive = step.recv_many(keys).into_future();
        if attempt % 4 == 3 || !rng.chance(1, 3) {
            return member.operation(target, what, receive).await;
        }
        if let Some(tensors) = member.impatient(target, what, rng.below(12), receive).await? {
            return Ok(tensors);
        }
        attempt += 1;
    }
}
