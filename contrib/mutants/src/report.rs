//! The fates of the mutants, and the survivors that are known to be harmless.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    path::Path,
};

use crate::{
    error::{Error, at},
    mutant::Mutant,
};

/// The fate of a mutant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fate {
    /// A test failed.
    Killed(String),
    /// A test did not end.
    Hung(String),
    /// All tests that reach it passed. Their number.
    Survived(usize),
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Killed(test) => write!(f, "killed by {test}"),
            Self::Hung(test) => write!(f, "ends not in {test}"),
            Self::Survived(0) => f.write_str("is reached by no test"),
            Self::Survived(tests) => write!(f, "survives {tests} tests"),
        }
    }
}

/// Reads `harmless.txt`: keys of mutants, one per line, and below them in indented lines the reasons why they are
/// harmless.
///
/// # Errors
/// It cannot be read, or an entry has no reason.
pub(crate) fn harmless(root: &Path) -> Result<BTreeMap<String, String>, Error> {
    let path = root.join("contrib/mutants/harmless.txt");
    let text = fs::read_to_string(&path).map_err(at(&path))?;
    let mut entries = BTreeMap::<String, String>::new();
    let mut keys = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
        if line.starts_with(' ') {
            for key in &keys {
                *entries.entry(String::clone(key)).or_default() += line.trim();
            }
            continue;
        }
        // This key begins the next entry, because the last entry has its reason.
        if keys.last().is_some_and(|key| entries.contains_key(key)) {
            keys.clear();
        }
        keys.push(line.to_owned());
    }
    if let Some(key) = keys.iter().find(|key| !entries.contains_key(*key)) {
        return Err(Error::Unreasoned { list: path, key: key.clone() });
    }
    Ok(entries)
}

/// Prints the result, and returns whether every survivor is known to be harmless.
///
/// # Errors
/// A survivor is not on the list, or an entry of the list has no mutant.
pub(crate) fn judge(
    root: &Path,
    all: &[Mutant],
    fates: &[(&Mutant, Fate)],
    files: &BTreeSet<&str>,
) -> Result<(), Error> {
    let list = root.join("contrib/mutants/harmless.txt");
    let harmless = harmless(root)?;
    let keys: BTreeSet<_> = all.iter().map(Mutant::key).collect();
    let of_these = |key: &String| files.contains(key.split(' ').next().unwrap_or_default());
    if let Some(key) = harmless.keys().find(|key| of_these(key) && !keys.contains(*key)) {
        return Err(Error::Unknown { list, key: key.clone() });
    }
    let mut open = 0;
    let mut counts = BTreeMap::<&str, [usize; 4]>::new();
    for (mutant, fate) in fates {
        let known = harmless.contains_key(&mutant.key());
        let kind = match fate {
            Fate::Survived(_) if known => 2,
            Fate::Survived(_) => 3,
            Fate::Hung(_) => 1,
            Fate::Killed(_) => 0,
        };
        counts.entry(&mutant.file).or_default()[kind] += 1;
        if kind == 3 {
            open += 1;
            println!("{mutant}: {fate}");
        } else if known && kind < 2 {
            println!("{mutant}: {fate}, and is in harmless.txt");
        }
    }
    println!("killed  hangs  harmless  open");
    for (file, [killed, hung, known, open]) in &counts {
        println!("{killed:6} {hung:6} {known:9} {open:5}  {file}");
    }
    let sum = |kind: usize| counts.values().map(|count| count[kind]).sum::<usize>();
    println!("{:6} {:6} {:9} {:5}  {} mutants", sum(0), sum(1), sum(2), sum(3), fates.len());
    if open > 0 {
        return Err(Error::Unclean(format!(
            "{open} mutants survive: write the test that sees them, delete the code that nothing needs, or say in {} why \
             they are harmless",
            list.display()
        )));
    }
    Ok(())
}

/// Writes the fate of each mutant.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn write(path: &Path, fates: &[(&Mutant, Fate)]) -> Result<(), Error> {
    let lines: String =
        fates.iter().map(|(mutant, fate)| format!("{}\t{}\t{fate}\n", mutant.key(), mutant.line)).collect();
    fs::write(path, lines).map_err(at(path))
}

/// The keys of the survivors in the file `path`.
///
/// # Errors
/// There is no such file.
pub(crate) fn survivors(path: &Path) -> Result<BTreeSet<String>, Error> {
    let text = fs::read_to_string(path).map_err(at(path))?;
    let lines =
        text.lines().filter(|line| line.contains("\tsurvives ") || line.contains("\tis reached by no"));
    Ok(lines.filter_map(|line| line.split('\t').next()).map(str::to_owned).collect())
}
