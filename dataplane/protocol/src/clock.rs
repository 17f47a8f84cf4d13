//! The clock whose reading callers of the store pass as `now_ms`.

use kvasir_os::time::Instant;

/// Counts milliseconds since it was made. Copies agree.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    pub fn start() -> Self {
        Self { start: Instant::now() }
    }

    pub fn now_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }
}
