//! Pages of the pool ahead of the puts that fill it for the first time. A put that finds none waits for each while the kernel clears it, for
//! up to ten times what the copy takes (docs/design/0019-memory-of-a-pool.md).

use std::sync::Arc;

use kvasir_memory::filling::Filling;
use kvasir_memory::host::HostPool;
use kvasir_memory::placing::HUGE_PAGE;
use kvasir_os::thread::{Builder, JoinHandle};
use parking_lot::{Condvar, Mutex, MutexGuard};

/// So much has pages beyond what was ever handed out. A smaller pool is left to its puts.
const AHEAD: u64 = 64 << 20;

#[derive(Default)]
struct Frontier {
    /// The end of what was ever handed out.
    at: u64,
    /// The end of what has pages.
    filled: u64,
    is_over: bool,
}

impl Frontier {
    fn is_far_enough(&self) -> bool {
        self.filled >= self.at + AHEAD
    }
}

#[derive(Default)]
struct Shared {
    frontier: Mutex<Frontier>,
    moved: Condvar,
}

/// A thread that stays ahead of the allocator, until all of the pool has pages. Stopped and joined on drop.
pub(super) struct Ahead {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Ahead {
    /// Returns `None` if the pool is small or has its pages, or no thread can be started: puts take their pages themselves then.
    pub(super) fn start(pool: Arc<HostPool>) -> Option<Self> {
        if pool.bytes() <= AHEAD || pool.is_filled() {
            return None;
        }
        let shared = Arc::new(Shared::default());
        let run = {
            let shared = Arc::clone(&shared);
            move || shared.stay_ahead(&pool)
        };
        let thread = Builder::new().name("kvasir-pages".into()).spawn(run).ok()?;
        Some(Self { shared, thread: Some(thread) })
    }

    /// Memory up to `end` was handed out. Wakes the thread only if there is something to do: a put calls this.
    pub(super) fn reached(&self, end: u64) {
        let mut frontier = self.shared.frontier.lock();
        frontier.at = end;
        if !frontier.is_far_enough() {
            self.shared.moved.notify_one();
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.shared.frontier.lock().is_over = true;
        self.shared.moved.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn stay_ahead(&self, pool: &HostPool) {
        let mut filling = Filling::default();
        let mut frontier = self.frontier.lock();
        while frontier.filled < pool.bytes() && !pool.is_filled() {
            self.moved.wait_while(&mut frontier, |frontier| !frontier.is_over && frontier.is_far_enough());
            if frontier.is_over {
                return;
            }
            // What lies before it has its pages from the puts.
            let from = frontier.filled.max(frontier.at.next_multiple_of(HUGE_PAGE));
            let step = MutexGuard::unlocked(&mut frontier, || filling.step(pool, from));
            // Without memory left the puts find out as well, if they need any.
            let Ok(end) = step else { return };
            frontier.filled = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::config::DramConfig;
    use crate::dram::DramStore;
    use kvasir_protocol::block::{BlockKey, BlockMeta};

    fn open(pool_bytes: u64) -> DramStore {
        DramStore::open(DramConfig { pool_bytes, ..DramConfig::default() }).unwrap()
    }

    /// Bytes of the pool that have pages.
    fn filled(store: &DramStore) -> u64 {
        let file = File::from(store.pool().writable_fd().try_clone_to_owned().unwrap());
        file.metadata().unwrap().blocks() * 512
    }

    fn wait_for(store: &DramStore, bytes: u64) {
        while filled(store) < bytes {
            let thread = store.ahead.as_ref().unwrap().thread.as_ref().unwrap();
            assert!(
                !thread.is_finished() || filled(store) >= bytes,
                "it ended at {} of {bytes} B",
                filled(store)
            );
            std::thread::yield_now();
        }
    }

    #[test]
    fn pages_are_there_before_puts_and_no_more_than_that() {
        let store = open(6 * AHEAD);
        wait_for(&store, AHEAD);
        let owner = store.new_owner();
        for n in 0..3u32 {
            let meta =
                BlockMeta::single(BlockKey::from_engine_hash("ahead", &n.to_le_bytes()), AHEAD as u32 / 2);
            store.reserve(owner, &[meta], 0).unwrap();
            wait_for(&store, AHEAD + u64::from(n + 1) * AHEAD / 2);
        }
        assert!(filled(&store) < 4 * AHEAD, "nobody wants so much yet");
    }

    #[test]
    fn a_small_pool_is_left_to_its_puts() {
        let store = open(AHEAD);
        assert!(store.ahead.is_none());
        assert_eq!(filled(&store), 0);
    }

    #[test]
    fn it_ends_with_the_store_wherever_it_is() {
        for bytes in [0, 1, AHEAD / 4, AHEAD / 2, AHEAD] {
            let store = open(4 * AHEAD);
            wait_for(&store, bytes);
            drop(store);
        }
    }
}
