//! Threads of a world that are none of the system: each has a stack of its own, and all run on the thread of the driver. To give
//! the turn from one to another takes some ten nanoseconds so, and a switch of the system's threads some microseconds.

use std::cell::RefCell;
use std::collections::HashMap;
use std::mem::ManuallyDrop;

use generator::{Generator, Gn};

/// 1 MiB, of which the system gives what is used; in words.
const STACK: usize = (1 << 20) / size_of::<usize>();

pub(crate) type Work = Box<dyn FnOnce() + Send>;
type Fiber = Generator<'static, (), ()>;

thread_local! {
    /// Those that have begun. What a crashed process leaves here is never taken down.
    static FIBERS: ManuallyDrop<RefCell<HashMap<usize, Fiber>>> = ManuallyDrop::default();
}

/// Lets the fiber of this number run until it pauses or ends; `first` is what it does if it has not begun yet.
pub(crate) fn resume(id: usize, first: Option<Work>) {
    let begun = || FIBERS.with(|fibers| fibers.borrow_mut().remove(&id)).expect("a fiber that has begun");
    let mut fiber = first.map_or_else(begun, |work| Gn::new_opt(STACK, work));
    fiber.resume();
    if !fiber.is_done() {
        FIBERS.with(|fibers| fibers.borrow_mut().insert(id, fiber));
    }
}

/// Ends the turn of the calling fiber. It returns with its next one.
pub(crate) fn pause() {
    // What replaces it is told who pauses, which would have to be handed down to every lock.
    #[expect(deprecated)]
    generator::yield_with(());
}
