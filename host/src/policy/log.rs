//! What policies say: a bounded ring per slot, rate-limited (`log.log` of the contract).

use super::fault::TEXT_BYTES as LINE_BYTES;
use crate::calendar::unix_ms;
use crate::text::printable;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::time::Instant;

const LINES: usize = 1_000;
/// Lines of the host itself, kept apart so that a policy that floods its log cannot hide why it was taken
/// out of service.
const HOST_LINES: usize = 100;
const LINES_PER_SECOND: u32 = 100;

/// One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLine {
    /// From 1, without gaps, in the order of the lines of one slot since the host started.
    pub number: u64,
    /// Unix time in milliseconds.
    pub at_ms: u64,
    /// 1 error, 2 warning, 3 information, 4 debug.
    pub level: u32,
    pub text: String,
}

/// What is kept of a log behind some line of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogPage {
    /// Oldest first.
    pub lines: Vec<LogLine>,
    /// When the log began, in milliseconds of Unix time; it tells a log from the one after a restart.
    pub began_ms: u64,
    /// Lines behind that line which newer ones have pushed out.
    pub lost: u64,
    /// Lines over the rate limit since the log began; they were never kept, and have no number.
    pub dropped: u64,
}

/// The ring; lines over the rate are dropped and counted.
pub struct Log {
    start: Instant,
    began_ms: u64,
    ring: Mutex<Ring>,
}

#[derive(Default)]
struct Ring {
    lines: VecDeque<LogLine>,
    host: VecDeque<LogLine>,
    /// Number of the newest line.
    newest: u64,
    second: u64,
    in_second: u32,
    dropped: u64,
}

impl Ring {
    fn line(&mut self, at_ms: u64, level: u32, text: String) -> LogLine {
        self.newest += 1;
        LogLine { number: self.newest, at_ms, level, text }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self { start: Instant::now(), began_ms: unix_ms(), ring: Mutex::default() }
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
        let line = ring.line(self.began_ms + at.as_millis() as u64, level, printable(message, LINE_BYTES));
        ring.lines.push_back(line);
    }

    /// What the host has to say about the slot; also in the daemon's own log.
    pub fn add_host(&self, level: u32, message: &str) {
        let text = printable(message, LINE_BYTES);
        tracing::warn!("{text}");
        let at_ms = self.began_ms + self.start.elapsed().as_millis() as u64;
        let mut ring = self.ring.lock();
        let line = ring.line(at_ms, level, text);
        if ring.host.len() == HOST_LINES {
            ring.host.pop_front();
        }
        ring.host.push_back(line);
    }

    /// The lines kept, oldest first, and how many were dropped so far.
    pub fn read(&self) -> (Vec<LogLine>, u64) {
        let page = self.page(0);
        (page.lines, page.dropped)
    }

    /// The lines kept behind line `after`. 0 means all.
    pub fn page(&self, after: u64) -> LogPage {
        let ring = self.ring.lock();
        let behind = |line: &&LogLine| line.number > after;
        let mut lines: Vec<_> = ring.lines.iter().chain(&ring.host).filter(behind).cloned().collect();
        lines.sort_by_key(|line| line.number);
        let lost = ring.newest.saturating_sub(after) - lines.len() as u64;
        LogPage { lines, began_ms: self.began_ms, lost, dropped: ring.dropped }
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

    #[test]
    fn a_reader_that_comes_again_misses_nothing_unheard() {
        let log = Log::default();
        let (mut seen, mut lost) = (0, 0);
        for round in 0..4_000 {
            log.add(3, "guest");
            log.add_host(3, "host");
            if round % 150 == 0 {
                let page = log.page(seen);
                lost += page.lost;
                for line in page.lines {
                    assert!(line.number > seen, "{} twice", line.number);
                    seen = line.number;
                }
            }
        }
        let page = log.page(seen);
        assert_eq!(page.lines.last().map(|line| line.number), Some(log.ring.lock().newest));
        assert!(lost > 0, "more lines of the host between two looks than are kept");
        let none = LogPage { lines: Vec::new(), lost: 0, ..page.clone() };
        assert_eq!(log.page(page.lines.last().unwrap().number), none);
        assert_eq!(log.page(u64::MAX).lost, 0, "a number from before a restart");
    }
}
