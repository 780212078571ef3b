//! The copy of the repository that has the mutants, and its build.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;
use syn::Item;

use crate::{
    error::{Error, at},
    mutant::Mutant,
    plan::Group,
    sites::{ASKED, Sites},
    text,
};

const SWITCH: &str = include_str!("switch.rs");
/// Lints that mutants may violate. All other lints that are denied by default are errors.
const LINTS: &str =
    "[workspace.lints.rust]\narithmetic_overflow = \"allow\"\nunconditional_panic = \"allow\"\n";

/// The repository, and the directory of the copy and its results.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) root: PathBuf,
    pub(crate) work: PathBuf,
}

/// A built copy.
#[derive(Debug)]
pub(crate) struct Built {
    pub(crate) mutants: Vec<Mutant>,
    /// Mutants that do not compile, by their keys.
    pub(crate) left_out: BTreeSet<String>,
    /// Test programs by target, as in the plan.
    pub(crate) programs: BTreeMap<String, Program>,
}

/// A test program, with the directory that it runs in.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub(crate) executable: PathBuf,
    pub(crate) directory: PathBuf,
}

impl Tree {
    pub(crate) fn copy_of(root: PathBuf, work: &Path) -> Result<Self, Error> {
        let work = root.join(work);
        let tree = Self { root, work };
        fs::create_dir_all(tree.tree()).map_err(at(tree.tree()))?;
        Ok(tree)
    }

    fn tree(&self) -> PathBuf {
        self.work.join("tree")
    }

    /// Makes the mutants of `groups` and builds the tests, without those mutants that do not compile.
    pub(crate) fn build(&self, groups: &[Group]) -> Result<Built, Error> {
        let list = self.work.join("does-not-compile.txt");
        let mut left_out: BTreeSet<_> =
            fs::read_to_string(&list).unwrap_or_default().lines().map(str::to_owned).collect();
        loop {
            let mutants = self.write(groups, &left_out)?;
            match self.compile(groups)? {
                Ok(programs) => return Ok(Built { mutants, left_out, programs }),
                Err(errors) => {
                    let wrong = self.to_blame(&errors, &mutants);
                    if wrong.is_empty() {
                        let rendered = errors.iter().filter_map(|error| error["rendered"].as_str());
                        return Err(Error::Build(rendered.collect()));
                    }
                    println!("{} mutants do not compile and are left out", wrong.len());
                    left_out.extend(wrong);
                    let lines: String = left_out.iter().map(|key| format!("{key}\n")).collect();
                    fs::write(&list, lines).map_err(at(&list))?;
                }
            }
        }
    }

    /// Writes the parts of the copy that are missing or changed.
    fn write(&self, groups: &[Group], left_out: &BTreeSet<String>) -> Result<Vec<Mutant>, Error> {
        let listed = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(&self.root)
            .output()
            .map_err(at("git"))?;
        let constants = self.constants()?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        let (mut mutants, mut next_number) = (Vec::new(), 1);
        let mut written = BTreeSet::new();
        for name in listed.split('\0').filter(|name| !name.is_empty()) {
            let from = self.root.join(name);
            if !from.is_file() {
                continue;
            }
            let to = self.tree().join(name);
            let mut content = fs::read(&from).map_err(at(&from))?;
            if groups.iter().any(|group| group.files.iter().any(|file| file == name)) {
                let source = String::from_utf8_lossy(&content).into_owned();
                let sites = Sites::of(name, &source, &constants, left_out, next_number)
                    .map_err(|source| Error::Syntax { path: name.to_owned(), source })?;
                content = sites.edits.apply(&source).into_bytes();
                next_number = sites.next_number;
                mutants.extend(sites.mutants);
            }
            if name == "crates/testpoints/src/lib.rs" {
                content.extend_from_slice(SWITCH.as_bytes());
            }
            if name == "Cargo.toml" {
                content =
                    String::from_utf8_lossy(&content).replace("[workspace.lints.rust]\n", LINTS).into_bytes();
            }
            write_changed(&to, &content)?;
            if let Ok(metadata) = from.metadata() {
                fs::set_permissions(&to, metadata.permissions()).map_err(at(&to))?;
            }
            written.insert(to);
        }
        remove_others(&self.tree().join("crates"), &written)?;
        Ok(mutants)
    }

