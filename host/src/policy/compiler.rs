//! The threads that compile components, which give way to those that serve.

use super::Error;
use kvasir_os::thread;
use parking_lot::Mutex;
use rayon::{ThreadPool, ThreadPoolBuilder};

/// As many threads as there are cores.
pub(super) struct Compiler {
    threads: ThreadPool,
    /// One component at a time: more would take more memory, and no less time.
    turn: Mutex<()>,
}

impl Compiler {
    /// # Errors
    /// The machine refuses the threads.
    pub(super) fn start() -> Result<Self, Error> {
        let threads = ThreadPoolBuilder::new()
            .thread_name(|i| format!("kvasir-compile-{i}"))
            .start_handler(|_| {
                if let Err(error) = thread::give_way() {
                    tracing::debug!(%error, "compiling has the priority of serving");
                }
            })
            .build()
            .map_err(|e| Error::Engine(format!("cannot start the threads that compile: {e}")))?;
        Ok(Self { threads, turn: Mutex::new(()) })
    }

    /// Waits for its turn, and compiles.
    pub(super) fn run<R: Send>(&self, compile: impl FnOnce() -> R + Send) -> R {
        let _turn = self.turn.lock();
        self.threads.install(compile)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_compile_give_way_and_others_do_not() {
        let niceness = || rustix::process::getpriority_process(None).unwrap();
        let mine = niceness();
        let compiler = Compiler::start().unwrap();
        assert_eq!(compiler.threads.install(niceness), (mine + thread::NICENESS).min(19));
        assert_eq!(niceness(), mine);
    }
}
