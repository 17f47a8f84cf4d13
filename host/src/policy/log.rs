//! What policies say: a bounded ring per slot, rate-limited (`log.log` of the contract).

use super::fault::TEXT_BYTES as LINE_BYTES;
use crate::text::printable;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

const LINES: usize = 1_000;
/// Lines of the host itself, kept apart so that a policy that floods its log cannot hide why it was taken
/// out of service.
const HOST_LINES: usize = 100;
const LINES_PER_SECOND: u32 = 100;

/// One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLine {
    /// Time since the host started.
    pub at: Duration,
    /// 1 error, 2 warning, 3 information, 4 debug.
    pub level: u32,
    pub text: String,
}

/// The ring; lines over the rate are dropped and counted.
pub struct Log {
    start: Instant,
    ring: Mutex<Ring>,
}

#[derive(Default)]
struct Ring {
    lines: VecDeque<LogLine>,
    host: VecDeque<LogLine>,
    second: u64,
    in_second: u32,
    dropped: u64,
}

impl Default for Log {
    fn default() -> Self {
        Self { start: Instant::now(), ring: Mutex::default() }
    }
}

impl Log {
    pub fn add(&self, level: u32, message: &str) {
        let at = self.start.elapsed();
        let mut ring = self.ring.lock();
        if ring.second != at.as_secs() {
            ring.second = at.as_secs();
            ring.in_second = 0;
        }
        if ring.in_second == LINES_PER_SECOND {
            ring.dropped += 1;
            return;
        }
        ring.in_second += 1;
        if ring.lines.len() == LINES {
            ring.lines.pop_front();
        }
        let level = if (1..=4).contains(&level) { level } else { 4 };
        let text = printable(message, LINE_BYTES);
        ring.lines.push_back(LogLine { at, level, text });
    }

    /// What the host has to say about the slot; also in the daemon's own log.
    pub fn add_host(&self, level: u32, message: &str) {
        let text = printable(message, LINE_BYTES);
        tracing::warn!("{text}");
        let line = LogLine { at: self.start.elapsed(), level, text };
        let mut ring = self.ring.lock();
        if ring.host.len() == HOST_LINES {
            ring.host.pop_front();
        }
        ring.host.push_back(line);
    }

    /// The lines kept, oldest first, and how many were dropped so far.
    pub fn read(&self) -> (Vec<LogLine>, u64) {
        let ring = self.ring.lock();
        let mut lines: Vec<_> = ring.lines.iter().chain(&ring.host).cloned().collect();
        lines.sort_by_key(|line| line.at);
        (lines, ring.dropped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_does_not_hide_what_the_host_says() {
        let log = Log::default();
        let flood = || (0..LINES_PER_SECOND * 2).for_each(|_| log.add(3, "noise"));
        flood();
        log.add_host(1, "taken out of service");
        flood();
        assert!(log.read().0.iter().any(|line| line.text == "taken out of service"));
    }

    #[test]
    fn a_line_is_one_line() {
        let log = Log::default();
        log.add(1, "done\n   0.001 s error forged \u{1b}[2J");
        assert_eq!(log.read().0[0].text, r"done\n   0.001 s error forged \u{1b}[2J");
    }

    #[test]
    fn keeps_what_the_rate_allows_and_counts_the_rest() {
        let log = Log::default();
        for _ in 0..LINES_PER_SECOND * 3 {
            log.add(9, &"é".repeat(LINE_BYTES));
        }
        let (lines, dropped) = log.read();
        assert_eq!(lines.len() as u64 + dropped, u64::from(LINES_PER_SECOND * 3));
        assert!(dropped > 0 && lines.len() <= LINES);
        assert!(lines.iter().all(|l| l.level == 4 && l.text.len() <= LINE_BYTES + 4));
    }
}
