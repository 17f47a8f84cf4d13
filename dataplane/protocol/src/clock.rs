//! The clock whose reading callers of the store pass as `now_ms`.

use kvasir_os::time::Instant;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Counts milliseconds since it was made. Copies agree.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
    /// How far it was moved, of one that can be.
    ahead_ms: Option<&'static AtomicU64>,
}

impl Clock {
    pub fn start() -> Self {
        Self { start: Instant::now(), ahead_ms: None }
    }

    /// One that can be moved, for traffic that is replayed faster than it came. Takes 8 bytes until the process ends.
    pub fn movable() -> Self {
        Self { ahead_ms: Some(Box::leak(Box::default())), ..Self::start() }
    }

    pub fn now_ms(&self) -> u64 {
        self.elapsed_ms() + self.ahead_ms.map_or(0, |ahead_ms| ahead_ms.load(Relaxed))
    }

    /// Moves it forward to `to_ms`; one that is there already stays. Whatever ends at a time before that has ended then: leases,
    /// reservations, lifetimes.
    ///
    /// # Errors
    /// [`Fixed`].
    pub fn move_to(&self, to_ms: u64) -> Result<(), Fixed> {
        let ahead_ms = self.ahead_ms.ok_or(Fixed)?;
        ahead_ms.fetch_max(to_ms.saturating_sub(self.elapsed_ms()), Relaxed);
        Ok(())
    }

    fn elapsed_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }
}

/// The clock was not made to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this clock cannot be moved")]
pub struct Fixed;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_moves_forward_alone_and_only_if_made_for_it() {
        let clock = Clock::movable();
        let copy = clock;
        clock.move_to(60_000).unwrap();
        let moved = copy.now_ms();
        assert!((60_000..=60_000 + clock.elapsed_ms()).contains(&moved), "{moved}");
        clock.move_to(1_000).unwrap();
        assert!(copy.now_ms() >= moved, "never back");
        assert_eq!(Clock::start().move_to(1), Err(Fixed));
    }
}
