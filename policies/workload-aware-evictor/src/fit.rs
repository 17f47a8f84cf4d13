//! What is learned about the classes: samples, and the distributions fitted to them.

use crate::CLASSES;
use kvasir_policy::{Description, math};

/// Parameters of the learning.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// Time constant of the decay of samples' weight.
    pub(crate) forget_ms: f64,
    pub(crate) refit_ms: f64,
    /// Weight of the global fit in every class, in blocks.
    pub(crate) pseudo_blocks: f64,
    /// The most evicted blocks remembered.
    pub(crate) ghost_blocks: f64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { forget_ms: 900e3, refit_ms: 10e3, pseudo_blocks: 50.0, ghost_blocks: 131_072.0 }
    }
}

impl Settings {
    pub(crate) fn describe(description: Description) -> Description {
        let default = Self::default();
        description
            .setting("forget", default.forget_ms / 1e3, "seconds over which samples lose their weight")
            .setting("refit", default.refit_ms / 1e3, "seconds between fits")
            .setting("pseudo-blocks", default.pseudo_blocks, "blocks' worth of the global fit in each class")
            .setting(
                "ghost-blocks",
                default.ghost_blocks,
                "evicted blocks remembered to learn from their return, 24 bytes each; \
                 rounded up to a power of two, 0 for none",
            )
    }

    pub(crate) fn parse(settings: &kvasir_policy::Settings) -> Result<Self, String> {
        Ok(Self {
            forget_ms: settings.number("forget", 1.0..=1e7)? * 1e3,
            refit_ms: settings.number("refit", 0.1..=1e5)? * 1e3,
            pseudo_blocks: settings.number("pseudo-blocks", 0.0..=1e9)?,
            ghost_blocks: settings.number("ghost-blocks", 0.0..=262_144.0)?,
        })
    }

    pub(crate) fn ghost_slots(&self) -> usize {
        if self.ghost_blocks < 1.0 { 0 } else { (self.ghost_blocks as usize).next_power_of_two() }
    }
}

/// Recent uses of one class's blocks, aged.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Samples {
    /// Uses, including the first one of a block.
    pub(crate) uses: f64,
    /// Uses that were followed by another.
    pub(crate) reuses: f64,
    /// Sum of the times between the two.
    pub(crate) gaps_ms: f64,
    /// Blocks seen for the first time.
    pub(crate) blocks: f64,
}

impl Samples {
    pub(crate) fn reuse(&mut self, gap_ms: f64) {
        self.reuses += 1.0;
        self.gaps_ms += gap_ms;
    }

    fn fields(&mut self) -> [&mut f64; 4] {
        [&mut self.uses, &mut self.reuses, &mut self.gaps_ms, &mut self.blocks]
    }
}

/// Lets samples lose weight over `elapsed_ms`.
pub(crate) fn age(samples: &mut [Samples; CLASSES], elapsed_ms: f64, settings: &Settings) {
    let factor = math::exp(-elapsed_ms / settings.forget_ms);
    samples.iter_mut().flat_map(Samples::fields).for_each(|field| *field *= factor);
}

/// The reuse of one class's blocks as an exponential distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Fit {
    /// `ln(p (1 - exp(-rate life)))`.
    log_weight: f64,
    rate_per_ms: f64,
}

/// Before the first sample all classes are alike, so the least recently used block goes.
impl Default for Fit {
    fn default() -> Self {
        Self { log_weight: 0.0, rate_per_ms: 1e-5 }
    }
}

impl Fit {
    /// Logarithm of `p (F(t + life) - F(t))` for a block last used `age_ms` ago.
    pub(crate) fn log_priority(&self, age_ms: f64) -> f64 {
        self.log_weight - self.rate_per_ms * age_ms
    }
}

/// Fits every class, each drawn toward the fit of all together.
pub(crate) fn refit(samples: &[Samples; CLASSES], fits: &mut [Fit; CLASSES], settings: &Settings) {
    let sum = |field: fn(&Samples) -> f64| samples.iter().map(field).sum::<f64>();
    let (uses, reuses) = (sum(|s| s.uses), sum(|s| s.reuses));
    let (gaps_ms, blocks) = (sum(|s| s.gaps_ms), sum(|s| s.blocks));
    if reuses < 1.0 || uses < 1.0 {
        return;
    }
    let (share, gap_ms, life_ms) = (reuses / uses, gaps_ms / reuses, gaps_ms / blocks.max(1.0));
    let k = settings.pseudo_blocks;
    for (s, fit) in samples.iter().zip(fits) {
        // For a class without a sample, and without pseudo-blocks: the global fit.
        let drawn = |sum: f64, count: f64, global: f64, k: f64| {
            if count + k > 0.0 { (sum + k * global) / (count + k) } else { global }
        };
        let share = drawn(s.reuses, s.uses, share, k);
        let gap_ms = drawn(s.gaps_ms, s.reuses, gap_ms, k * share).max(1.0);
        let life_ms = drawn(s.gaps_ms, s.blocks, life_ms, k).max(1.0);
        fit.rate_per_ms = 1.0 / gap_ms;
        fit.log_weight = math::ln(share * -math::expm1(-life_ms / gap_ms));
    }
}

const STATE_VERSION: u8 = 1;

/// Version, then the samples of every class as little-endian floats.
pub(crate) fn export(samples: &[Samples; CLASSES]) -> Vec<u8> {
    let mut samples = *samples;
    let fields = samples.iter_mut().flat_map(Samples::fields);
    std::iter::once(STATE_VERSION).chain(fields.flat_map(|field| field.to_le_bytes())).collect()
}

pub(crate) fn import(state: &[u8]) -> Result<[Samples; CLASSES], String> {
    let mut samples = [Samples::default(); CLASSES];
    let fields = state.strip_prefix(&[STATE_VERSION]).filter(|fields| fields.len() == CLASSES * 32);
    let Some(fields) = fields else {
        return Err(format!("{} bytes are not a state of version {STATE_VERSION}", state.len()));
    };
    let (values, _) = fields.as_chunks::<8>();
    for (field, bytes) in samples.iter_mut().flat_map(Samples::fields).zip(values) {
        *field = f64::from_le_bytes(*bytes);
        if !(0.0..=1e18).contains(field) {
            return Err(format!("the state holds a sample of {field}"));
        }
    }
    Ok(samples)
}
