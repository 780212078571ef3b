//! The unused memory of a control group, in both versions of the interface.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::field_of;

/// The files of one version: the limit, the used bytes, and the part of them that the kernel can reclaim at once.
struct Version {
    limit: &'static str,
    used: &'static str,
    inactive: &'static str,
}

const SECOND: Version = Version { limit: "memory.max", used: "memory.current", inactive: "inactive_file" };
const FIRST: Version = Version {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    inactive: "total_inactive_file",
};

/// Bytes left by this process's group and all groups above it; `None` where nothing is limited. `root` is `/`, or in
/// tests a directory that replaces it.
pub(super) fn room(root: &Path) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let lines = text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
    let rooms = lines.filter_map(|(controllers, group)| {
        if controllers.is_empty() {
            return least_room(&root.join("sys/fs/cgroup"), group, &SECOND);
        }
        let is_memory = controllers.split(',').any(|controller| controller == "memory");
        is_memory.then(|| least_room(&root.join("sys/fs/cgroup/memory"), group, &FIRST)).flatten()
    });
    rooms.min()
}

/// The smallest remainder of all groups from `group` up to the mount. A container sees its own group at the mount, under
/// which its name does not exist.
fn least_room(mount: &Path, group: &str, version: &Version) -> Option<u64> {
    let group = Path::new(group.trim_start_matches('/'));
    let groups: Vec<PathBuf> = group.ancestors().map(|above| mount.join(above)).collect();
    groups.iter().filter_map(|directory| room_of(directory, version)).min()
}

fn room_of(directory: &Path, version: &Version) -> Option<u64> {
    let number = |name| -> Option<u64> { fs::read_to_string(directory.join(name)).ok()?.trim().parse().ok() };
    // "max" is no number.
    let limit = number(version.limit)?;
    let used = number(version.used)?;
    let stat = fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
    let inactive = field_of(&stat, version.inactive).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(inactive)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    struct Root(tempfile::TempDir);

    impl Root {
        fn new(groups: &str) -> Self {
            let root = Self(tempfile::tempdir().unwrap());
            root.write("proc/self/cgroup", groups);
            root
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn second(&self, group: &str, limit: &str, used: u64, inactive: u64) {
            let at = |file| format!("sys/fs/cgroup/{group}/{file}");
            self.write(&at("memory.max"), limit);
            self.write(&at("memory.current"), &format!("{used}\n"));
            self.write(&at("memory.stat"), &format!("anon 5\ninactive_file {inactive}\n"));
        }

        fn room(&self) -> Option<u64> {
            room(self.0.path())
        }
    }

    #[test]
    fn the_narrowest_group_on_the_way_up_counts() {
        let root = Root::new("0::/service/worker\n");
        root.second("service/worker", "1000\n", 100, 0);
        assert_eq!(root.room(), Some(900));
        root.second("service", "800\n", 300, 0);
        assert_eq!(root.room(), Some(500));
        root.second("service", "max\n", 300, 0);
        assert_eq!(root.room(), Some(900));
    }

    #[test]
    fn pages_that_the_kernel_can_take_back_count_as_room() {
        let root = Root::new("0::/\n");
        root.second("", "1000\n", 900, 400);
        assert_eq!(root.room(), Some(500));
        root.second("", "1000\n", 2000, 0);
        assert_eq!(root.room(), Some(0), "over its limit already");
    }

    #[test]
    fn the_first_version_is_read_from_the_memory_controllers_directory() {
        let root = Root::new("9:cpu,memory:/box\n8:pids:/\n0::/\n");
        root.write("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "4096\n");
        root.write("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "1096\n");
        root.write("sys/fs/cgroup/memory/box/memory.stat", "cache 7\ntotal_inactive_file 96\n");
        assert_eq!(root.room(), Some(3096));
    }

    #[test]
    fn a_container_that_sees_its_group_at_the_mount_is_limited_by_it() {
        let root = Root::new("0::/kubepods/pod1/abc\n");
        root.second("", "64\n", 4, 0);
        assert_eq!(root.room(), Some(60));
    }

    #[test]
    fn without_limits_there_is_no_bound() {
        assert_eq!(Root::new("").room(), None);
        assert_eq!(Root::new("0::/a\nnonsense\n").room(), None);
        let root = Root::new("0::/\n");
        root.second("", "max\n", 1, 0);
        assert_eq!(root.room(), None);
    }
}
