//! Secrets from files.

use std::path::Path;

use super::{ControlError, Secret};

/// The variable that names the secret file.
pub const SECRET_FILE_VARIABLE: &str = "TENSORWIRE_SECRET_FILE";

/// The secret in `path`, without surrounding white space.
///
/// # Errors
/// The file cannot be read, or holds fewer than 16 bytes.
pub fn read_secret_file(path: &Path) -> Result<Secret, ControlError> {
    let fail = |detail: String| ControlError::Misbehaved { address: path.display().to_string(), detail };
    let bytes = std::fs::read(path).map_err(|error| fail(error.to_string()))?;
    Secret::new(bytes.trim_ascii()).ok_or_else(|| fail("a secret has at least 16 bytes".to_owned()))
}
