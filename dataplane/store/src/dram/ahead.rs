//! Pages of the pool ahead of the puts that fill it for the first time. A put that finds none waits for each while the kernel clears it, for
//! up to ten times what the copy takes.

use std::sync::Arc;

use kvasir_memory::filling::Filling;
use kvasir_memory::host::HostPool;
use kvasir_memory::placing::HUGE_PAGE;
use kvasir_os::thread::{Builder, JoinHandle};
use parking_lot::{Condvar, Mutex};

/// So much has pages beyond what was ever handed out. A smaller pool is left to its puts.
const AHEAD: u64 = 64 << 20;

#[derive(Default)]
struct Frontier {
    /// The end of what was ever handed out.
    at: u64,
    is_over: bool,
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

    /// Memory up to `end` was handed out.
    pub(super) fn reached(&self, end: u64) {
        self.shared.frontier.lock().at = end;
        self.shared.moved.notify_one();
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
        let (mut filling, mut filled) = (Filling::default(), 0);
        while filled < pool.bytes() && !pool.is_filled() {
            let mut frontier = self.frontier.lock();
            self.moved
                .wait_while(&mut frontier, |frontier| !frontier.is_over && filled >= frontier.at + AHEAD);
            if frontier.is_over {
                return;
            }
            // What lies before it has its pages from the puts.
            let from = filled.max(frontier.at.next_multiple_of(HUGE_PAGE));
            drop(frontier);
            // No memory is left, which puts find out as well, if they need any.
            let Ok(end) = filling.step(pool, from) else { return };
            filled = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;
    use std::time::{Duration, Instant};

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
        let until = Instant::now() + Duration::from_secs(60);
        while filled(store) < bytes {
            assert!(Instant::now() < until, "{} of {bytes} B have pages", filled(store));
            std::thread::sleep(Duration::from_millis(1));
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
        for pause_ms in [0, 1, 10, 50] {
            let store = open(4 * AHEAD);
            std::thread::sleep(Duration::from_millis(pause_ms));
            drop(store);
        }
    }
}
