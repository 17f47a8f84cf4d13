//! What the benches share. Run them with `cargo xtask bench --criterion`, or `--languages`.

use kvasir::policy::evictor::EvictorEngine;
use kvasir_policy::evictor::{Event, EventKind, Layout, NO_SLOT, Victim};
use std::hint::black_box;

/// Victims asked for at once.
pub const WANT: u32 = 32;

/// Whether numbers are wanted: `cargo bench` says so, `cargo test` runs each bench once.
pub fn measuring() -> bool {
    std::env::args().any(|arg| arg == "--bench")
}

/// A full pool: some victims are chosen, and blocks inserted where they were.
pub struct Pool {
    evictor: Box<dyn EvictorEngine>,
    now_ms: u64,
    victims: Vec<Victim>,
    words: Vec<u32>,
}

impl Pool {
    /// # Panics
    /// The evictor fails.
    pub fn full(mut evictor: Box<dyn EvictorEngine>, slots: u32) -> Self {
        evictor.open(&Layout::of(slots).encode()).expect("the pool is within limits");
        let mut pool = Self { evictor, now_ms: 0, victims: Vec::new(), words: Vec::new() };
        for first in (0..slots).step_by(WANT as usize) {
            pool.insert(first..slots.min(first + WANT));
        }
        pool
    }

    fn insert(&mut self, slots: impl Iterator<Item = u32>) {
        self.now_ms += 1;
        let (base_ms, time_ms) = (self.now_ms, self.now_ms);
        self.words.clear();
        for slot in slots {
            let event = Event {
                kind: EventKind::Insert,
                replayed: false,
                class: (slot % 16) as u16,
                slot,
                parent_or_uses: NO_SLOT,
                depth: slot % 64,
                size_bytes: 1 << 20,
                time_ms,
                identity: time_ms << 32 | u64::from(slot),
                tenant: 0,
            };
            event.encode(base_ms, &mut self.words);
        }
        self.evictor.on_events(base_ms, &self.words).expect("the policy takes events");
    }

    /// Chooses [`WANT`] victims and inserts as many blocks.
    ///
    /// # Panics
    /// The evictor fails.
    pub fn turn_over(&mut self) {
        let mut victims = std::mem::take(&mut self.victims);
        victims.clear();
        self.evictor.select_victims(self.now_ms, WANT, &mut victims).expect("the policy chooses");
        assert_eq!(victims.len(), WANT as usize, "a full pool has victims");
        self.insert(victims.iter().map(|victim| victim.slot));
        self.victims = black_box(victims);
    }
}
