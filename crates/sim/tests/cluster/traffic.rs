//! What the workers do with each other.

use std::{pin::pin, time::Duration};

use futures::future::{BoxFuture, Either, select};
use tensorwire_fabric::Runtime;
use tensorwire_protocol::{DataType, Key};
use tensorwire_rendezvous::{Sharing, Step, Tensor, WorkerError};
use tensorwire_sim::{OperationResult, Rng, Violation};

use super::{
    CROWDS, Kind, Run, crowd, many,
    member::{Ended, FICKLE, Member, NAMES, Target, address, any_length, device, name},
};
use crate::join_all::join_all;

pub(super) type Job = BoxFuture<'static, Option<()>>;

/// Steps of each pair of workers in a round: one for each stream, and some unused.
const STEPS: i64 = 4;

/// One round: every worker publishes, and fetches from and exchanges values with every other. Ends when every
/// job has ended, well or not.
pub(super) async fn round(run: &Run, members: &[Member], round: i64, rng: &mut Rng) {
    let mut jobs: Vec<Job> = Vec::new();
    let mut steps = Vec::new();
    run.truth().round_began = run.handle.now();
    for member in members {
        jobs.push(spawn(member, rng, |member, rng| async move { publisher(&member, rng).await }));
        for peer in members.iter().filter(|peer| peer.index != member.index) {
            let from = peer.index;
            jobs.push(spawn(member, rng, move |member, rng| async move {
                fetcher(&member, from, rng).await;
            }));
            let step = round * 1000 + (member.index * 10 + peer.index) as i64 * STEPS;
            steps.extend(step..step + STEPS);
            stream(run, member, peer, step, rng, &mut jobs);
            if rng.chance(1, 2) {
                many::stream(run, member, peer, step + 2, rng, &mut jobs);
            }
            if rng.chance(1, 2) {
                impatient_stream(run, member, peer, step + 1, rng, &mut jobs);
            }
        }
    }
    join_all(jobs).await;
    let mut rng = Rng::new(run.handle.seed()).fork(CROWDS).fork(round.cast_unsigned());
    join_all(crowd::crowds(members, &mut rng)).await;
    for member in members.iter().filter(|member| member.node.is_alive()) {
        steps.iter().for_each(|step| member.worker.cleanup(*step));
    }
}

/// Runs a job in `member`'s process, with random numbers of its own.
pub(super) fn spawn<F: Future<Output = ()> + Send + 'static>(
    member: &Member,
    rng: &mut Rng,
    job: impl FnOnce(Member, Rng) -> F,
) -> Job {
    member.node.run("job", job(member.clone(), Rng::new(rng.next_u64())))
}

/// Sometimes lets a moment pass.
pub(super) async fn pause(member: &Member, rng: &mut Rng) {
    if rng.chance(1, 3) {
        let moment = rng.duration(Duration::from_millis(3));
        member.node.runtime().sleep(moment).await;
    }
}

async fn publisher(member: &Member, mut rng: Rng) {
    for _ in 0..rng.within(2..8) {
        pause(member, &mut rng).await;
        member.publish_any(&mut rng).await;
    }
}

async fn fetcher(member: &Member, from: usize, mut rng: Rng) {
    let peer = member.worker.peer(&name(from)).unwrap();
    let mut held = Held::new(member);
    many::fetch(member, from, &mut rng).await;
    for _ in 0..rng.within(3..8) {
        pause(member, &mut rng).await;
        let which = rng.below(NAMES);
        if rng.chance(1, 5) {
            fetch_into(member, from, which, &mut rng).await;
            continue;
        }
        if rng.chance(1, 5) {
            await_newer(member, from, which, &mut rng).await;
            continue;
        }
        let (oldest, published) = (member.newest(from, which), member.run.setup.published(which));
        let what = format!("fetch {which} of worker {from}");
        let target = Target { is_fickle: which == FICKLE, ..Target::any_life(from) };
        let fetch = peer.fetch(&published).sharing(sharing(&mut rng)).into_future();
        let fetched = if rng.chance(1, 4) {
            member.impatient(target, what, rng.below(12), fetch).await.ok().flatten()
        } else {
            member.operation(target, what, fetch).await.ok()
        };
        match fetched {
            Some(tensor) => {
                let allowed = member.run.truth().published[from][which].clone();
                let transfer = member.check_numbered(&tensor, &allowed, oldest);
                member.run.count(Kind::Published);
                held.keep(tensor.clone(), transfer, 8, &mut rng);
            }
            // The peer may be dead, and may come back.
            None => member.node.runtime().sleep(Duration::from_millis(20)).await,
        }
        if rng.chance(1, 12) {
            list(member, from).await;
        }
    }
}

