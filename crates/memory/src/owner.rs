//! The owners of files and processes.

use std::fs;

use rustix::process::geteuid;

/// How many ids there are: all numbers but the last, which means "none".
const ALL_IDS: u64 = u32::MAX as u64;

/// The kernel's overflow id, where it cannot be read.
const USUAL_OVERFLOW_ID: u32 = 65534;

/// Why a file or a process does not count as owned by this process's user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotOwnUser {
    /// Another user owns it.
    #[error("it belongs to user {theirs}, this process to user {own}")]
    Other {
        /// Its user.
        theirs: u32,
        /// The user of this process.
        own: u32,
    },
    /// The number stands for every user that this process's user namespace does not map.
    #[error(
        "user {0} cannot be told from others here: the user namespace of this process maps only some users, and all \
         others have this number (`/proc/self/uid_map`, `/proc/sys/kernel/overflowuid`); run as a user with a number of \
         its own"
    )]
    Unmapped(u32),
}

/// Checks that `user`, as the kernel reports it of a file or of the other end of a Unix socket, is the user of this process.
///
/// # Errors
/// [`NotOwnUser`]. In a user namespace that maps only some users, the kernel reports the overflow id for each of the
/// others. So if this process itself has that id, no user counts as its own.
pub fn check_own_user(user: u32) -> Result<(), NotOwnUser> {
    let own = geteuid().as_raw();
    if user != own {
        return Err(NotOwnUser::Other { theirs: user, own });
    }
    check_certain(user)
}

/// Checks that the user of this process can be distinguished from others: [`check_own_user`] accepts it.
///
/// # Errors
/// [`NotOwnUser::Unmapped`].
pub fn check_own_user_is_certain() -> Result<(), NotOwnUser> {
    check_own_user(geteuid().as_raw())
}

/// Checks that `user`, as the kernel reports it, is one user.
pub(crate) fn check_certain(user: u32) -> Result<(), NotOwnUser> {
    let overflow = fs::read_to_string("/proc/sys/kernel/overflowuid").ok();
    let overflow = overflow.and_then(|text| text.trim().parse().ok()).unwrap_or(USUAL_OVERFLOW_ID);
    if user != overflow || maps_all(&fs::read_to_string("/proc/self/uid_map").unwrap_or_default()) {
        return Ok(());
    }
    Err(NotOwnUser::Unmapped(user))
}

/// Whether the `uid_map` of a namespace has every user: lines of the first id inside, the first outside, and the count.
fn maps_all(map: &str) -> bool {
    let counts = map.lines().filter_map(|line| line.split_whitespace().nth(2)?.parse::<u64>().ok());
    counts.fold(0, u64::saturating_add) >= ALL_IDS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e_only_a_map_of_all_ids_names_every_user() {
        for (map, all) in [
            ("         0          0 4294967295\n", true),
            ("0 0 65534\n65534 65534 4294901761\n", true),
            ("", false),
            ("         0     100000      65536\n", false),
            ("     65534       1000          1\n", false),
            ("0 0 4294967294\n", false),
            ("no map\n", false),
        ] {
            assert_eq!(maps_all(map), all, "{map:?}");
        }
    }

    #[test]
    fn e_another_user_is_not_the_own_one() {
        let own = geteuid().as_raw();
        let refused = check_own_user(own + 1).unwrap_err();
        assert_eq!(refused, NotOwnUser::Other { theirs: own + 1, own });
        assert_eq!(check_own_user(own), check_own_user_is_certain());
    }
}
