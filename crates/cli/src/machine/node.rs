//! The file through which programs use a device.

use std::{
    io,
    os::unix::fs::{MetadataExt, PermissionsExt},
};

use serde::Serialize;

use super::Tree;

/// The result of opening the file for reading and writing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum NodeAccess {
    /// It can be used.
    Granted,
    /// There is no such file.
    Missing,
    /// Its owner, group and mode do not allow this user.
    Denied,
    /// Its mode may allow this user, but something else does not, such as a container's list of devices.
    Forbidden,
    /// Another error, in the system's words.
    Failed(String),
}

/// A device's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Node {
    /// Its path, whether it exists or not.
    pub(crate) path: String,
    /// Its owner's name, or number.
    pub(crate) owner: Option<String>,
    /// Its group's name, or number.
    pub(crate) group: Option<String>,
    /// Its mode, in octal.
    pub(crate) mode: Option<String>,
    /// Whether this process may use it.
    pub(crate) access: NodeAccess,
}

impl Node {
    /// Examines the file at `path`.
    pub(super) fn read(tree: &Tree, path: String) -> Self {
        let metadata = tree.metadata(&path).ok();
        let (owner, group, mode) = match &metadata {
            Some(found) => (
                Some(name_of(tree, "/etc/passwd", found.uid())),
                Some(name_of(tree, "/etc/group", found.gid())),
                Some(format!("{:o}", found.permissions().mode() & 0o777)),
            ),
            None => (None, None, None),
        };
        let access = access(tree.try_open(&path));
        Self { path, owner, group, mode, access }
    }

    /// Who may use it, according to its mode.
    pub(crate) fn who_may(&self) -> String {
        let (Some(owner), Some(group), Some(mode)) = (&self.owner, &self.group, &self.mode) else {
            return "nobody".to_owned();
        };
        format!("owner {owner}, group {group}, mode {mode}")
    }
}

fn access(opened: io::Result<()>) -> NodeAccess {
    let Err(error) = opened else { return NodeAccess::Granted };
    match error.kind() {
        io::ErrorKind::NotFound => NodeAccess::Missing,
        // EACCES comes from the mode, EPERM from a control group.
        io::ErrorKind::PermissionDenied
            if error.raw_os_error() == Some(rustix::io::Errno::PERM.raw_os_error()) =>
        {
            NodeAccess::Forbidden
        }
        io::ErrorKind::PermissionDenied => NodeAccess::Denied,
        _ => NodeAccess::Failed(error.to_string()),
    }
}

/// The name that a file like /etc/passwd gives to a number.
fn name_of(tree: &Tree, file: &str, number: u32) -> String {
    let number = number.to_string();
    let found = tree.text(file).and_then(|text| {
        let mut lines = text.lines().map(|line| line.split(':').collect::<Vec<_>>());
        lines.find(|fields| fields.get(2) == Some(&number.as_str()))?.first().map(|name| (*name).to_owned())
    });
    found.unwrap_or(number)
}