/// One fetch into a buffer of the user's.
async fn fetch_into(member: &Member, from: usize, which: usize, rng: &mut Rng) {
    let peer = member.worker.peer(&name(from)).unwrap();
    let (oldest, published) = (member.newest(from, which), member.run.setup.published(which));
    let what = format!("fetch {which} of worker {from} into a buffer");
    let target = Target { is_fickle: which == FICKLE, ..Target::any_life(from) };
    let buffer = member.target(member.longest_of(which)).await;
    let fetch = peer.fetch(&published).into_buffer(buffer).dtype(DataType::U8).into_future();
    let fetch = async { fetch.await.map_err(|failed| failed.error) };
    let filled = if rng.chance(1, 4) {
        member.impatient(target, what, rng.below(12), fetch).await.ok().flatten()
    } else {
        member.operation(target, what, fetch).await.ok()
    };
    if let Some(filled) = filled {
        let allowed = member.run.truth().published[from][which].clone();
        member.check_numbered(&filled.into_tensor(), &allowed, oldest);
        member.run.count(Kind::Published);
        member.run.count(Kind::Into);
    }
}

/// Fetches a tensor, and waits briefly for the next version: by its name, or in a list.
async fn await_newer(member: &Member, from: usize, which: usize, rng: &mut Rng) {
    let peer = member.worker.peer(&name(from)).unwrap();
    let published = member.run.setup.published(which);
    let target = Target { is_fickle: which == FICKLE, ..Target::any_life(from) };
    let allowed = || member.run.truth().published[from][which].clone();
    let (oldest, what) =
        (member.newest(from, which), format!("fetch {which} of worker {from} and its version"));
    let known = peer.fetch(&published).versioned().into_future();
    let Ok(known) = member.operation(target, what, known).await else { return };
    let number = member.check_numbered(&known.tensor, &allowed(), oldest);
    let (sharing, in_list) = (sharing(rng), rng.chance(1, 2));
    let next = async {
        if in_list {
            let list = peer.fetch_many([&published]).newer_than(known.version).sharing(sharing).await?;
            return Ok(list.into_iter().next());
        }
        peer.fetch(&published).newer_than(known.version).sharing(sharing).await.map(Some)
    };
    let moment = rng.duration(Duration::from_millis(5));
    let next = async {
        match select(pin!(next), member.node.runtime().sleep(moment)).await {
            Either::Left((next, _)) => next,
            Either::Right(_) => Ok(None),
        }
    };
    let what = format!("await what is newer than {number}, {which} of worker {from}");
    if let Ok(Some(tensor)) = member.operation(target, what, next).await {
        // A worker that came back may publish again what it had published.
        let oldest =
            if known.version.incarnation() == member.run.truth().incarnations[from] { number + 1 } else { 0 };
        member.check_numbered(&tensor, &allowed(), oldest);
        member.run.count(Kind::Published);
    }
}

/// Whether a tensor may come as a view.
pub(super) fn sharing(rng: &mut Rng) -> Sharing {
    if rng.chance(1, 3) { Sharing::View } else { Sharing::Copy }
}

/// One receive: as a tensor, or into a buffer of `length` bytes.
async fn receive(
    member: &Member,
    step: &Step,
    key: &Key,
    length: usize,
    rng: &mut Rng,
) -> Result<Tensor, WorkerError> {
    if !rng.chance(1, 4) {
        return step.recv(key).sharing(sharing(rng)).await;
    }
    let buffer = member.target(length.max(1)).await;
    let filled =
        step.recv(key).into_buffer(buffer).dtype(DataType::U8).await.map_err(|failed| failed.error)?;
    member.run.count(Kind::Into);
    Ok(filled.into_tensor())
}

