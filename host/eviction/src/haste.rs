//! Whether puts that wait for memory wait for copies to a tier, or take victims without one (`tiering.backpressure`).
//!
//! A victim that goes without a copy leaves a hole in its chain, and behind a hole nothing is found. So a put waits for the tier, as
//! long as that is of use: not beyond the setting, and if it was in vain, not again for a while.

use kvasir_os::time::{Duration, Instant};
use kvasir_store::dram::Pressure;

/// After a put has waited in vain, none does for as long, and each time that follows soon for twice as long, up to so many times: a tier
/// that stalls once costs few copies, and one that is always slow takes 5 % of the time of puts.
const IMPATIENT: u32 = 20;

/// What becomes of victims for which the queue of copies has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Haste {
    /// They stay: puts wait for copies.
    Patient,
    /// They go once memory is really short: no put waits, and none would wait for copies.
    None,
    /// They go, and half of those that would find room do, too: a put waits for any memory.
    Urgent,
}

#[derive(Debug, Default)]
pub(crate) struct Patience {
    /// Until then no put waits for copies.
    none_until: Option<Instant>,
    /// How many times as long as a put had waited.
    times: u32,
}

impl Patience {
    /// `most`: how long a put may wait for copies. `copies`: some are under way, or may begin.
    pub(crate) fn haste(&mut self, pressure: &Pressure, most: Duration, copies: bool, now: Instant) -> Haste {
        let waits = pressure.waiting_puts > 0;
        let is_patient = self.none_until.is_none_or(|until| now >= until);
        if copies && is_patient && (waits || !pressure.slots_full) {
            if pressure.longest_wait < most {
                return Haste::Patient;
            }
            let soon = self.none_until.is_some_and(|until| now < until + IMPATIENT * most);
            self.times = if soon { (2 * self.times).min(IMPATIENT) } else { 1 };
            self.none_until = Some(now + self.times * most);
        }
        if waits || pressure.slots_full { Haste::Urgent } else { Haste::None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_millis(20);

    fn waiting(puts: usize, longest_ms: u64) -> Pressure {
        Pressure {
            pool_bytes: 1 << 20,
            free_bytes: 0,
            low_bytes: 1 << 16,
            high_bytes: 1 << 17,
            reserve: 0,
            reserve_max: 64,
            waiting_puts: puts,
            longest_wait: Duration::from_millis(longest_ms),
            slots_full: false,
        }
    }

    #[test]
    fn puts_wait_for_copies_for_a_while_and_after_that_was_in_vain_not_for_longer() {
        let (mut patience, start) = (Patience::default(), Instant::now());
        let mut at =
            |ms, pressure: Pressure| patience.haste(&pressure, MOST, true, start + Duration::from_millis(ms));
        assert_eq!(at(0, waiting(0, 0)), Haste::Patient);
        assert_eq!(at(1, waiting(2, 0)), Haste::Patient);
        assert_eq!(at(20, waiting(2, 19)), Haste::Patient);
        assert_eq!(at(21, waiting(2, 20)), Haste::Urgent);
        assert_eq!(at(22, waiting(1, 0)), Haste::Urgent, "it was in vain");
        assert_eq!(at(23, waiting(0, 0)), Haste::None);
        assert_eq!(at(40, waiting(1, 0)), Haste::Urgent);
        assert_eq!(at(41, waiting(1, 0)), Haste::Patient);
        // Again and again: for twice as long each time, but not for ever.
        let mut now = 41;
        for times in [2, 4, 8, 16, 20, 20] {
            assert_eq!(at(now, waiting(1, 20)), Haste::Urgent);
            assert_eq!(at(now + 20 * times - 1, waiting(1, 0)), Haste::Urgent);
            now += 20 * times;
            assert_eq!(at(now, waiting(1, 0)), Haste::Patient);
        }
        now += 20 * 20;
        assert_eq!(at(now, waiting(1, 20)), Haste::Urgent);
        assert_eq!(at(now + 20, waiting(1, 0)), Haste::Patient, "the last time was long ago");
    }

    #[test]
    fn nothing_is_waited_for_where_nothing_comes() {
        let now = Instant::now();
        let mut patience = Patience::default();
        assert_eq!(patience.haste(&waiting(1, 0), MOST, false, now), Haste::Urgent, "no copies");
        assert_eq!(patience.haste(&waiting(1, 0), Duration::ZERO, true, now), Haste::Urgent, "switched off");
        assert_eq!(patience.haste(&waiting(0, 0), Duration::ZERO, true, now), Haste::None);
        let refused = Pressure { slots_full: true, ..waiting(0, 0) };
        assert_eq!(patience.haste(&refused, MOST, true, now), Haste::Urgent, "a put was refused");
    }
}
