//! `tensorwire pull`: a server's tensors, verified and written to files.

use std::{path::Path, sync::Arc};

use futures::{StreamExt, stream};
use serde::Serialize;
use tensorwire_protocol::text::escaped;

use crate::{
    arguments::Pull,
    budget::Budget,
    console::{Console, document},
    failure::Failure,
    follow::follow,
    layout::Piece,
    link::{Link, in_flight},
    output::{Target, Writing},
    print, resume,
    round::{Moved, Round, RoundReport},
    sink::{Sink, TensorWork},
};

/// Fetches under way at once.
const FETCHES_MAX: usize = 32;

/// Fetches the tensors that `arguments` name, `--repeat` times.
pub(crate) async fn pull(arguments: &Pull) -> Result<(), Failure> {
    if let (true, Some(path)) = (arguments.follow, &arguments.output) {
        return follow(arguments, path).await;
    }
    let output = open_output(arguments)?;
    let link = Link::open(arguments, None).await?;
    let (link, output, rounds) = pull_with(link, arguments, output).await?;
    link.close().await;
    let Some(output) = output else { return document_of(arguments, &rounds) };
    let (path, is_stream) = (output.path().to_owned(), output.is_stream());
    let written = {
        let _shown = arguments.console.phase("writing to the disk");
        output.finish()
    };
    written?;
    let wrote = format!("wrote {}\n", escaped(&path.display().to_string()));
    report(arguments.console, true, is_stream, &wrote)?;
    document_of(arguments, &rounds)
}

/// Version of the JSON: incremented when a field changes its meaning or is removed.
const VERSION: u32 = 1;

/// The object that `--json` prints.
#[derive(Debug, Serialize)]
struct PullJson<'a> {
    version: u32,
    server: &'a str,
    output: Option<&'a Path>,
    rounds: &'a [RoundReport],
}

/// Prints the object of `--json`, if that is given.
fn document_of(arguments: &Pull, rounds: &[RoundReport]) -> Result<(), Failure> {
    if !arguments.console.json {
        return Ok(());
    }
    let (server, output) = (arguments.address.as_str(), arguments.output.as_deref());
    print(&document(&PullJson { version: VERSION, server, output, rounds })?)
}

/// Opens the output before the server is contacted, so that an unusable output fails at once.
fn open_output(arguments: &Pull) -> Result<Option<Target>, Failure> {
    let Some(path) = &arguments.output else { return Ok(None) };
    let _shown = arguments.console.phase("opening the output");
    let writing = Writing { no_clobber: arguments.no_clobber, resume: arguments.resume };
    let output = Target::open(path, writing)?;
    if output.is_stream() && arguments.repeat.get() > 1 {
        return Err(Failure::RoundsIntoStream { path: path.clone() });
    }
    if output.is_stream() && arguments.console.json {
        return Err(Failure::JsonIntoStream { path: path.clone() });
    }
    Ok(Some(output))
}

/// Runs all rounds. Returns the file, complete except for its name.
async fn pull_with(
    mut link: Link,
    arguments: &Pull,
    mut output: Option<Target>,
) -> Result<(Link, Option<Target>, Vec<RoundReport>), Failure> {
    let (plan, console) = (link.plan.clone(), arguments.console);
    let mut reports = Vec::new();
    let is_stream = output.as_ref().is_some_and(Target::is_stream);
    if let Some(output) = &mut output {
        let _shown = arguments.console.phase("taking room on the disk");
        if let Err(full) = output.begin(&plan.layout.files, |_| true) {
            link.close().await;
            return Err(full.into());
        }
    }
    let wanted: Arc<[usize]>;
    (output, wanted) = {
        let _shown = arguments.resume.then(|| console.phase("comparing with what is there"));
        let (output, wanted) = resume::wanted(&plan, output).await?;
        (output, wanted.into())
    };
    let moved = Moved::of(&plan, &wanted);
    let rounds = arguments.repeat.get();
    for number in 1..=rounds {
        let round = Round::begin((rounds > 1).then_some(number), link.info());
        let what = if arguments.verify { "pulling and verifying" } else { "pulling" };
        let progress = console.byte_bar(what, moved.bytes());
        let (plan, wanted) = (plan.clone(), wanted.clone());
        let begun = TensorWork { plan, verify: arguments.verify, output, wanted, done: 0, progress };
        let task;
        (link, task) = fetch_all(link, arguments, begun).await?;
        task.progress.finish_and_clear();
        let memory = arguments.stats.then(|| link.memory_bytes());
        let ended = round.end(link.info().as_ref(), &moved, task.progress.elapsed(), memory);
        report(console, task.output.is_some(), is_stream, &ended.to_string())?;
        // People have read them.
        reports.extend(console.json.then_some(ended));
        output = task.output;
    }
    Ok((checked(link, arguments).await?, output, reports))
}

