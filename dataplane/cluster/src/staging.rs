//! Registered memory where blocks of peers arrive before a tier takes them: a device writes only where its driver was told
//! at start-up that it may.

use parking_lot::{Condvar, Mutex};

use kvasir_memory::buffer::Buffer;
use kvasir_memory::extents::Extents;
use kvasir_memory::region::{LocalRange, Region};
use kvasir_net::transfer::Engine;
use kvasir_net::transport::Error;
use kvasir_os::time::Instant;

/// Bytes of all reads at a time; more wait. Pages that no read has needed are not resident, unless a device pins them.
const BYTES: u64 = 64 << 20;
/// Bytes of one read, so that several can go on at a time.
pub(super) const READ_MAX: u64 = BYTES / 4;

pub(super) struct Staging {
    region: Region,
    free: Mutex<Extents>,
    given_back: Condvar,
}

/// Memory for one read, given back on drop: nothing may be on its way there by then.
pub(super) struct Staged<'a> {
    staging: &'a Staging,
    offset: u64,
    range: LocalRange,
}

impl Staging {
    /// # Errors
    /// No transport takes the memory.
    pub(super) fn open(engine: &Engine) -> Result<Self, Error> {
        let region = Region::of_buffer(Buffer::zeroed(BYTES as usize));
        engine.register(&region)?;
        Ok(Self { region, free: Mutex::new(Extents::new(BYTES)), given_back: Condvar::new() })
    }

    /// Room for `size` bytes (1 to [`READ_MAX`]), waiting for others to be done with theirs. Returns `None` if that takes too long.
    pub(super) fn take(&self, size: u64, until: Instant) -> Option<Staged<'_>> {
        let mut free = self.free.lock();
        loop {
            if let Some(offset) = free.allocate(size) {
                let range = self.region.range(offset, size)?;
                return Some(Staged { staging: self, offset, range });
            }
            let left = until.checked_duration_since(Instant::now())?;
            self.given_back.wait_for(&mut free, left);
        }
    }
}

impl Staged<'_> {
    /// A part of it.
    pub(super) fn part(&self, at: u64, len: u64) -> Option<LocalRange> {
        self.range.part(at, len)
    }
}

impl Drop for Staged<'_> {
    fn drop(&mut self) {
        self.staging.free.lock().free(self.offset, self.range.len());
        self.staging.given_back.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_net::transfer::EngineConfig;
    use kvasir_net::transport::loopback::Loopback;
    use kvasir_net::transport::node::Secret;
    use kvasir_net::transport::{Node, Transport};
    use std::sync::Arc;
    use std::thread;
    use std::time::Duration;

    #[test]
    fn what_finds_no_room_waits_for_it_and_no_longer_than_told() {
        let node = Arc::new(Node::new("here", Secret::new(b"a secret"), 1));
        let transport: Arc<dyn Transport> = Arc::new(Loopback::new(Arc::default(), node));
        let engine = Engine::new(EngineConfig::default(), vec![transport]).unwrap();
        let staging = Staging::open(&engine).unwrap();
        let now = Instant::now();
        let mut all: Vec<_> = (0..4).map(|_| staging.take(READ_MAX, now).unwrap()).collect();
        assert!(staging.take(1, now).is_none());
        thread::scope(|scope| {
            let waits = scope.spawn(|| staging.take(READ_MAX, now + Duration::from_secs(60)).is_some());
            drop(all.pop());
            assert!(waits.join().unwrap());
        });
        drop(all);
        assert_eq!(staging.free.lock().free_bytes(), BYTES);
    }
}
