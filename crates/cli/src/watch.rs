//! The files that are served, and their changes, which become versions.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use indicatif::{BinaryBytes, ProgressBar};
use serde::{Serialize, Serializer};
use tensorwire::{
    Worker,
    fabric::{Runtime, TokioRuntime},
    memory::Buf,
};
use tensorwire_protocol::text::escaped;

use crate::{
    console::Console,
    failure::Failure,
    layout::{SET, is_text},
    loading::{Loaded, Loading, State},
    separate_thread::in_thread,
    source::{Look, Opened, Source},
};

/// Pause between two looks at the files.
const LOOK_PAUSE: Duration = Duration::from_millis(500);

/// Files whose tensors are published, and committed as versions of the set [`SET`].
#[derive(Debug)]
pub(crate) struct Served {
    worker: Worker,
    runtime: TokioRuntime,
    source: Source,
    state: Arc<State>,
}

/// What a commit has changed.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename = "version")]
pub(crate) struct Change {
    #[serde(rename = "files_version")]
    version: u64,
    tensors: usize,
    changed: usize,
    removed: usize,
    bytes: u64,
    #[serde(rename = "seconds", serialize_with = "seconds")]
    elapsed: Duration,
}

/// Writes a duration in seconds.
pub(crate) fn seconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64())
}

/// Why changed files are not served.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename = "refused")]
struct Refused<'a> {
    #[serde(rename = "files_version")]
    version: u64,
    reason: &'a str,
}

impl Change {
    /// The line that tells the user.
    pub(crate) fn line(&self) -> String {
        let Self { version, tensors, changed, removed, bytes, elapsed } = self;
        let removed = if *removed > 0 { format!(", {removed} removed") } else { String::new() };
        let (bytes, seconds) = (BinaryBytes(*bytes), elapsed.as_secs_f64());
        format!(
            "version {version}: {changed} of {tensors} tensors changed{removed}, {bytes} in {seconds:.3} s"
        )
    }
}

impl Served {
    /// Publishes the tensors of the files in the state of `look`. A set that cannot hold them is an error only if `is_watched`.
    pub(crate) async fn begin(
        (worker, runtime): (&Worker, TokioRuntime),
        (source, look): (Source, Look),
        (opened, mapped): (Opened, Vec<Option<Buf>>),
        (progress, is_watched): (ProgressBar, bool),
    ) -> Result<(Self, Change), Failure> {
        let started = runtime.now();
        let pool = worker.pool().clone();
        let loading = Loading { pool, opened, look: look.clone(), mapped, before: None, progress };
        let loaded = in_thread(move || loading.run()).await?;
        if source.look()? != look {
            return Err(Failure::ChangedWhileRead { path: source.path().to_owned() });
        }
        let state = State { look: look.clone(), version: 0, tensors: Default::default() };
        let mut served = Self { worker: worker.clone(), runtime, source, state: Arc::new(state) };
        let change = served.put(look, loaded, (started, is_watched)).await?;
        Ok((served, change))
    }

    /// Commits a version, publishes what has changed, and withdraws what is gone. Versions are the times of the last change, so that
    /// they grow when the server is started again, unless the files are older then.
    async fn put(
        &mut self,
        look: Look,
        loaded: Loaded,
        (started, is_watched): (Duration, bool),
    ) -> Result<Change, Failure> {
        let version = look.modified_ms().max(self.state.version + 1);
        let all = || loaded.tensors.iter().chain(&loaded.texts);
        let tensors = all().map(|loaded| (loaded.name.clone(), loaded.tensor.clone()));
        match self.worker.set(SET).commit(version, tensors.clone()).await {
            Err(error) if !is_watched => tracing::warn!(%error, "the files cannot be followed"),
            committed => committed?,
        }
        // The texts last: a client that finds them finds all tensors.
        for loaded in all().filter(|loaded| loaded.is_new) {
            self.worker.publish(&loaded.name, loaded.tensor.clone())?;
        }
        let names: BTreeSet<&str> = all().map(|loaded| loaded.name.as_str()).collect();
        let removed = self.state.tensors.keys().filter(|name| !names.contains(name.as_str()));
        let removed = removed.filter(|name| self.worker.withdraw(name) && !is_text(name)).count();
        let changed = || loaded.tensors.iter().filter(|loaded| loaded.is_new);
        let change = Change {
            version,
            tensors: loaded.tensors.len(),
            changed: changed().count(),
            removed,
            bytes: changed().map(|loaded| loaded.tensor.bytes().len() as u64).sum(),
            elapsed: self.runtime.now().saturating_sub(started),
        };
        self.state = Arc::new(State { look, version, tensors: tensors.collect() });
        Ok(change)
    }

    /// Looks at the files until the program ends, and commits each state that is complete.
    pub(crate) async fn watch(mut self, console: Console) {
        let mut changes = Changes::default();
        loop {
            self.runtime.sleep(LOOK_PAUSE).await;
            let line = match self.attempt(&mut changes).await {
                Ok(None) => continue,
                Ok(Some(change)) => {
                    console.event(&change);
                    change.line()
                }
                Err(failure) => {
                    let why = failure.to_string();
                    if changes.reported.as_ref() == Some(&why) {
                        continue;
                    }
                    let version = self.state.version;
                    console.event(&Refused { version, reason: &why });
                    let line = format!("not served yet, version {version} stays: {}", escaped(&why));
                    changes.reported = Some(why);
                    line
                }
            };
            console.say(&format!("{line}\n"));
        }
    }

    /// Commits the present state if it is complete, and was the same at the look before.
    async fn attempt(&mut self, changes: &mut Changes) -> Result<Option<Change>, Failure> {
        let started = self.runtime.now();
        let look = self.look().await.inspect_err(|_| changes.seen = None)?;
        if look == self.state.look {
            *changes = Changes::default();
            return Ok(None);
        }
        if changes.seen.as_ref() != Some(&look) {
            changes.seen = Some(look);
            return Ok(None);
        }
        if changes.refused.as_ref() == Some(&look) {
            return Ok(None);
        }
        let loaded = self.load(look.clone()).await;
        let look_after = self.look().await.inspect_err(|_| changes.seen = None)?;
        if look_after != look {
            changes.seen = Some(look_after);
            return Ok(None);
        }
        let put = match loaded {
            Ok(loaded) => self.put(look.clone(), loaded, (started, true)).await,
            Err(failure) => Err(failure),
        };
        let change = put.inspect_err(|_| changes.refused = Some(look))?;
        *changes = Changes::default();
        Ok(Some(change))
    }

    async fn look(&self) -> Result<Look, Failure> {
        let source = self.source.clone();
        in_thread(move || Ok(source.look()?)).await
    }

    async fn load(&self, look: Look) -> Result<Loaded, Failure> {
        let (source, pool, before) = (self.source.clone(), self.worker.pool().clone(), self.state.clone());
        in_thread(move || {
            let opened = Opened::open(&source, &look, false)?;
            let mapped = vec![None; opened.files.len()];
            let progress = ProgressBar::hidden();
            Loading { pool, opened, look, mapped, before: Some(before), progress }.run()
        })
        .await
    }
}

/// States of the files that are not served.
#[derive(Debug, Default)]
struct Changes {
    /// The state at the last look.
    seen: Option<Look>,
    /// The state that cannot be served.
    refused: Option<Look>,
    /// The reason that was printed last.
    reported: Option<String>,
}