/// Checks that what was fetched was published at one moment.
async fn checked(mut link: Link, arguments: &Pull) -> Result<Link, Failure> {
    loop {
        match link.check_current(arguments).await {
            Ok(()) => return Ok(link),
            Err(lost) if arguments.retry.is_some() && lost.is_passing() => {
                link = link.again(arguments, lost).await?;
            }
            Err(failure) => {
                link.close().await;
                return Err(failure);
            }
        }
    }
}

/// Runs one round. After the loss of the server it continues if `arguments` ask for that.
async fn fetch_all(
    mut link: Link,
    arguments: &Pull,
    mut task: TensorWork,
) -> Result<(Link, TensorWork), Failure> {
    let mut done_before = None;
    loop {
        let lost;
        (task, lost) = match fetch_until_lost(&link, arguments, task).await {
            Ok(fetched) => fetched,
            Err(failure) => {
                link.close().await;
                return Err(failure);
            }
        };
        let Some(lost) = lost else { return Ok((link, task)) };
        let done_now = Some(task.done);
        if is_stuck(&lost, done_before, done_now) {
            link.close().await;
            return Err(lost);
        }
        done_before = done_now;
        link = link.again(arguments, lost).await?;
    }
}

/// Whether to give up: a fetch timed out again, and no tensor was completed since the last loss.
fn is_stuck(lost: &Failure, done_before: Option<usize>, done_now: Option<usize>) -> bool {
    lost.is_timeout() && done_before == done_now
}

/// Fetches until all is done or something fails. A loss of the server is returned separately, because a pull with `--retry`
/// survives it. Any other failure, of a fetch or of the writing thread, ends the pull.
async fn fetch_until_lost(
    link: &Link,
    arguments: &Pull,
    task: TensorWork,
) -> Result<(TensorWork, Option<Failure>), Failure> {
    let (plan, progress) = (task.plan.clone(), task.progress.clone());
    let (budget, wanted) = (Budget::of(in_flight(arguments)), task.wanted.clone());
    let rest = wanted.iter().skip(task.done).filter_map(|&at| plan.layout.pieces.get(at));
    let sink = Sink::start(task);
    let fetch = async |piece: &Piece| {
        let room = budget.take(piece.bytes).await;
        link.fetch(arguments, piece).await.map(|tensor| (tensor, room))
    };
    // In the order of the file: a stream needs this order, and it lets a pull continue from any point.
    let mut fetched = stream::iter(rest.map(fetch)).buffered(FETCHES_MAX);
    let mut lost = None;
    while let Some(next) = fetched.next().await {
        match next {
            Ok((tensor, room)) => {
                if let Some(transport) = link.info().and_then(|info| info.transport) {
                    progress.set_message(format!("over {transport}"));
                }
                if !sink.put(tensor, room).await {
                    break;
                }
            }
            Err(failure) if arguments.retry.is_some() && failure.is_passing() => {
                lost = Some(failure);
                break;
            }
            Err(failure) => {
                sink.stop().await;
                return Err(failure);
            }
        }
    }
    drop(fetched);
    Ok((sink.finish().await?, lost))
}

/// Prints a message for the user; on standard error if the output may be standard output. If there is an output, the
/// message is not the result, and is dropped if it cannot be written.
fn report(console: Console, has_output: bool, is_stream: bool, text: &str) -> Result<(), Failure> {
    if console.quiet || console.json || is_stream {
        console.say_aside(text);
        return Ok(());
    }
    match print(text) {
        Err(failure) if has_output => tracing::warn!(%failure, "the file is not affected"),
        printed => printed?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tensorwire::WorkerError;

    use super::is_stuck;
    use crate::failure::Failure;

    #[test]
    fn a_server_that_never_answers_in_time_is_not_tried_for_ever() {
        let what = "a fetch".to_owned();
        let late = Failure::from(WorkerError::DeadlineExceeded {
            what,
            limit: Duration::from_secs(1),
            hint: "does it run?",
        });
        assert!(late.is_passing() && is_stuck(&late, Some(3), Some(3)));
        // The first loss; a loss after progress; and a loss of the server itself.
        assert!(!is_stuck(&late, None, Some(0)) && !is_stuck(&late, Some(3), Some(4)));
        let restarted = Failure::Restarted { address: "127.0.0.1:1".to_owned() };
        assert!(!is_stuck(&restarted, Some(3), Some(3)));
    }
}
