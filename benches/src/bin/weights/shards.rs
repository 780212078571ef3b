//! Sharded sets from several processes to several others in another layout, in turns with whole tensors of as many bytes.

use std::{
    collections::BTreeMap,
    fmt,
    ops::Range,
    time::{Duration, Instant},
};

use futures::future::try_join_all;
use tensorwire::{
    DataType, FabricKind, Sharing, Tensor, Worker,
    sets::{Follow, Layout, PeerSet, Shard, ShardedSet, Snapshot},
};
use tensorwire_benches::process::Process;

use crate::{Arguments, Fabric, Failure, follower::lines, milliseconds};

/// Environment variable of a child: what it is, and how the tensors are divided.
pub(crate) const SHARDS: &str = "TENSORWIRE_BENCH_SHARDS";

/// How the tensors are divided among the publishers, and in the same way among the followers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Division {
    /// Whole tensors of as many bytes as a follower gets in the other ways, copied.
    Whole,
    /// As `Whole`, by views where that is possible.
    Views,
    Rows,
    /// Rows of each of three matrices that are one.
    Fused,
    /// Columns whose pieces have runs of this many bytes at least.
    Columns(u64),
}

impl Division {
    const ALL: [Self; 6] =
        [Self::Whole, Self::Views, Self::Rows, Self::Fused, Self::Columns(4096), Self::Columns(512)];

    /// The one with this number.
    fn numbered(number: &str) -> Result<Self, Failure> {
        Ok(*Self::ALL.get(number.parse::<usize>()?).ok_or("an unknown division")?)
    }

    /// Whether publishers have parts of tensors.
    fn is_sharded(self) -> bool {
        !matches!(self, Self::Whole | Self::Views)
    }
}

impl fmt::Display for Division {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("whole"),
            Self::Views => f.write_str("whole, views"),
            Self::Rows => f.write_str("rows"),
            Self::Fused => f.write_str("fused"),
            Self::Columns(bytes) => write!(f, "columns, runs of {bytes}"),
        }
    }
}

/// What all processes know.
#[derive(Debug, Clone, Copy)]
struct Plan {
    publishers: u64,
    followers: u64,
    tensors: u64,
    tensor_bytes: u64,
}

impl Plan {
    /// Rows and columns of a tensor, which publishers and followers divide without a remainder.
    fn shape(self, division: Division) -> [u64; 2] {
        let parts = self.publishers * self.followers;
        let columns = match division {
            Division::Columns(bytes) => parts * bytes / 2,
            _ => 1024,
        };
        let unit = 3 * parts;
        [(self.tensor_bytes / 2 / columns / unit).max(1) * unit, columns]
    }

    /// Bytes of a tensor, and of the tensors that a follower gets.
    fn bytes(self, division: Division) -> (u64, u64) {
        let tensor = 2 * self.shape(division).iter().product::<u64>();
        (tensor, self.tensors * tensor / self.followers)
    }

    /// The dimension and the ranges that the process `at` of `count` has.
    fn ranges(self, division: Division, at: u64, count: u64) -> (usize, Vec<Range<u64>>) {
        let [rows, columns] = self.shape(division);
        let part = |length: u64| at * length / count..(at + 1) * length / count;
        match division {
            Division::Columns(_) => (1, vec![part(columns)]),
            Division::Fused => {
                let third = rows / 3;
                let ranges = (0..3).map(|block| block * third).map(|first| {
                    let Range { start, end } = part(third);
                    first + start..first + end
                });
                (0, ranges.collect())
            }
            _ => (0, vec![part(rows)]),
        }
    }

    /// The elements of a tensor of two dimensions that are in `ranges` of a dimension.
    fn elements(
        self,
        division: Division,
        tensor: u64,
        (axis, ranges): &(usize, Vec<Range<u64>>),
    ) -> Vec<u16> {
        let [rows, columns] = self.shape(division);
        let all = |length| std::iter::once(0..length).collect::<Vec<_>>();
        let (rows, along) =
            if *axis == 0 { (ranges.clone(), all(columns)) } else { (all(rows), ranges.clone()) };
        let places = rows.into_iter().flatten().flat_map(|row| {
            along.iter().cloned().flatten().map(move |column| tensor << 32 | (row * columns + column))
        });
        places.map(|place| (place.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) as u16).collect()
    }
}