/// Tensors that a worker holds for some time: their bytes must not change, whatever happens to their senders.
struct Held {
    member: Member,
    tensors: Vec<(Tensor, u64, usize)>,
}

impl Held {
    fn new(member: &Member) -> Self {
        Self { member: member.clone(), tensors: Vec::new() }
    }

    /// Holds a view of `transfer`, whose content begins after `skipped` bytes. Sometimes drops one.
    fn keep(&mut self, tensor: Tensor, transfer: u64, skipped: usize, rng: &mut Rng) {
        if tensor.buf().is_foreign() {
            self.tensors.push((tensor, transfer, skipped));
        }
        if !self.tensors.is_empty() && rng.chance(1, 2) {
            let index = rng.below(self.tensors.len());
            let released = self.tensors.swap_remove(index);
            self.check(&released);
        }
    }

    fn check(&self, (tensor, transfer, skipped): &(Tensor, u64, usize)) {
        self.member.run.handle.verify(*transfer, tensor.bytes().get(*skipped..).unwrap_or_default());
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.tensors.iter().for_each(|held| self.check(held));
    }
}

async fn list(member: &Member, from: usize) {
    let peer = member.worker.peer(&name(from)).unwrap();
    let (target, what) = (Target::any_life(from), format!("list of worker {from}"));
    let listed = member.operation(target, what, peer.list().into_future()).await;
    let names: Result<Vec<String>, _> = listed.map(|list| list.into_iter().map(|entry| entry.name).collect());
    let all: Vec<String> = (0..NAMES).map(|which| member.run.setup.published(which)).collect();
    // The last one may be withdrawn, and a restarted worker may not have published all of them yet.
    if names.is_ok_and(|names| !all.starts_with(&names)) {
        member.run.handle.fail(Violation::Data("a list is out of order or has strange names".into()));
    }
}

/// One value of a stream.
#[derive(Debug, Clone, Copy)]
struct Sent {
    transfer: u64,
    length: usize,
    dead: bool,
}

/// Sends values under one key of a step from `peer` to `member`, which must receive them whole and in order, and
/// receives once more after a failure.
fn stream(run: &Run, member: &Member, peer: &Member, step: i64, rng: &mut Rng, jobs: &mut Vec<Job>) {
    let values: Vec<Sent> = (0..rng.within(3..9))
        .map(|_| {
            let dead = rng.chance(1, 12);
            let length = if dead { 0 } else { any_length(&run.setup, rng) };
            Sent { transfer: run.new_transfer(length), length, dead }
        })
        .collect();
    let (to, sent) = (member.index, values.clone());
    jobs.push(spawn(
        peer,
        rng,
        move |member, rng| async move { sender(&member, to, step, &sent, rng).await },
    ));
    let (from, incarnation) = (peer.index, peer.worker.incarnation());
    jobs.push(spawn(member, rng, move |member, mut rng| async move {
        let key = member.worker.key(&device(from), &device(member.index), &member.run.setup.edge()).unwrap();
        // Of this incarnation: another one does not have these values.
        let key = key.with_incarnation(incarnation);
        let target = Target { incarnation: Some(incarnation), ..Target::any_life(from) };
        let mut held = Held::new(&member);
        let (mut number, mut has_failed) = (0, false);
        while let Some(sent) = values.get(number) {
            pause(&member, &mut rng).await;
            let step = member.worker.shared_step(step);
            let what = format!("receive {number} of step {} from worker {from}", step.id());
            let received = receive(&member, &step, &key, sent.length, &mut rng);
            match member.operation(target, what, received).await {
                Ok(tensor) => {
                    member.check(&tensor, sent.transfer);
                    member.run.count(Kind::Sent);
                    held.keep(tensor.clone(), sent.transfer, 0, &mut rng);
                    if tensor.is_dead() != sent.dead {
                        member.run.handle.fail(Violation::Data("a value is dead at one end only".into()));
                    }
                    number += 1;
                }
                // This value alone is lost.
                Err(Ended(OperationResult::Corrupted)) => number += 1,
                // If it is lost, so are all later ones: none of them may be received in its place.
                Err(_) if !has_failed => has_failed = true,
                Err(_) => return,
            }
        }
    }));
}

