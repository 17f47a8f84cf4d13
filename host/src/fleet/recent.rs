//! What changed in the tables lately, in bounded memory.

use super::Changes;

/// What a worker's policy was told since the last decision that was kept to be explained.
#[derive(Debug)]
pub struct Recent {
    pub changes: Changes,
    /// Too much changed: the tables must be copied whole.
    pub start_over: bool,
}

/// Nothing is known of the tables yet.
impl Default for Recent {
    fn default() -> Self {
        Self { changes: Changes::default(), start_over: true }
    }
}

impl Recent {
    /// With more values than these, the tables are copied whole.
    pub const VALUES_MAX: usize = 4_096;

    pub fn note(&mut self, told: &Changes) {
        let kept = &mut self.changes;
        let values = kept.prefill.len() + kept.decode.len() + kept.links.len();
        if self.start_over || told.open.is_some() || values > Self::VALUES_MAX {
            self.start_over = true;
            return self.clear();
        }
        kept.prefill.extend_from_slice(&told.prefill);
        kept.decode.extend_from_slice(&told.decode);
        kept.links.extend_from_slice(&told.links);
    }

    pub fn clear(&mut self) {
        self.changes.prefill.clear();
        self.changes.decode.clear();
        self.changes.links.clear();
    }
}