fn name(tensor: u64) -> String {
    format!("layer.{tensor}.weight")
}

/// Measures the divisions in turns.
pub(crate) fn measure(arguments: &Arguments) -> Result<(), Failure> {
    let (publishers, followers) = (arguments.publishers, arguments.followers);
    let (tensors, tensor_bytes) = (arguments.tensors, arguments.tensor_bytes());
    let kind = arguments.fabric.kind();
    let given = |at, role, more: &str| {
        format!("{kind} {publishers} {followers} {tensors} {tensor_bytes} {at} {role} {more}")
    };
    let mut sources = Vec::new();
    let mut addresses = String::new();
    for at in 0..publishers {
        let source = Process::start(SHARDS, &given(at, "publisher", ""))?;
        addresses += &format!("{} ", source.hear()?);
        sources.push(source);
    }
    let mut targets = Vec::new();
    for at in 0..followers {
        targets.push(Process::start(SHARDS, &given(at, "follower", &addresses))?);
    }
    println!(
        "# {publishers} to {followers} processes over {kind}, {tensors} tensors, {} MiB of 16-bit elements, {} rounds in turns",
        arguments.mebibytes, arguments.rounds
    );
    let mut rows = Division::ALL.map(|division| (division, Vec::new(), 0));
    for round in 0..=arguments.rounds {
        for (at, (_, times, bytes)) in rows.iter_mut().enumerate() {
            let (time, moved) = turn(&mut targets, &format!("fetch {at}"))?;
            // The first round makes memory resident, and compares the elements.
            if round > 0 {
                times.push(time);
                *bytes = moved;
            }
        }
    }
    let plan = Plan {
        publishers: publishers.into(),
        followers: followers.into(),
        tensors: tensors as u64,
        tensor_bytes: tensor_bytes as u64,
    };
    print(plan, rows);
    if arguments.fabric.kind() != FabricKind::SHM {
        measure_changes(plan, arguments.rounds, (&mut sources, &mut targets))?;
    }
    drop((targets, sources));
    Ok(())
}

/// Measures the time from a commit of which one element in 100 has changed until all followers have the version.
fn measure_changes(
    plan: Plan,
    rounds: u32,
    (sources, targets): (&mut [Process], &mut [Process]),
) -> Result<(), Failure> {
    println!("\n1 % changed, divided by\tbytes wanted by all\tbytes moved\tmilliseconds");
    for (at, division) in Division::ALL.into_iter().enumerate().filter(|(_, division)| division.is_sharded())
    {
        // The first version comes whole.
        turn(targets, &format!("next {at}"))?;
        let (mut times, mut bytes) = (Vec::new(), 0);
        for _ in 0..rounds {
            ordered(sources, &format!("change {at}"))?;
            let begun = Instant::now();
            tell(targets, &format!("next {at}"))?;
            ordered(sources, "commit")?;
            bytes = answered(targets)?;
            times.push(begun.elapsed());
        }
        let wanted = plan.followers * plan.bytes(division).1;
        println!("{division}\t{wanted}\t{bytes}\t{:.2}", milliseconds(&mut times));
    }
    Ok(())
}

fn tell(processes: &mut [Process], order: &str) -> Result<(), Failure> {
    processes.iter_mut().try_for_each(|process| process.tell(order))?;
    Ok(())
}

/// Tells all processes, and waits until all have answered.
fn ordered(processes: &mut [Process], order: &str) -> Result<(), Failure> {
    tell(processes, order)?;
    processes.iter_mut().try_for_each(|process| process.hear().map(drop))?;
    Ok(())
}

/// The sum of the bytes that all processes say.
fn answered(targets: &mut [Process]) -> Result<u64, Failure> {
    let mut bytes = 0;
    for target in targets {
        bytes += target.hear()?.parse::<u64>()?;
    }
    Ok(bytes)
}

