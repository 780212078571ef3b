//! `tensorwire pull --follow`: a copy of the files that a server watches, kept current.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use indicatif::BinaryBytes;
use serde::Serialize;
use tensorwire::{
    WorkerError,
    fabric::Runtime,
    sets::{Policy, Snapshot, Staged},
};
use tensorwire_protocol::text::escaped;
use tokio::sync::oneshot;

use crate::{
    arguments::Pull,
    failure::Failure,
    layout::{Layout, SET, Texts, is_text},
    link::{connect, of_memory, runtime},
    loading::is_equal,
    output::{Target, Writing},
    separate_thread::in_thread,
    signals::{AtSignal, at_signal},
    watch::seconds,
};

/// A version whose files are written.
#[derive(Debug, Clone)]
struct Copy {
    layout: Arc<Layout>,
    snapshot: Snapshot,
}

/// Writes each version of the files to `path`, until SIGINT or SIGTERM.
pub(crate) async fn follow(arguments: &Pull, path: &Path) -> Result<(), Failure> {
    check_target(path)?;
    let (worker, server) = connect(arguments, arguments.memory()).await?;
    let (wake, mut woken) = oneshot::channel();
    at_signal(AtSignal::Wake(wake)).map_err(Failure::Runtime)?;
    let mut versions = server.set(SET).follow(Policy::Latest);
    let (mut copy, mut reported) = (None, None);
    let console = arguments.console;
    console.event(&Event::Following { version: VERSION, address: &arguments.address });
    console.say(&format!("following {}\n", escaped(&arguments.address)));
    loop {
        let next = tokio::select! {
            _ = &mut woken => break,
            next = versions.next() => next,
        };
        match next {
            None => break,
            Some(Ok(staged)) => {
                // To its end: a signal waits until the files are written.
                let (written, report) = write(path, copy, staged).await?;
                console.event(&Event::Version(&report));
                console.say(&report.line());
                (copy, reported) = (Some(written), None);
            }
            Some(Err(WorkerError::WentBack { held, offered, .. })) => {
                let is_accepted = arguments.accept_restart;
                console.event(&Event::Restarted { held, offered, is_accepted });
                console.say(&restarted(held, offered, is_accepted));
                if is_accepted {
                    versions.accept_restart();
                }
            }
            Some(Err(error)) => {
                let failure = of_memory(arguments, error);
                if !failure.is_passing() {
                    return Err(failure);
                }
                let text = failure.to_string();
                if reported.as_ref() != Some(&text) {
                    tracing::warn!(%failure, "asking again");
                }
                reported = Some(text);
            }
        }
    }
    worker.shutdown().await;
    Ok(())
}

/// Refuses a target that cannot be written again and again, before the server is contacted.
fn check_target(path: &Path) -> Result<(), Failure> {
    let is_stream = match fs::metadata(path) {
        Ok(metadata) => !metadata.is_file() && !metadata.is_dir(),
        Err(_) => path == Path::new("-"),
    };
    if is_stream {
        return Err(Failure::FollowIntoStream { path: path.to_owned() });
    }
    Target::open(path, Writing::default())?;
    Ok(())
}

/// Writes the files of a version that differ from those of `before`, and removes those that it does not have any more. Returns what it
/// did, as a line.
async fn write(path: &Path, before: Option<Copy>, staged: Staged) -> Result<(Copy, Report), Failure> {
    let (bytes, path) = (staged.bytes_moved(), path.to_owned());
    let changed: BTreeSet<String> = staged.changed().map(str::to_owned).collect();
    let snapshot = staged.apply();
    let runtime = runtime()?;
    let started = runtime.now();
    let work = in_thread(move || {
        let old = |name: &str| before.as_ref().and_then(|before| before.snapshot.get(name));
        // After a restart of the server all tensors are moved again.
        let is_changed = |name: &str| match (old(name), snapshot.get(name)) {
            (Some(old), Some(new)) => changed.contains(name) && !is_equal(old, new),
            _ => true,
        };
        let texts = snapshot.iter().filter(|(name, _)| is_text(name));
        let texts = texts.map(|(name, text)| (name.to_owned(), text.bytes().to_vec()));
        let layout = Texts::parse(texts)?.layout();
        if layout.files.is_empty() {
            return Err(Failure::NothingPublished);
        }
        let counted =
            write_files(&path, &snapshot, &layout, before.as_ref().map(|copy| &*copy.layout), is_changed)?;
        let copy = Copy { layout: Arc::new(layout), snapshot };
        Ok((counted, copy))
    });
    let (counted, copy) = work.await?;
    let report = Report {
        version: copy.snapshot.version(),
        tensors: copy.layout.pieces.len(),
        bytes_moved: bytes,
        counted,
        elapsed: runtime.now().saturating_sub(started),
    };
    Ok((copy, report))
}

