//! What a server publishes beside the tensors of a file: the file's header and a checksum of each tensor.
//!
//! It is one tensor of bytes, a JSON text, so that the transfer of the others stays as it is. With it a client writes
//! the very file that is served, also for element types that the wire has no name for.

use std::collections::HashMap;

use safetensors::SafeTensorError;
use serde_json::{Map, Value, json};

use crate::header::Header;

/// The manifest's published name.
pub(crate) const MANIFEST_NAME: &str = "tensorwire:manifest";

/// Names the checksum in the manifest.
const CHECKSUM_KIND: &str = "xxh3-64";

/// Why a manifest can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ManifestError {
    #[error("the server's manifest is not valid JSON: {0}")]
    Json(serde_json::Error),
    #[error(
        "the server's manifest lacks the field `{0}`, or it has the wrong type; is the server of another version?"
    )]
    Field(&'static str),
    #[error("the server's manifest has checksums of kind `{0}`, this program knows {CHECKSUM_KIND}")]
    Kind(String),
    #[error("the file header in the server's manifest is not valid: {0}")]
    Header(SafeTensorError),
}

/// The checksum of a tensor's bytes.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    twox_hash::XxHash3_64::oneshot(bytes)
}

/// A file's header and the checksums of its tensors.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Manifest {
    pub(crate) header: Header,
    pub(crate) checksums: HashMap<String, u64>,
}

impl Manifest {
    /// The bytes to publish.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let checksums: Map<String, Value> =
            self.checksums.iter().map(|(name, sum)| (name.clone(), json!(format!("{sum:016x}")))).collect();
        json!({ "checksum": CHECKSUM_KIND, "header": self.header.text(), "checksums": checksums })
            .to_string()
            .into_bytes()
    }

    /// Reads what a server has published.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        let value: Value = serde_json::from_slice(bytes).map_err(ManifestError::Json)?;
        let kind = value["checksum"].as_str().ok_or(ManifestError::Field("checksum"))?;
        if kind != CHECKSUM_KIND {
            return Err(ManifestError::Kind(kind.to_owned()));
        }
        let text = value["header"].as_str().ok_or(ManifestError::Field("header"))?;
        let header = Header::parse(text.to_owned()).map_err(ManifestError::Header)?;
        let listed = value["checksums"].as_object().ok_or(ManifestError::Field("checksums"))?;
        let mut checksums = HashMap::with_capacity(listed.len());
        for (name, sum) in listed {
            let sum = sum.as_str().and_then(|digits| u64::from_str_radix(digits, 16).ok());
            checksums.insert(name.clone(), sum.ok_or(ManifestError::Field("checksums"))?);
        }
        Ok(Self { header, checksums })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::{Manifest, ManifestError, checksum};
    use crate::header::Header;

    fn manifest() -> Manifest {
        let text = r#"{"ä \"x\"":{"dtype":"F8_E8M0","shape":[3],"data_offsets":[0,3]}}  "#;
        let header = Header::parse(text.to_owned()).unwrap();
        Manifest { header, checksums: HashMap::from([("ä \"x\"".to_owned(), checksum(&[1, 2, 3]))]) }
    }

    #[test]
    fn encoding_keeps_header_padding_and_names() {
        assert_eq!(Manifest::decode(&manifest().encode()).unwrap(), manifest());
    }

    #[test]
    fn checksum_is_the_published_function() {
        assert_eq!(checksum(b""), 0x2d06_8005_38d3_94c2);
    }

    #[test]
    fn each_missing_or_wrong_field_is_named() {
        let text = String::from_utf8(manifest().encode()).unwrap();
        for (from, to, field) in [
            ("\"checksum\":", "\"other\":", "checksum"),
            ("\"header\":", "\"other\":", "header"),
            ("\"checksums\":{", "\"other\":{", "checksums"),
        ] {
            let error = Manifest::decode(text.replace(from, to).as_bytes()).unwrap_err();
            assert!(matches!(error, ManifestError::Field(name) if name == field), "{error}");
        }
        let error = Manifest::decode(text.replace("xxh3-64", "md5").as_bytes()).unwrap_err();
        assert!(matches!(error, ManifestError::Kind(kind) if kind == "md5"));
        assert!(matches!(Manifest::decode(b"\xff"), Err(ManifestError::Json(_))));
        assert!(matches!(Manifest::decode(b"[]"), Err(ManifestError::Field("checksum"))));
    }
}
