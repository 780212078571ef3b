//! More fetches at once than a connection has room for: most are cancelled while they wait in line, and the last one
//! must succeed.

use tensorwire_rendezvous::Sharing;
use tensorwire_sim::Rng;

use super::{
    Kind,
    member::{FICKLE, Member, Target, name},
    traffic::{Job, spawn},
};

/// Fetches of each crowd.
const FETCHES: usize = 6;

/// Starts a crowd at one end of the connection of each two workers, which is idle otherwise.
pub(super) fn crowds(members: &[Member], rng: &mut Rng) -> Vec<Job> {
    let mut jobs = Vec::new();
    for (index, one) in members.iter().enumerate() {
        for other in &members[..index] {
            let (member, from) = if rng.chance(1, 2) { (one, other.index) } else { (other, one.index) };
            for number in 1..=FETCHES {
                let is_last = number == FETCHES;
                jobs.push(spawn(member, rng, move |member, mut rng| async move {
                    fetch(&member, from, is_last, &mut rng).await;
                }));
            }
        }
    }
    jobs
}

async fn fetch(member: &Member, from: usize, is_last: bool, rng: &mut Rng) {
    let peer = member.worker.peer(&name(from)).unwrap();
    let which = rng.below(FICKLE);
    let (oldest, published) = (member.newest(from, which), member.run.setup.published(which));
    let (target, what) = (Target::any_life(from), format!("fetch {which} of worker {from} in a crowd"));
    let fetch = peer.fetch(&published).sharing(Sharing::Copy).into_future();
    let fetched = if is_last {
        member.operation(target, what, fetch).await.ok()
    } else {
        member.impatient(target, what, rng.pick([1, 1, 2, 3]), fetch).await.ok().flatten()
    };
    if let Some(tensor) = fetched {
        let allowed = member.run.truth().published[from][which].clone();
        member.check_numbered(&tensor, &allowed, oldest);
        member.run.count(Kind::Published);
    }
}