/// The time until all followers have the tensors, and the bytes that all moved.
fn turn(targets: &mut [Process], order: &str) -> Result<(Duration, u64), Failure> {
    let begun = Instant::now();
    tell(targets, order)?;
    let bytes = answered(targets)?;
    Ok((begun.elapsed(), bytes))
}

fn print(plan: Plan, rows: [(Division, Vec<Duration>, u64); 6]) {
    println!("divided by\tbytes wanted by all\tbytes beyond these\tmilliseconds\tMiB/s\tof whole tensors");
    let mut whole = None;
    for (division, mut times, moved) in rows {
        let wanted = plan.followers * plan.bytes(division).1;
        let time = milliseconds(&mut times);
        let speed = wanted as f64 / f64::from(1 << 20) / time * 1e3;
        let of_whole = speed / *whole.get_or_insert(speed);
        println!(
            "{division}\t{wanted}\t{}\t{time:.2}\t{speed:.0}\t{of_whole:.2}",
            moved as i64 - wanted as i64
        );
    }
}

/// The child's main function. It ends when the parent closes its stdin.
pub(crate) async fn run(given: &str) -> Result<(), Failure> {
    let mut given = given.split_whitespace();
    let mut next = || given.next().ok_or("not as the parent starts a process");
    let kind = Fabric::kind_named(next()?)?;
    let [publishers, followers, tensors, tensor_bytes, at] =
        [next()?, next()?, next()?, next()?, next()?].map(str::parse);
    let plan = Plan {
        publishers: publishers?,
        followers: followers?,
        tensors: tensors?,
        tensor_bytes: tensor_bytes?,
    };
    if next()? == "publisher" {
        return publish(kind, plan, at?).await;
    }
    follow(kind, plan, at?, &given.collect::<Vec<_>>()).await
}

async fn publish(kind: FabricKind, plan: Plan, at: u64) -> Result<(), Failure> {
    let bytes = 8 * plan.tensors * plan.tensor_bytes;
    let worker = Worker::builder(&format!("publisher{at}")).fabrics([kind]).memory(|memory| {
        memory.source_bytes = bytes;
        memory.viewed_bytes_per_peer_max = Some(bytes);
    });
    let worker = worker.set_bytes(bytes).start().await?;
    for division in Division::ALL {
        worker.set(&division.to_string()).commit(1, shards(&worker, plan, (division, at), 1)?).await?;
    }
    println!("{}", worker.address());
    let mut orders = lines();
    let (mut versions, mut changed) = (BTreeMap::new(), None);
    while let Some(order) = orders.recv().await {
        if let Some(number) = order.strip_prefix("change ") {
            let division = Division::numbered(number)?;
            let version = versions.entry(number.to_owned()).or_insert(1);
            *version += 1;
            changed = Some((division, *version, shards(&worker, plan, (division, at), *version)?));
        } else if let Some((division, version, shards)) = changed.take() {
            worker.set(&division.to_string()).commit(version, shards).await?;
        }
        println!("done");
    }
    worker.shutdown().await;
    Ok(())
}

/// What the publisher `at` commits as `version`.
fn shards(
    worker: &Worker,
    plan: Plan,
    (division, at): (Division, u64),
    version: u64,
) -> Result<Vec<(String, Shard)>, Failure> {
    let part = plan.ranges(division, at, plan.publishers);
    let [rows, columns] = plan.shape(division);
    let made = |tensor| -> Result<_, Failure> {
        let elements = |part| {
            let mut elements = plan.elements(division, tensor, part);
            change(&mut elements, version);
            bytes_of(&elements)
        };
        if !division.is_sharded() {
            let part = plan.ranges(division, tensor % plan.followers, plan.followers);
            let shape = [rows / plan.followers, columns];
            let whole = Tensor::from_bytes(worker.pool(), DataType::Bf16, &shape, &elements(&part))?;
            return Ok((name(tensor), whole.into()));
        }
        let (axis, ranges) = &part;
        let mut shape = [rows, columns];
        shape[*axis] /= plan.publishers;
        let own = Tensor::from_bytes(worker.pool(), DataType::Bf16, &shape, &elements(&part))?;
        Ok((name(tensor), own.shard(*axis, [rows, columns][*axis], ranges)))
    };
    let is_own = |tensor: &u64| division.is_sharded() || tensor % plan.publishers == at;
    (0..plan.tensors).filter(is_own).map(made).collect()
}

