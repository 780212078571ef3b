//! Changes the sources in many small ways, one at a time, and checks whether a test notices.
//!
//! All mutants are built at once, into a copy of the repository, and switched on by the environment. A test is run for the
//! mutants that it reaches. A mutant that no test notices is a test to write, code to delete, or an entry of
//! `contrib/mutants/harmless.txt` with its reason.

#![forbid(unsafe_code)]

mod edit;
mod error;
mod mutant;
mod plan;
mod report;
mod sites;
mod suite;
mod text;
mod tree;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use clap::Parser;
use error::Error;
use mutant::Mutant;
use report::Fate;
use suite::{Baseline, Ended, Test};
use tree::Tree;

/// Changes the sources in many small ways, one at a time, and checks whether a test notices.
///
/// Prints each mutant that no test notices, except those of contrib/mutants/harmless.txt, and fails if there is one. What
/// became of each is in results.tsv.
#[derive(Debug, Parser)]
#[command(name = "scripts/mutants")]
struct Arguments {
    /// Only these files of contrib/mutants/plan.txt, from the repository's root.
    files: Vec<String>,
    /// Tests at a time.
    #[arg(long, default_value_t = thread::available_parallelism().map_or(2, usize::from))]
    jobs: usize,
    /// Only the mutant of this number, which a run with the same files has printed.
    #[arg(long)]
    mutant: Option<usize>,
    /// Only mutants that survived the last run.
    #[arg(long, conflicts_with = "mutant")]
    survivors: bool,
    /// Directory of the copy, its build and results.tsv.
    #[arg(long, default_value = "target/mutants")]
    work: PathBuf,
    /// Builds and prints the mutants, and runs no test.
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Error> {
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).map_or(PathBuf::new(), Path::to_path_buf);
    let groups = plan::read(&root, &arguments.files)?;
    let tree = Tree::copy_of(root, &arguments.work)?;
    let built = tree.build(&groups)?;
    println!("{} mutants; {} more do not compile", built.mutants.len(), built.left_out.len());
    if arguments.list {
        built.mutants.iter().for_each(|mutant| println!("{mutant}"));
        return Ok(());
    }
    let results = tree.work.join("results.tsv");
    let chosen: Vec<&Mutant> = match (arguments.mutant, arguments.survivors) {
        (Some(number), _) => built.mutants.iter().filter(|mutant| mutant.number == number).collect(),
        (None, true) => {
            let survivors = report::survivors(&results)?;
            built.mutants.iter().filter(|mutant| survivors.contains(&mutant.key())).collect()
        }
        (None, false) => built.mutants.iter().collect(),
    };
    let baseline = suite::baseline(&built, &tree.work, arguments.jobs)?;
    baseline.slow.iter().for_each(|test| println!("takes too long to be run for mutants: {test}"));
    baseline.failed.iter().for_each(|test| println!("fails without a mutant: {test}"));
    let done = AtomicUsize::new(0);
    let fates = suite::each(&chosen, arguments.jobs, |mutant| {
        let targets =
            groups.iter().find(|group| group.files.contains(&mutant.file)).map(|group| &group.targets);
        let fate = fate_of(mutant, targets, &baseline)?;
        let done = 1 + done.fetch_add(1, Ordering::Relaxed);
        println!("{done}/{} {mutant}: {fate}", chosen.len());
        Ok((*mutant, fate))
    });
    let fates = fates.into_iter().collect::<Result<Vec<_>, _>>()?;
    if arguments.mutant.is_none() {
        report::write(&results, &fates)?;
    }
    let files: BTreeSet<&str> = groups.iter().flat_map(|group| &group.files).map(String::as_str).collect();
    report::judge(&tree.root, &built.mutants, &fates, &files)?;
    if !baseline.failed.is_empty() {
        return Err(Error::Unclean(format!(
            "{} tests fail without a mutant: mend them first",
            baseline.failed.len()
        )));
    }
    Ok(())
}

/// Runs the tests that reach a mutant, until one notices.
fn fate_of(mutant: &Mutant, targets: Option<&Vec<String>>, baseline: &Baseline) -> Result<Fate, Error> {
    let reach = |test: &&Test| test.reaches.contains(&mutant.number);
    let mut passed = 0;
    for target in targets.into_iter().flatten() {
        let tests: Vec<_> =
            baseline.tests.iter().filter(reach).filter(|test| test.target == *target).collect();
        // The quickest test alone, because it stops most mutants. Then the other tests, in fewer and fewer processes.
        let mut rest = &tests[..];
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(1 + tests.len() - rest.len()));
            match suite::run_with(mutant.number, now)? {
                Ended::Passed => passed += now.len(),
                Ended::Failed(test) => return Ok(Fate::Killed(format!("{target} {test}"))),
                Ended::Hung(test) => return Ok(Fate::Hung(format!("{target} {test}"))),
            }
            rest = later;
        }
    }
    Ok(Fate::Survived(passed))
}
