//! One measurement: a writer and a reader, and what both of them say.

use std::{
    process::Command,
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use tensorwire_benches::{
    Failure,
    frames::{Part, now},
    process::Process,
};

use crate::{Arguments, PART, Row};

/// The writer learns of the reader in this time.
const SETTLING: Duration = Duration::from_millis(300);

/// How long a writer writes before it is killed.
const BEFORE_KILL: Duration = Duration::from_millis(700);

/// How long a reader is watched after that.
const AFTER_KILL: Duration = Duration::from_secs(3);

/// A reader that does not answer within this time hangs.
const ANSWER: Duration = Duration::from_secs(10);

/// The frames of one stream.
#[derive(Debug)]
pub(crate) struct Flow {
    /// Frames per second.
    pub(crate) written: f64,
    /// Frames per second.
    pub(crate) read: f64,
    /// Frames that came.
    pub(crate) came: usize,
    /// Frames missing between the first and the last one that came.
    pub(crate) missing: u64,
    /// The missing frames that the system counted for the reader.
    pub(crate) counted: u64,
    /// For each frame that came, the number of newer ones at that time.
    pub(crate) behind: Vec<u64>,
    pub(crate) torn: u64,
}

/// What a reader saw when its writer was killed.
#[derive(Debug)]
pub(crate) struct Loss {
    /// Each sign, with the milliseconds after the kill.
    pub(crate) signs: Vec<(String, f64)>,
    /// Milliseconds from the kill to the last frame.
    pub(crate) last_frame: f64,
    pub(crate) hangs: bool,
    pub(crate) torn: u64,
}

/// Measures the row for some seconds.
pub(crate) fn flow(
    arguments: &Arguments,
    row: Row,
    pace: Duration,
    reads_for: Duration,
) -> Result<Flow, Failure> {
    let (mut writer, mut reader) = start(arguments, row, pace, reads_for)?;
    thread::sleep(Duration::from_secs(arguments.seconds));
    writer.tell("stop")?;
    let wrote = writer.hear()?;
    reader.tell("stop")?;
    let times = wrote.split(' ').skip(1).map(str::parse).collect::<Result<Vec<u64>, _>>()?;
    let report = reader.hear()?;
    let Some(read) = Report::parse(&report)? else { return Err(format!("unexpected: {report}").into()) };
    let newest = |at: u64| times.partition_point(|&time| time <= at) as u64;
    let ends = read.seen.first().zip(read.seen.last());
    let passed = ends.map_or(0, |(first, last)| last.number - first.number + 1);
    Ok(Flow {
        written: rate(&times),
        read: rate(&read.seen.iter().map(|seen| seen.at).collect::<Vec<_>>()),
        came: read.seen.len(),
        missing: passed - read.seen.len() as u64,
        counted: read.seen.iter().map(|seen| seen.left_out).sum(),
        behind: read.seen.iter().map(|seen| newest(seen.at).saturating_sub(seen.number)).collect(),
        torn: read.torn,
    })
}

/// Kills the writer of a fast reader.
pub(crate) fn loss(arguments: &Arguments, row: Row, number: u32) -> Result<Loss, Failure> {
    let (writer, mut reader) = start(arguments, row, Duration::ZERO, Duration::ZERO)?;
    // Other moments of a frame each time.
    thread::sleep(BEFORE_KILL + Duration::from_micros(700) * number);
    let killed = now();
    writer.signal(Signal::KILL)?;
    drop(writer);
    let after = |at: u64| (at as f64 - killed as f64) / 1e3;
    let mut signs = Vec::new();
    let watched = Instant::now();
    while let Some(left) = AFTER_KILL.checked_sub(watched.elapsed()) {
        if let Some(line) = reader.hear_within(left)? {
            signs.push(parse_sign(&line)?);
        }
    }
    reader.tell("stop")?;
    let read = loop {
        let Some(line) = reader.hear_within(ANSWER)? else { break None };
        if let Some(read) = Report::parse(&line)? {
            break Some(read);
        }
    };
    let last = read.as_ref().and_then(|read| read.seen.last());
    Ok(Loss {
        signs: signs.into_iter().map(|(words, at)| (words, after(at))).collect(),
        last_frame: last.map_or(f64::NAN, |seen| after(seen.at)),
        hangs: read.is_none(),
        torn: read.map_or(0, |read| read.torn),
    })
}

/// Starts both processes, and the stream.
fn start(
    arguments: &Arguments,
    row: Row,
    pace: Duration,
    reads_for: Duration,
) -> Result<(Process, Process), Failure> {
    let mut part = Part {
        writes: true,
        system: row.system.to_owned(),
        way: row.way.to_owned(),
        policy: row.policy,
        ahead: row.ahead,
        bytes: arguments.mebibytes << 20,
        pause: pace,
        address: "-".to_owned(),
    };
    let mut writer = child(arguments, &part)?;
    part.address = ready(&writer)?;
    (part.writes, part.pause) = (false, reads_for);
    let reader = child(arguments, &part)?;
    ready(&reader)?;
    thread::sleep(SETTLING);
    writer.tell("begin")?;
    Ok((writer, reader))
}

fn child(arguments: &Arguments, part: &Part) -> Result<Process, Failure> {
    let role = part.to_string();
    match &arguments.peers {
        Some(peers) if part.system != "tensorwire" => {
            let mut command = Command::new(peers);
            command.arg("frames").args(role.split(' '));
            Process::spawn(command, &role)
        }
        _ => Process::start(PART, &role),
    }
}

fn ready(process: &Process) -> Result<String, Failure> {
    let line = process.hear()?;
    let address = line.strip_prefix("ready ").ok_or_else(|| format!("not ready: {line}"))?;
    Ok(address.to_owned())
}

/// A frame that a reader has seen.
struct Seen {
    number: u64,
    at: u64,
    left_out: u64,
}

/// The last line of a reader.
struct Report {
    torn: u64,
    seen: Vec<Seen>,
}

impl Report {
    /// `None` if the line is another one.
    fn parse(line: &str) -> Result<Option<Self>, Failure> {
        let mut words = line.split(' ');
        let (Some("read"), Some(torn)) = (words.next(), words.next()) else { return Ok(None) };
        let frame = |word: &str| -> Result<Seen, Failure> {
            let numbers = word.split(':').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
            let &[number, at, left_out] = numbers.as_slice() else {
                return Err(format!("no frame: {word}").into());
            };
            Ok(Seen { number, at, left_out })
        };
        Ok(Some(Self { torn: torn.parse()?, seen: words.map(frame).collect::<Result<_, _>>()? }))
    }
}

fn parse_sign(line: &str) -> Result<(String, u64), Failure> {
    let mut words = line.splitn(3, ' ');
    match (words.next(), words.next(), words.next()) {
        (Some("sign"), Some(at), Some(sign)) => Ok((sign.to_owned(), at.parse()?)),
        _ => Err(format!("unexpected: {line}").into()),
    }
}

/// Frames per second. The first quarter makes memory resident.
fn rate(times: &[u64]) -> f64 {
    let times = &times[times.len() / 4..];
    match times {
        [first, .., last] if last > first => (times.len() - 1) as f64 * 1e6 / (last - first) as f64,
        _ => 0.0,
    }
}