/// Changes about one element in 200 of the first version, others for each version, so that two versions differ in one in 100.
fn change(elements: &mut [u16], version: u64) {
    for (at, element) in (0_u64..).zip(elements).filter(|_| version > 1) {
        let number = (at + (version << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        if number.is_multiple_of(200) {
            *element ^= 1;
        }
    }
}

fn bytes_of(elements: &[u16]) -> Vec<u8> {
    elements.iter().flat_map(|element| element.to_ne_bytes()).collect()
}

async fn follow(kind: FabricKind, plan: Plan, at: u64, addresses: &[&str]) -> Result<(), Failure> {
    let bytes = 4 * plan.tensors * plan.tensor_bytes;
    let worker = Worker::client().require(kind).memory(|memory| memory.receive_bytes = bytes).start().await?;
    let mut peers = Vec::new();
    for address in addresses {
        peers.push(worker.peer_at(address).await?);
    }
    let mut orders = lines();
    let (mut compared, mut streams) = (Vec::new(), BTreeMap::new());
    while let Some(order) = orders.recv().await {
        let (order, number) = order.split_once(' ').ok_or("an unknown order")?;
        let division = Division::numbered(number)?;
        let sharing = if division == Division::Whole { Sharing::Copy } else { Sharing::View };
        let sets = peers.iter().map(|peer| peer.set(&division.to_string()).sharing(sharing));
        let sets: Vec<_> = sets.collect();
        let moved = || worker.peers().iter().map(|peer| peer.fabric.bytes_received).sum::<u64>();
        let before = moved();
        let part = plan.ranges(division, at, plan.followers);
        let fetched = match order {
            "next" => vec![
                next(
                    streams.entry(number.to_owned()).or_insert_with(|| sharded(plan, &sets, &part).follow()),
                )
                .await?,
            ],
            _ if division.is_sharded() => vec![sharded(plan, &sets, &part).fetch().await?],
            _ => try_join_all(sets.iter().map(|set| set.fetch())).await?,
        };
        let moved = moved() - before;
        if order != "next" && !compared.contains(&division) {
            compared.push(division);
            compare(plan, (division, &part), &fetched)?;
        }
        println!("{moved}");
    }
    worker.shutdown().await;
    Ok(())
}

/// The set of which a follower has this part.
fn sharded(plan: Plan, sets: &[PeerSet], (axis, ranges): &(usize, Vec<Range<u64>>)) -> ShardedSet {
    let layout = (0..plan.tensors).map(name);
    let layout = layout.fold(Layout::new(), |layout, name| layout.part(&name, *axis, ranges));
    ShardedSet::new(sets.iter().cloned()).layout(layout)
}

async fn next(versions: &mut Follow) -> Result<Snapshot, Failure> {
    Ok(versions.next().await.ok_or("the stream is over")??.apply())
}

/// Checks that all elements have come.
fn compare(
    plan: Plan,
    (division, part): (Division, &(usize, Vec<Range<u64>>)),
    fetched: &[Snapshot],
) -> Result<(), Failure> {
    for tensor in 0..plan.tensors {
        let mut found = fetched.iter().filter_map(|snapshot| snapshot.get(&name(tensor)));
        let found = found.next().ok_or("a version without all tensors")?;
        let whole = plan.ranges(division, tensor % plan.followers, plan.followers);
        let expected = plan.elements(division, tensor, if division.is_sharded() { part } else { &whole });
        if found.bytes() != bytes_of(&expected) {
            return Err(format!("`{}` by {division} has other elements", name(tensor)).into());
        }
    }
    Ok(())
}