/// Version of the lines of JSON: incremented when a field changes its meaning or is removed.
const VERSION: u32 = 1;

/// A line of `--json`.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Event<'a> {
    Following {
        version: u32,
        address: &'a str,
    },
    Version(&'a Report),
    /// The server has an older version than the files.
    Restarted {
        held: u64,
        offered: u64,
        #[serde(rename = "accepted")]
        is_accepted: bool,
    },
}

fn restarted(held: u64, offered: u64, is_accepted: bool) -> String {
    match is_accepted {
        true => format!("the server was restarted with version {offered}, below {held}: taking it\n"),
        false => format!(
            "the server was restarted with version {offered}: version {held} stays until there is a newer one; \
             --accept-restart takes it\n"
        ),
    }
}

/// What a version has changed.
#[derive(Debug, Serialize)]
struct Report {
    #[serde(rename = "files_version")]
    version: u64,
    tensors: usize,
    bytes_moved: u64,
    #[serde(flatten)]
    counted: Counted,
    #[serde(rename = "seconds", serialize_with = "seconds")]
    elapsed: Duration,
}

impl Report {
    /// The line that people see.
    fn line(&self) -> String {
        let Counted { changed, files, removed } = self.counted;
        let removed = if removed > 0 { format!(", {removed} removed") } else { String::new() };
        format!(
            "version {}: {changed} of {} tensors changed, {} moved, {files} files written{removed} in {:.3} s\n",
            self.version,
            self.tensors,
            BinaryBytes(self.bytes_moved),
            self.elapsed.as_secs_f64()
        )
    }
}

/// What was written.
#[derive(Debug, Serialize)]
struct Counted {
    /// Tensors that differ.
    changed: usize,
    #[serde(rename = "files_written")]
    files: usize,
    #[serde(rename = "files_removed")]
    removed: usize,
}

fn write_files(
    path: &Path,
    snapshot: &Snapshot,
    layout: &Layout,
    before: Option<&Layout>,
    is_changed: impl Fn(&str) -> bool,
) -> Result<Counted, Failure> {
    let mut is_written: Vec<bool> = layout.files.iter().map(|file| is_other(before, file)).collect();
    let mut changed = 0;
    for piece in layout.pieces.iter().filter(|piece| is_changed(&piece.name)) {
        changed += 1;
        is_written[piece.file] = true;
    }
    // A target is written whole.
    if is_written.contains(&true) {
        write_pieces(path, snapshot, layout, &is_written)?;
    }
    let removed = remove(path, layout, before)?;
    Ok(Counted { changed, files: is_written.into_iter().filter(|&is_written| is_written).count(), removed })
}

/// Writes the files for which `is_written` holds.
fn write_pieces(
    path: &Path,
    snapshot: &Snapshot,
    layout: &Layout,
    is_written: &[bool],
) -> Result<(), Failure> {
    let mut target = Target::open(path, Writing::default())?;
    target.begin(&layout.files, |file| is_written[file])?;
    for piece in layout.pieces.iter().filter(|piece| is_written[piece.file]) {
        let name = || piece.name.clone();
        let tensor = snapshot.get(&piece.name).ok_or_else(|| Failure::NoPiece { name: name() })?;
        let (bytes, expected) = (tensor.bytes(), piece.bytes);
        if bytes.len() as u64 != expected {
            return Err(Failure::Replaced { name: name(), found: bytes.len() as u64, expected });
        }
        target.write_at(piece.file, bytes, piece.place)?;
    }
    Ok(target.finish()?)
}

/// Whether the file has another beginning than the file of that name `before`.
fn is_other(before: Option<&Layout>, file: &crate::layout::LaidOutFile) -> bool {
    !before.is_some_and(|before| before.files.contains(file))
}

/// Removes the files that `before` has and `layout` does not.
fn remove(path: &Path, layout: &Layout, before: Option<&Layout>) -> Result<usize, Failure> {
    let names: BTreeSet<&str> = layout.files.iter().filter_map(|file| file.name.as_deref()).collect();
    let old = before.into_iter().flat_map(|before| &before.files);
    let gone: Vec<PathBuf> = old
        .filter_map(|file| file.name.as_deref())
        .filter(|name| !names.contains(name))
        .map(|name| path.join(name))
        .collect();
    for path in &gone {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Failure::Remove { path: path.clone(), source: error });
            }
            _ => {}
        }
    }
    Ok(gone.len())
}
