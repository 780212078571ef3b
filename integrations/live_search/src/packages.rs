//! Debian's descriptions of packages: the short one is a query, and the long one the document to be found.

use std::{collections::HashSet, fs, path::Path};

use anyhow::{Context as _, Result, ensure};

/// The fewest characters of a long description that says something.
const SHORTEST_DESCRIPTION: usize = 80;
/// Long descriptions that begin with this many equal characters are of parts of the same program: one of them is used.
const SAME_BEGINNING: usize = 120;

/// A package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// The short description, of one line.
    pub synopsis: String,
    /// The long description, of one line here.
    pub description: String,
}

/// The packages of a run. Each is a document; the synopses of those that are held out are the queries that measure.
#[derive(Debug, Clone)]
pub struct Packages {
    /// First those for training, then those held out.
    pub all: Vec<Package>,
    /// How many are for training.
    pub trained: usize,
}

impl Packages {
    /// Reads a file of descriptions as APT has them (`Translation-en`), and chooses packages: the same of the same file.
    ///
    /// # Errors
    /// If the file cannot be read, or has fewer packages; the remedy is in the text.
    pub fn read(path: &Path, trained: usize, held_out: usize) -> Result<Self> {
        const REMEDY: &str = "integrations/live_search/run fetches Debian's, or write it with: /usr/lib/apt/apt-helper \
                              cat-file /var/lib/apt/lists/*_Translation-en.lz4 > FILE";
        ensure!(
            trained > 0 && held_out > 0,
            "--train is {trained} and --held-out {held_out}: both are 1 or more"
        );
        let text = fs::read_to_string(path)
            .with_context(|| format!("--descriptions {}: {REMEDY}", path.display()))?;
        let mut all = distinct(parse(&text));
        let (found, wanted) = (all.len(), trained + held_out);
        ensure!(
            found >= wanted,
            "--descriptions {}: it has {found} usable packages, and --train {trained} with --held-out {held_out} need \
             {wanted}. Lower these, or use a file with more: {REMEDY}",
            path.display()
        );
        all.sort_by_key(|package| (hash(package.name.as_bytes()), package.name.clone()));
        all.truncate(wanted);
        Ok(Self { all, trained })
    }

    /// The packages whose synopses are queries that training has not seen.
    pub fn held_out(&self) -> &[Package] {
        self.all.get(self.trained..).unwrap_or_default()
    }

    /// Those that are trained with.
    pub fn for_training(&self) -> &[Package] {
        self.all.get(..self.trained).unwrap_or_default()
    }
}

/// The paragraphs of the file that have both descriptions.
fn parse(text: &str) -> impl Iterator<Item = Package> {
    text.split("\n\n").filter_map(|paragraph| {
        let field = |name: &str| paragraph.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let (name, synopsis) = (field("Package:")?, field("Description-en:")?);
        let lines = paragraph.lines().skip_while(|line| !line.starts_with("Description-en:")).skip(1);
        let words = lines.map_while(|line| line.strip_prefix(' ')).filter(|line| *line != ".");
        let description = words.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ");
        Some(Package { name: name.to_owned(), synopsis: synopsis.to_owned(), description })
    })
}

/// Packages that differ in both descriptions, so that each query has one right answer.
fn distinct(packages: impl Iterator<Item = Package>) -> Vec<Package> {
    let (mut synopses, mut beginnings) = (HashSet::new(), HashSet::new());
    let is_new = |package: &Package| {
        package.description.len() >= SHORTEST_DESCRIPTION
            && beginnings.insert(package.description.chars().take(SAME_BEGINNING).collect::<String>())
            && synopses.insert(package.synopsis.to_lowercase())
    };
    packages.filter(is_new).collect()
}

/// FNV-1a. Packages in the order of their hashes are a choice that no initial letter is preferred in.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "Package: edit\nDescription-md5: 1\nDescription-en: small editor\n Edits texts of any length in a \
                        terminal, with\n keys that can be changed.\n .\n It has colours, too.\n\nPackage: \
                        edit-doc\nDescription-md5: 2\nDescription-en: small editor\n Another text about the manual of the \
                        small editor, which is as long as it has to be.\n\nPackage: stub\nDescription-en: nothing\n Short.\n";

    #[test]
    fn lines_are_joined_and_packages_that_cannot_be_told_apart_are_left_out() {
        let packages = distinct(parse(TEXT));
        assert_eq!(packages.len(), 1, "{packages:?}");
        assert_eq!(packages[0].synopsis, "small editor");
        assert!(packages[0].description.ends_with("can be changed. It has colours, too."), "{packages:?}");
    }

    #[test]
    fn too_few_packages_and_a_missing_file_are_errors_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("descriptions");
        let missing = format!("{:#}", Packages::read(&file, 1, 1).unwrap_err());
        assert!(missing.contains("apt-helper") && missing.contains("descriptions"), "{missing}");
        fs::write(&file, TEXT).unwrap();
        let few = format!("{:#}", Packages::read(&file, 1, 1).unwrap_err());
        assert!(few.contains("1 usable packages") && few.contains("apt-helper"), "{few}");
    }
}
