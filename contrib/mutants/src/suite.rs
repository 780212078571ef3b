//! Runs tests, each in a separate process: which mutants they reach, and whether they notice one.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::{
    error::{Error, at},
    tree::{Built, Program},
};

/// Tests that take longer are not run for mutants.
const TEST_MAX: Duration = Duration::from_secs(12);
/// A test hangs if it takes this many times its time without a mutant, plus the addition.
const PATIENCE: u32 = 5;
const PATIENCE_MORE: Duration = Duration::from_secs(10);
/// Limit of a test's address space, so that an endless mutant does not take the machine's memory.
const ADDRESS_SPACE_KIB: u64 = 16 << 20;
/// Maximum number of bytes that are read of a program's output.
const OUTPUT_MAX: usize = 1 << 20;

/// One test.
#[derive(Debug)]
pub(crate) struct Test {
    pub(crate) target: String,
    pub(crate) name: String,
    program: Program,
    takes: Duration,
    pub(crate) reaches: BTreeSet<usize>,
}

/// The result of tests of a program.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Passed,
    /// This test failed, as far as is known.
    Failed(String),
    Hung(String),
}

/// The results without mutants.
#[derive(Debug)]
pub(crate) struct Baseline {
    /// The tests, the quickest first.
    pub(crate) tests: Vec<Test>,
    /// Tests that failed without any mutant.
    pub(crate) failed: Vec<String>,
    /// Tests that take too long to be run for mutants.
    pub(crate) slow: Vec<String>,
}

/// Runs every test alone and records which mutants it reaches.
pub(crate) fn baseline(built: &Built, work: &Path, jobs: usize) -> Result<Baseline, Error> {
    let mut listed = Vec::new();
    for (target, program) in &built.programs {
        listed.extend(names(program)?.into_iter().map(|name| (target.clone(), name, program.clone())));
    }
    println!("{} tests in {} programs run without mutants", listed.len(), built.programs.len());
    let ran = each(&listed, jobs, |(target, name, program)| learn(target, name, program, work));
    let mut found = Baseline { tests: Vec::new(), failed: Vec::new(), slow: Vec::new() };
    for result in ran {
        match result? {
            (test, Ended::Passed) if test.takes > TEST_MAX => found.slow.push(test.full_name()),
            (test, Ended::Passed) => found.tests.push(test),
            (test, _) => found.failed.push(test.full_name()),
        }
    }
    found.tests.sort_by_key(|test| test.takes);
    Ok(found)
}

/// The results of `work` for each item, in the items' order. At most `jobs` run at a time.
pub(crate) fn each<T: Sync, R: Send>(items: &[T], jobs: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let run = || {
        let mut done = Vec::new();
        while let Some((index, item)) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            items.get(index).map(|item| (index, item))
        } {
            done.push((index, work(item)));
        }
        done
    };
    let mut done: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs).map(|_| scope.spawn(run)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect()
    });
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

fn names(program: &Program) -> Result<Vec<String>, Error> {
    let list = |ignored: &[&str]| {
        let listed = Command::new(&program.executable)
            .args(["--list", "--format", "terse"])
            .args(ignored)
            .current_dir(&program.directory)
            .output()
            .map_err(at(&program.executable))?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        let names = listed.lines().filter_map(|line| line.strip_suffix(": test"));
        Ok(names.map(str::to_owned).collect::<Vec<_>>())
    };
    let ignored = list(&["--ignored"])?;
    Ok(list(&[])?.into_iter().filter(|name| !ignored.contains(name)).collect())
}

/// Runs a test without mutants, or reads the note that an earlier run of the same program wrote.
fn learn(target: &str, name: &str, program: &Program, work: &Path) -> Result<(Test, Ended), Error> {
    let directory = work.join("reached").join(program.executable.file_name().unwrap_or_default());
    fs::create_dir_all(&directory).map_err(at(&directory))?;
    let notes = directory.join(name.replace("::", "--"));
    let took = PathBuf::from(format!("{}.ms", notes.display()));
    let mut test = Test {
        target: target.to_owned(),
        name: name.to_owned(),
        program: program.clone(),
        takes: Duration::ZERO,
        reaches: BTreeSet::new(),
    };
    let is_newer =
        took.metadata().and_then(|took| Ok(took.modified()? > program.executable.metadata()?.modified()?));
    let mut ended = Ended::Passed;
    if !is_newer.unwrap_or(false) {
        let _ = fs::remove_file(&notes);
        let begun = Instant::now();
        ended = run(&[&test], TEST_MAX * 5, ("TENSORWIRE_MUTANTS_REACHED", notes.as_os_str()))?;
        test.takes = begun.elapsed();
        if ended == Ended::Passed {
            fs::write(&took, test.takes.as_millis().to_string()).map_err(at(&took))?;
        }
    } else {
        let took = fs::read_to_string(&took).map_err(at(&took))?;
        test.takes = Duration::from_millis(took.trim().parse().unwrap_or_default());
    }
    let reached = fs::read_to_string(&notes).unwrap_or_default();
    test.reaches = reached.lines().filter_map(|line| line.parse().ok()).collect();
    Ok((test, ended))
}

impl Test {
    pub(crate) fn full_name(&self) -> String {
        format!("{} {}", self.target, self.name)
    }
}

/// Runs tests of one program in one process, one after another, with a mutant switched on.
pub(crate) fn run_with(mutant: usize, tests: &[&Test]) -> Result<Ended, Error> {
    let limit = tests.iter().map(|test| test.takes).sum::<Duration>() * PATIENCE + PATIENCE_MORE;
    run(tests, limit, ("TENSORWIRE_MUTANT", mutant.to_string().as_ref()))
}

fn run(tests: &[&Test], limit: Duration, variable: (&str, &OsStr)) -> Result<Ended, Error> {
    let Some(Test { program, .. }) = tests.first() else { return Ok(Ended::Passed) };
    let script = format!(
        "ulimit -c 0 -v {ADDRESS_SPACE_KIB}; timeout -s KILL \"$@\" | head -c {OUTPUT_MAX}; exit ${{PIPESTATUS[0]}}"
    );
    let begun = Instant::now();
    let ran = Command::new("bash")
        .args(["-c", &script, "bash", &limit.as_secs().to_string()])
        .arg(&program.executable)
        .args(["--test-threads", "1", "--exact"])
        .args(tests.iter().map(|test| &test.name))
        .current_dir(&program.directory)
        .env("CARGO_MANIFEST_DIR", &program.directory)
        .env(variable.0, variable.1)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .map_err(at("bash"))?;
    if ran.status.success() {
        return Ok(Ended::Passed);
    }
    // The test that began last hangs, or crashed the program.
    let output = String::from_utf8_lossy(&ran.stdout).into_owned();
    let results = output.lines().filter_map(|line| line.strip_prefix("test ")?.split_once(" ... "));
    let results: Vec<_> = results.collect();
    let failed = results.iter().find(|(_, result)| *result == "FAILED").or(results.last());
    let name = failed.map_or("?", |(name, _)| name).to_owned();
    Ok(if begun.elapsed() >= limit { Ended::Hung(name) } else { Ended::Failed(name) })
}
