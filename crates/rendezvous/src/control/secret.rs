//! Secrets from files, and secrets that planes generate.
//!
//! A secret file contains one secret of 16 to 4096 bytes, without surrounding white space. It should be random (`head
//! -c 32 /dev/urandom | base64 > FILE`) and of its owner alone (`chmod 600 FILE`):
//! a user who can read the file can connect, and a user who can write it chooses the secret.

use std::{
    fs::File,
    io::{self, Read},
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::Path,
};

use super::{ControlError, Secret};

/// The environment variable with the path of the secret file.
pub const SECRET_FILE_VARIABLE: &str = "TENSORWIRE_SECRET_FILE";

/// Maximum length of a secret file, in bytes.
const FILE_BYTES_MAX: u64 = 4096;

/// Length of a generated secret, in bytes.
const HANDED_OVER_BYTES: usize = 32;

/// Reads the secret in `path`, without surrounding white space. Logs a warning if users other than its owner can read
/// or write the file.
///
/// # Errors
/// [`ControlError::SecretFile`]: the file cannot be read, or is too short or too long.
pub fn read_secret_file(path: &Path) -> Result<Secret, ControlError> {
    let fail = |problem: String| ControlError::SecretFile { path: path.to_owned(), problem };
    let (bytes, mode) = read(path).map_err(|error| fail(error.to_string()))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(fail(format!("it has more than {FILE_BYTES_MAX} bytes; is it the right file?")));
    }
    let trimmed = bytes.trim_ascii();
    let secret = Secret::new(trimmed).ok_or_else(|| {
        fail(format!(
            "it has {} bytes, and a secret needs at least 16: make one with `head -c 32 /dev/urandom | base64`",
            trimmed.len()
        ))
    })?;
    if is_exposed(mode) {
        let mode = format!("{:03o}", mode & 0o777);
        log!(
            WARN,
            path = %path.display(), mode,
            "users other than its owner can read or write the secret file: run chmod 600 on it, and make another secret if they did"
        );
    }
    Ok(secret)
}

/// Reads the secret in the file of [`SECRET_FILE_VARIABLE`], if the variable is set.
///
/// # Errors
/// As [`read_secret_file`].
pub fn secret_from_environment() -> Result<Option<Secret>, ControlError> {
    let path = std::env::var_os(SECRET_FILE_VARIABLE).filter(|path| !path.is_empty());
    path.map(|path| read_secret_file(Path::new(&path))).transpose()
}

/// Content and mode of the same open file. Reads one byte more than allowed, to detect a file that is too long.
fn read(path: &Path) -> io::Result<(Vec<u8>, u32)> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    Ok((bytes, metadata.permissions().mode()))
}

/// Whether group or others can read or write a file of this mode.
fn is_exposed(mode: u32) -> bool {
    mode & 0o066 != 0
}

impl Secret {
    /// Generates a secret of 32 random bytes from the operating system, for a plane that listens on `listens_on`.
    ///
    /// Does not use the `Runtime`, whose numbers may come from a simulator.
    pub(super) fn generate(listens_on: SocketAddr) -> Result<Self, getrandom::Error> {
        let mut bytes = vec![0; HANDED_OVER_BYTES];
        getrandom::fill(&mut bytes)?;
        Ok(Self { bytes, listens_on: Some(listens_on) })
    }

    /// The bytes that are handed over: the secret, and the listen address of its plane as text.
    pub(super) fn to_handed_over(&self) -> Vec<u8> {
        let listens_on = self.listens_on.map_or_else(String::new, |address| address.to_string());
        [self.expose(), listens_on.as_bytes()].concat()
    }

    /// The reverse of [`to_handed_over`](Self::to_handed_over); `None` for anything else.
    pub(super) fn from_handed_over(bytes: &[u8]) -> Option<Self> {
        let (secret, listens_on) = bytes.split_at_checked(HANDED_OVER_BYTES)?;
        let listens_on = str::from_utf8(listens_on).ok()?.parse().ok()?;
        Some(Self { bytes: secret.to_vec(), listens_on: Some(listens_on) })
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::unix::fs::OpenOptionsExt};

    use super::*;

    fn file(content: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content).unwrap();
        file
    }

    #[test]
    fn surrounding_white_space_is_no_part_of_a_secret() {
        for content in [&b"0123456789abcdef"[..], b"0123456789abcdef\n", b" \t\r\n0123456789abcdef \r\n\n"] {
            let secret = read_secret_file(file(content).path()).unwrap();
            assert_eq!(secret.expose(), b"0123456789abcdef");
        }
        let binary: Vec<u8> = (0x80..=0xff).collect();
        assert_eq!(read_secret_file(file(&binary).path()).unwrap().expose(), binary);
        let longest = vec![b'x'; 4096];
        assert_eq!(read_secret_file(file(&longest).path()).unwrap().expose(), longest);
    }

    #[test]
    fn errors_name_the_file_the_problem_and_the_remedy() {
        let short = file(b"  0123456789abcde  \n");
        let long = file(&[b'x'; 4097]);
        let directory = tempfile::tempdir().unwrap();
        for (path, problem) in [
            (short.path(), "15 bytes, and a secret needs at least 16: make one with"),
            (long.path(), "more than 4096 bytes"),
            (directory.path(), "is a directory"),
            (Path::new("/no/such/file"), "No such file"),
            (Path::new("/dev/null"), "0 bytes"),
            (Path::new("/dev/zero"), "more than 4096 bytes"),
        ] {
            let error = read_secret_file(path).unwrap_err().to_string();
            let named = format!("secret file `{}`", path.display());
            assert!(error.starts_with(&named) && error.contains(problem), "{error}");
            assert!(!error.contains("0123456789"), "{error}");
        }
    }

    #[test]
    fn a_file_that_others_can_read_or_write_is_told_apart() {
        for (mode, exposed) in [(0o600, false), (0o400, false), (0o711, false), (0o640, true), (0o604, true)]
        {
            assert_eq!(is_exposed(0o100_000 | mode), exposed, "{mode:o}");
        }
        assert!([0o620, 0o602, 0o622].into_iter().all(is_exposed), "others could set the secret");
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        let mut options = std::fs::OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        options.open(&path).unwrap().write_all(b"0123456789abcdef").unwrap();
        assert!(!is_exposed(read(&path).unwrap().1));
    }

    #[test]
    fn generated_secrets_differ_and_hide() {
        let at = "127.0.0.1:4242".parse().unwrap();
        let (one, other) = (Secret::generate(at).unwrap(), Secret::generate(at).unwrap());
        assert!(one != other && one.expose().len() == 32 && one.listening_address() == Some(at));
        assert_eq!(format!("{one:?} {one:#?}"), "Secret(..) Secret(..)");
    }
}
