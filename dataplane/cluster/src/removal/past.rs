//! Which generation it was when: a clock may be set, so what it says now tells nothing of what it said when a block was put.

use crate::table::Generation;
use kvasir_os::planted::{self, Bug};
use parking_lot::Mutex;

/// Times remembered, at most: 64 KiB.
const TIMES_MAX: usize = 4096;

/// Generations by the time of the host's own clock (ms), which nobody sets back.
#[derive(Default)]
pub(super) struct Past(Mutex<Vec<(u64, Generation)>>);

impl Past {
    /// It is `now`. Called often: what lies between two calls is told as if the first one's clock had gone on.
    pub(super) fn note(&self, now_ms: u64, now: Generation) {
        let mut times = self.0.lock();
        if times.last().is_some_and(|&(last_ms, _)| last_ms >= now_ms) {
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
        times.push((now_ms, now));
    }

    /// The generation that it was at a time up to the last one noted.
    pub(super) fn at(&self, ms: u64) -> Generation {
        let times = self.0.lock();
        let known = if planted::is(Bug::TrustsTheClockOfNow) { times.len().saturating_sub(1) } else { 0 };
        let times = &times[known..];
        let next = times.partition_point(|&(at_ms, _)| at_ms <= ms);
        let us = |ms: u64| ms.saturating_mul(1000);
        match (next.checked_sub(1).map(|before| times[before]), times.get(next)) {
            (Some((at_ms, Generation(at))), next) => {
                let went_on = at.saturating_add(us(ms - at_ms));
                Generation(next.map_or(went_on, |&(_, Generation(next))| went_on.min(next)))
            }
            (None, Some(&(first_ms, Generation(first)))) => {
                Generation(first.saturating_sub(us(first_ms - ms)))
            }
            (None, None) => Generation(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn past(times: &[(u64, u64)]) -> Past {
        let past = Past::default();
        times.iter().for_each(|&(ms, at)| past.note(ms, Generation(at)));
        past
    }

    #[test]
    fn a_clock_that_was_set_had_said_what_it_said() {
        let past = past(&[(100, 5_000_000), (300, 5_200_000), (500, 9_000_000), (700, 9_000_001)]);
        for (ms, at) in [
            (0, 4_900_000),
            (100, 5_000_000),
            (250, 5_150_000),
            (499, 5_399_000),
            (500, 9_000_000),
            (600, 9_000_001),
            (700, 9_000_001),
            (800, 9_100_001),
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
        assert!(past.0.lock().len() <= TIMES_MAX);
        for (ms, at) in times {
            assert_eq!(past.at(ms), Generation(at), "{ms}");
        }
    }
}
