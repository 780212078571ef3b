//! The mistake that is switched on, per thread.

use std::{cell::Cell, marker::PhantomData};

thread_local! {
    static PLANTED: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// The answer of `planted!`.
pub fn is_planted(name: &str) -> bool {
    PLANTED.get() == Some(name)
}

/// Plants the mistake `name` on this thread until the guard is dropped.
pub fn plant(name: &'static str) -> Planted {
    Planted { before: PLANTED.replace(Some(name)), _of_this_thread: PhantomData }
}

/// See [`plant`].
#[derive(Debug)]
#[must_use = "the mistake is taken out when the guard is dropped"]
pub struct Planted {
    before: Option<&'static str>,
    _of_this_thread: PhantomData<*const ()>,
}

impl Drop for Planted {
    fn drop(&mut self) {
        PLANTED.set(self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_mistake_at_a_time_and_only_while_its_guard_lives() {
        assert!(!is_planted("a"));
        {
            let _planted = plant("a");
            assert!(is_planted("a") && !is_planted("b"));
        }
        assert!(!is_planted("a"));
    }
}