    /// Names of integer constants in all crates.
    fn constants(&self) -> Result<BTreeSet<String>, Error> {
        let mut names = BTreeSet::new();
        let mut directories = vec![self.root.join("crates")];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(&directory).map_err(at(&directory))? {
                let path = entry.map_err(at(&directory))?.path();
                if path.is_dir() {
                    directories.push(path);
                } else if path.extension().is_some_and(|end| end == "rs")
                    && let Ok(file) = syn::parse_file(&fs::read_to_string(&path).map_err(at(&path))?)
                {
                    let items = file.items.iter();
                    names.extend(items.filter_map(|item| match item {
                        Item::Const(item) if text::is_whole_number(&item.ty) => Some(item.ident.to_string()),
                        _ => None,
                    }));
                }
            }
        }
        Ok(names)
    }

    /// Builds the tests; returns the programs, or the compiler's errors.
    fn compile(&self, groups: &[Group]) -> Result<Result<BTreeMap<String, Program>, Vec<Value>>, Error> {
        let targets: BTreeSet<&str> =
            groups.iter().flat_map(|group| &group.targets).map(String::as_str).collect();
        let mut arguments: Vec<String> =
            ["test", "--no-run", "--locked", "--message-format=json"].map(str::to_owned).into();
        let pairs: Vec<_> = targets.iter().filter_map(|target| target.split_once('/')).collect();
        let packages: BTreeSet<_> = pairs.iter().map(|(package, _)| package).collect();
        for package in packages {
            arguments.extend(["--package".to_owned(), (*package).to_owned()]);
        }
        let names: BTreeSet<_> = pairs.iter().map(|(_, name)| name).collect();
        for name in names {
            match *name {
                "lib" => arguments.push("--lib".to_owned()),
                name => arguments.extend(["--test".to_owned(), name.to_owned()]),
            }
        }
        // An overflow must not end a test by itself, because a release build continues.
        for package in
            ["protocol", "fabric", "verbs-reactor", "fabric-shm", "fabric-tcp", "rendezvous", "memory"]
        {
            let setting = format!("profile.dev.package.tensorwire-{package}.overflow-checks=false");
            arguments.extend(["--config".to_owned(), setting]);
        }
        let ran = Command::new("cargo")
            .args(&arguments)
            .current_dir(self.tree())
            .env("CARGO_TARGET_DIR", self.work.join("target"))
            .stderr(Stdio::inherit())
            .output()
            .map_err(at("cargo"))?;
        let messages = String::from_utf8_lossy(&ran.stdout).into_owned();
        let messages: Vec<Value> =
            messages.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let errors: Vec<_> = messages
            .iter()
            .map(|message| &message["message"])
            .filter(|message| message["level"] == "error")
            .cloned()
            .collect();
        if !errors.is_empty() {
            return Ok(Err(errors));
        }
        if !ran.status.success() {
            let command = format!("cargo {}", arguments.join(" "));
            return Err(Error::Command { command, status: ran.status.to_string(), place: self.tree() });
        }
        Ok(Ok(messages
            .iter()
            .filter_map(program)
            .filter(|(name, _)| targets.contains(name.as_str()))
            .collect()))
    }

    /// The mutants at the positions of the compiler's errors.
    fn to_blame(&self, errors: &[Value], mutants: &[Mutant]) -> BTreeSet<String> {
        let mut wrong = BTreeSet::new();
        for error in errors {
            let spans = error["spans"].as_array().into_iter().flatten();
            let (primary, others): (Vec<_>, Vec<_>) = spans.partition(|span| span["is_primary"] == true);
            let of_children = error["children"].as_array().into_iter().flatten();
            let of_children = of_children.flat_map(|child| child["spans"].as_array().into_iter().flatten());
            let mut numbers: BTreeSet<usize> =
                primary.iter().flat_map(|span| self.numbers_at(span)).collect();
            if numbers.is_empty() {
                numbers =
                    others.into_iter().chain(of_children).flat_map(|span| self.numbers_at(span)).collect();
            }
            wrong.extend(mutants.iter().filter(|mutant| numbers.contains(&mutant.number)).map(Mutant::key));
        }
        wrong
    }

    /// The mutant that begins last before the span on its line; all mutants of the span's lines if there is none.
    fn numbers_at(&self, span: &Value) -> Vec<usize> {
        let number = |name: &str| span[name].as_u64().unwrap_or_default() as usize;
        let file = self.tree().join(span["file_name"].as_str().unwrap_or_default());
        let text = fs::read_to_string(file).unwrap_or_default();
        let (first, last) = (number("line_start"), number("line_end"));
        let lines: Vec<&str> = text.lines().skip(first.saturating_sub(1)).take(1 + last - first).collect();
        let Some(line) = lines.first() else { return Vec::new() };
        let before: String = line.chars().take(number("column_start")).collect();
        match numbers_in(&before).pop() {
            Some(nearest) => vec![nearest],
            None => lines.iter().flat_map(|line| numbers_in(line)).collect(),
        }
    }
}

fn numbers_in(line: &str) -> Vec<usize> {
    let parts = line.split(ASKED).skip(1);
    parts.filter_map(|part| part.split_once(')')?.0.parse().ok()).collect()
}

/// The test program that a message of cargo names.
fn program(message: &Value) -> Option<(String, Program)> {
    let executable = PathBuf::from(message["executable"].as_str()?);
    let target = &message["target"];
    let manifest = Path::new(message["manifest_path"].as_str()?);
    let directory = manifest.parent()?.to_path_buf();
    let package = format!("tensorwire-{}", directory.file_name()?.to_str()?);
    let kind = target["kind"].as_array()?.first()?.as_str()?;
    let name = if kind == "test" { target["name"].as_str()? } else { kind };
    Some((format!("{package}/{name}"), Program { executable, directory }))
}

/// Writes a file only if its content differs, so that cargo does not build an unchanged file again.
fn write_changed(path: &Path, content: &[u8]) -> Result<(), Error> {
    if fs::read(path).is_ok_and(|before| before == content) {
        return Ok(());
    }
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(at(directory))?;
    }
    fs::write(path, content).map_err(at(path))
}

/// Removes files of an earlier copy that the repository no longer has.
fn remove_others(directory: &Path, written: &BTreeSet<PathBuf>) -> Result<(), Error> {
    for entry in fs::read_dir(directory).map_err(at(directory))? {
        let path = entry.map_err(at(directory))?.path();
        if path.is_dir() {
            remove_others(&path, written)?;
        } else if !written.contains(&path) {
            fs::remove_file(&path).map_err(at(&path))?;
        }
    }
    Ok(())
}