async fn sender(member: &Member, to: usize, step: i64, values: &[Sent], mut rng: Rng) {
    let key = member.worker.key(&device(member.index), &device(to), &member.run.setup.edge()).unwrap();
    for sent in values {
        pause(member, &mut rng).await;
        let tensor = if sent.dead {
            Tensor::dead(DataType::U8, &[0]).unwrap()
        } else {
            member.tensor(sent.transfer, sent.length, false).await
        };
        send(member, to, &member.worker.shared_step(step), &key, tensor);
    }
}

/// Sends a value, unless a broken connection has ended the step between the two workers. Like every failure, that needs
/// a fault that explains it: one since the step began, because the step stays ended.
pub(super) fn send(member: &Member, to: usize, step: &Step, key: &Key, tensor: Tensor) {
    match step.send(key, tensor) {
        Ok(()) => {}
        Err(error @ WorkerError::Aborted { .. }) => {
            let what = format!("send of step {} to worker {to}", step.id());
            let began = member.run.truth().round_began;
            let entry = member.node.begin(Some(&address(to)), what).part_of(began);
            entry.end_because(&OperationResult::PeerLost, &error);
        }
        Err(error) => panic!("{error}"),
    }
}

/// Values whose receiver cancels most receives: each arrives once, whole and in order, as long as nothing fails.
fn impatient_stream(
    run: &Run,
    member: &Member,
    peer: &Member,
    step: i64,
    rng: &mut Rng,
    jobs: &mut Vec<Job>,
) {
    let lengths: Vec<usize> = (0..rng.within(2..8)).map(|_| 8 + any_length(&run.setup, rng)).collect();
    let longest = lengths.iter().copied().max().unwrap_or_default();
    let values: Vec<u64> = lengths.iter().map(|length| run.new_transfer(*length)).collect();
    let (to, sent) = (member.index, values.clone());
    jobs.push(spawn(peer, rng, move |member, mut rng| async move {
        let key = member.worker.key(&device(member.index), &device(to), &member.run.setup.edge()).unwrap();
        for (transfer, length) in sent.into_iter().zip(lengths) {
            pause(&member, &mut rng).await;
            let tensor = member.tensor(transfer, length, true).await;
            send(&member, to, &member.worker.shared_step(step), &key, tensor);
        }
    }));
    let (from, incarnation) = (peer.index, peer.worker.incarnation());
    jobs.push(spawn(member, rng, move |member, mut rng| async move {
        let key = member.worker.key(&device(from), &device(member.index), &member.run.setup.edge()).unwrap();
        let key = key.with_incarnation(incarnation);
        let target = Target { incarnation: Some(incarnation), ..Target::any_life(from) };
        let mut left = values.into_iter();
        let Some(mut next) = left.next() else { return };
        let mut was_cancelled = false;
        for attempt in 0.. {
            let step = member.worker.shared_step(step);
            let what = format!("attempt {attempt} of step {} from worker {from}", step.id());
            let polls = rng.below(12);
            let receive = receive(&member, &step, &key, longest, &mut rng);
            let received = if attempt % 8 == 7 {
                member.operation(target, what, receive).await.map(Some)
            } else {
                member.impatient(target, what, polls, receive).await
            };
            match received {
                Ok(Some(tensor)) => {
                    member.check_numbered(&tensor, &[next], 0);
                    member.run.count(if was_cancelled { Kind::Cancelled } else { Kind::Sent });
                    was_cancelled = false;
                    let Some(following) = left.next() else { return };
                    next = following;
                }
                Ok(None) => was_cancelled = true,
                // Values in flight are lost, and the step with them.
                Err(_) => return,
            }
        }
    }));
}
