//! Which generation it was when: a clock may be set, so what it says now tells nothing of what it said when a block was put.

use crate::table::Generation;
use kvasir_os::planted::{self, Bug};
use parking_lot::Mutex;

/// Moments remembered, at most: 96 KiB.
const TIMES_MAX: usize = 4096;

/// What clocks said at one time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moment {
    /// The host's own clock, which nobody sets back.
    pub(super) ms: u64,
    /// The clock on the wall, in µs since 1970.
    pub(super) wall_us: u64,
    /// No generation was later. Ahead of the clock on the wall where another host's is, and stands still until that has caught up.
    pub(super) generation: Generation,
}

/// Moments, by the host's own clock.
#[derive(Default)]
pub(super) struct Past(Mutex<Vec<Moment>>);

impl Past {
    /// It is `now`. Called often: what lies between two calls is told as if the first one's clock had gone on.
    pub(super) fn note(&self, now: Moment) {
        let mut times = self.0.lock();
        if times.last().is_some_and(|last| last.ms >= now.ms) {
            return;
        }
        if times.len() == TIMES_MAX {
            // The longer ago, the less exactly.
            let mut keep = false;
            times.retain(|_| {
                keep = !keep;
                keep
            });
        }
        times.push(now);
    }

    /// The generation that it was at a time up to the last one noted, or an earlier one: a ms is not always 1000 µs after the last.
    pub(super) fn at(&self, ms: u64) -> Generation {
        let times = self.0.lock();
        let known = if planted::is(Bug::TrustsTheClockOfNow) { times.len().saturating_sub(1) } else { 0 };
        let times = &times[known..];
        let next = times.partition_point(|moment| moment.ms <= ms);
        match (next.checked_sub(1).map(|before| times[before]), times.get(next)) {
            (Some(before), next) => {
                let clock = before.wall_us.saturating_add(us((ms - before.ms).saturating_sub(1)));
                let went_on = before.generation.max(Generation(clock));
                next.map_or(went_on, |next| went_on.min(next.generation))
            }
            (None, Some(first)) => Generation(first.generation.0.saturating_sub(us(first.ms - ms + 1))),
            (None, None) => Generation(0),
        }
    }
}

fn us(ms: u64) -> u64 {
    ms.saturating_mul(1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a host that follows no other: what its clock says is its generation.
    fn past(times: &[(u64, u64)]) -> Past {
        let past = Past::default();
        times.iter().for_each(|&(ms, at)| past.note(Moment { ms, wall_us: at, generation: Generation(at) }));
        past
    }

    #[test]
    fn what_is_ahead_of_the_clock_stands_still_until_that_has_caught_up() {
        let past = Past::default();
        for (ms, wall_us, ahead) in [(100, 5_000_000, 7_000_000), (300, 5_200_000, 7_000_040)] {
            past.note(Moment { ms, wall_us, generation: Generation(ahead) });
        }
        for (ms, at) in
            [(100, 7_000_000), (299, 7_000_000), (300, 7_000_040), (2100, 7_000_040), (2201, 7_100_000)]
        {
            assert_eq!(past.at(ms), Generation(at), "{ms}");
        }
    }

    #[test]
    fn a_clock_that_was_set_had_said_what_it_said() {
        let past = past(&[(100, 5_000_000), (300, 5_200_000), (500, 9_000_000), (700, 9_000_001)]);
        for (ms, at) in [
            (0, 4_899_000),
            (100, 5_000_000),
            (250, 5_149_000),
            (499, 5_398_000),
            (500, 9_000_000),
            (600, 9_000_001),
            (700, 9_000_001),
            (800, 9_099_001),
        ] {
            assert_eq!(past.at(ms), Generation(at), "{ms}");
        }
        assert_eq!(Past::default().at(7), Generation(0));
    }

    #[test]
    fn what_was_long_ago_is_told_less_exactly() {
        let all = 10 * TIMES_MAX as u64;
        let times: Vec<_> = (0..all).map(|n| (200 * n, 1_000_000 + 200_000 * n)).collect();
        let past = past(&times);
        let remembered: Vec<u64> = past.0.lock().iter().map(|moment| moment.ms).collect();
        assert!(remembered.len() <= TIMES_MAX);
        for (ms, at) in times {
            let earlier = if remembered.contains(&ms) { 0 } else { 1000 };
            assert_eq!(past.at(ms), Generation(at - earlier), "{ms}");
        }
    }
}
