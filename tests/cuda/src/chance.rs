//! Times that work waits before it is done: random, and the same for the same seed.

use std::sync::LazyLock;
use std::thread;
use std::time::Duration;

static SEED: LazyLock<u64> = LazyLock::new(|| number("KVASIR_CUDA_SEED", 1));
/// The longest wait before a piece of work, as a rule.
static DELAY_US: LazyLock<u64> = LazyLock::new(|| number("KVASIR_CUDA_DELAY_US", 200));
/// Now and then a stream stalls for as many of these, so that the others overtake it.
const STALL: u64 = 15;

pub(crate) fn number(variable: &str, default: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{variable} must be a number, and is {text:?}")),
        Err(_) => default,
    }
}

/// SplitMix64, a sequence of its own for each stream.
pub(crate) struct Chance(u64);

impl Chance {
    pub(crate) fn of(stream: u64) -> Self {
        let mut seed = Self(*SEED);
        Self(seed.next() ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Sleeps: every second time, and once in a while for long.
    pub(crate) fn delay(&mut self) {
        let us = match self.below(32) {
            0 => *DELAY_US * STALL,
            1..=16 => self.below(*DELAY_US + 1),
            _ => return,
        };
        thread::sleep(Duration::from_micros(us));
    }

    pub(crate) fn shuffle<T>(&mut self, list: &mut [T]) {
        for n in (1..list.len()).rev() {
            let other = self.below(n as u64 + 1) as usize;
            list.swap(n, other);
        }
    }
}
