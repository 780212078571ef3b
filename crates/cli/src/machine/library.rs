//! libibverbs, and the device that Tensorwire would use through it.

use std::{path::Path, sync::Arc};

use serde::Serialize;
use tensorwire_fabric::Runtime;
use tensorwire_verbs_reactor::{Library as Verbs, Rdma, SettingError, VerbsError, VerbsFabric};

use super::Tree;

/// Whether the library could be opened, and its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Library {
    /// It cannot be opened.
    Missing {
        /// The reason, shown to the user.
        reason: String,
    },
    /// It is open.
    Found {
        /// Its file.
        path: Option<String>,
        /// The devices that it has a driver for, or why it could not list them.
        devices: Result<Vec<String>, String>,
    },
}

/// The device, port and address that connections would use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Choice {
    /// The device.
    pub(crate) device: String,
    /// Its port.
    pub(crate) port: u8,
    /// The index of the address in the port's table.
    pub(crate) gid_index: u32,
    /// The address.
    pub(crate) gid: String,
}

impl Library {
    /// Opens the library and lists its devices.
    pub(super) fn look() -> Self {
        match Verbs::open() {
            Err(VerbsError::NoLibrary { reason }) => Self::Missing { reason: reason.to_string() },
            Err(other) => Self::Missing { reason: other.to_string() },
            Ok(library) => Self::Found {
                path: mapped_file(&Tree::of_this_machine()),
                devices: library.device_names().map_err(|error| error.to_string()),
            },
        }
    }

    /// The version in the file's name.
    pub(crate) fn version(&self) -> Option<&str> {
        let Self::Found { path: Some(path), .. } = self else { return None };
        let (_, version) = Path::new(path).file_name()?.to_str()?.split_once(".so.")?;
        Some(version)
    }
}

/// The file that the loader has mapped for libibverbs.
fn mapped_file(tree: &Tree) -> Option<String> {
    let maps = tree.text("/proc/self/maps")?;
    let mut files = maps.lines().filter_map(|line| line.find('/').map(|at| line.split_at(at).1));
    files.find(|file| file.contains("/libibverbs.so")).map(str::to_owned)
}

/// The settings with which a worker opens its device: those of the environment, except that the user may name a device.
fn verbs_settings(device: Option<&str>) -> Result<Rdma, SettingError> {
    let named = Rdma { device: device.map(str::to_owned), ..Rdma::default() };
    Ok(named.or(Rdma::from_environment()?))
}

/// Opens the device that a worker would use, or the one that is named.
///
/// # Errors
/// The reason, in words.
pub(crate) fn open_fabric(device: Option<&str>, runtime: Arc<dyn Runtime>) -> Result<VerbsFabric, String> {
    let settings = verbs_settings(device).map_err(|error| error.to_string())?;
    VerbsFabric::open(runtime, &settings).map_err(|error| error.to_string())
}

/// The fabric's choice for a worker.
pub(super) fn choose(device: Option<&str>, runtime: Arc<dyn Runtime>) -> Result<Choice, String> {
    let fabric = open_fabric(device, runtime)?;
    let source = fabric.source();
    Ok(Choice {
        device: fabric.device().to_owned(),
        port: fabric.port().number,
        gid_index: u32::from(source.index),
        gid: source.gid.to_string(),
    })
}
