//! The world that decides `chance!` and records `mark!`, per thread.

use std::{cell::RefCell, fmt, marker::PhantomData, rc::Rc};

/// A simulated world, as the code under test uses it.
pub trait World {
    /// Whether the rare branch `name` is taken now.
    fn chance(&self, name: &'static str) -> bool;

    /// The branch `name` was taken.
    fn reached(&self, name: &'static str);
}

type Current = Option<Rc<dyn World>>;

thread_local! {
    static CURRENT: RefCell<Current> = const { RefCell::new(None) };
}

/// Not borrowed during a call of the world, which may call back.
fn current() -> Current {
    CURRENT.with(|current| current.borrow().clone())
}

/// The answer of `chance!`: `false` on a thread without a world.
pub fn decide(name: &'static str) -> bool {
    current().is_some_and(|world| world.chance(name))
}

/// The effect of `mark!`: nothing on a thread without a world.
pub fn reached(name: &'static str) {
    if let Some(world) = current() {
        world.reached(name);
    }
}

/// Makes `world` the world of this thread until the guard is dropped, which restores the previous one.
pub fn enter(world: impl World + 'static) -> Entered {
    Entered { before: CURRENT.replace(Some(Rc::new(world))), _of_this_thread: PhantomData }
}

/// See [`enter`].
#[must_use = "the world is left when the guard is dropped"]
pub struct Entered {
    before: Current,
    _of_this_thread: PhantomData<*const ()>,
}

impl fmt::Debug for Entered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Entered")
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let left = CURRENT.replace(self.before.take());
        drop(left);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    struct Takes(&'static str, Rc<Cell<u32>>);

    impl World for Takes {
        fn chance(&self, name: &'static str) -> bool {
            name == self.0
        }

        fn reached(&self, name: &'static str) {
            self.1.set(self.1.get() + u32::from(name == self.0));
        }
    }

    #[test]
    fn a_thread_without_a_world_takes_no_rare_branch() {
        let marks = Rc::new(Cell::new(0));
        assert!(!decide("a"));
        let outer = enter(Takes("a", marks.clone()));
        assert!(decide("a") && !decide("b"));
        reached("a");
        {
            let _inner = enter(Takes("b", Rc::default()));
            reached("a");
            assert!(!decide("a") && decide("b"));
        }
        assert!(decide("a"));
        let other = std::thread::spawn(|| decide("a")).join();
        assert!(other.is_ok_and(|taken| !taken));
        drop(outer);
        reached("a");
        assert!(!decide("a") && marks.get() == 1);
    }
}
