//! The table clock: `f32` milliseconds since an origin that moves before the resolution suffers.

/// `f32` has 24 bits: below 2^20 ms the table clock resolves 1/16 ms.
const SPAN_MS: u64 = 1 << 20;

/// Maps host milliseconds to the clock on which policies see time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableClock {
    origin_ms: u64,
}

impl TableClock {
    pub fn new(now_ms: u64) -> Self {
        Self { origin_ms: now_ms }
    }

    /// Time on the table clock; what lies before the origin is negative.
    pub fn at(&self, time_ms: f64) -> f32 {
        (time_ms - self.origin_ms as f64) as f32
    }

    /// Moves the origin to `now_ms` if the span is used up; then every row must be pushed again.
    pub fn rebase(&mut self, now_ms: u64) -> bool {
        let due = now_ms.saturating_sub(self.origin_ms) >= SPAN_MS;
        if due {
            self.origin_ms = now_ms;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rebases_before_resolution_is_lost() {
        let mut clock = TableClock::new(1_000);
        assert_eq!(clock.at(1_500.5), 500.5);
        assert_eq!(clock.at(0.0), -1_000.0);
        assert!(!clock.rebase(1_000 + SPAN_MS - 1));
        assert_eq!(clock.at((1_000 + SPAN_MS - 1) as f64 + 0.0625), (SPAN_MS - 1) as f32 + 0.0625);
        assert!(clock.rebase(1_000 + SPAN_MS));
        assert_eq!(clock.at((1_000 + SPAN_MS) as f64), 0.0);
        assert!(!clock.rebase(0), "a clock that goes back does not move the origin");
    }
}
