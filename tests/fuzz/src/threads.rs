//! Threads of what is tried. A panic of theirs stays theirs, and must be noticed.

use std::panic;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

static PANICS: AtomicUsize = AtomicUsize::new(0);
static HOOKED: Once = Once::new();

/// Runs something that has threads of its own, which must not panic.
pub(crate) fn calm<T>(run: impl FnOnce() -> T) -> T {
    HOOKED.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            PANICS.fetch_add(1, Ordering::SeqCst);
            before(panic);
        }));
    });
    let before = PANICS.load(Ordering::SeqCst);
    let done = run();
    assert_eq!(PANICS.load(Ordering::SeqCst), before, "a thread has panicked; its panic is above");
    done
}
