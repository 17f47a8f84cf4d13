//! The cluster that a replay simulates, as flags describe it.

use crate::replay::cluster::Setup;
use crate::replay::profile::Profile;
use anyhow::{Context, Result};

/// A cluster in virtual time.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct ClusterFlags {
    /// Instances that do prefill only [default: 4, or 0 with --both].
    #[arg(long, value_name = "N")]
    prefill: Option<u32>,
    /// Instances that decode only [default: 4, or 0 with --both].
    #[arg(long, value_name = "N")]
    decode: Option<u32>,
    /// Instances that do both [default: 0].
    #[arg(long, value_name = "N")]
    both: Option<u32>,
    /// Model that they serve, a built-in name or a file: with --hardware, what their work takes is computed from both, and so is
    /// their memory [default: costs of about a 70B model on 8 GPUs].
    #[arg(long, value_name = "NAME|FILE.toml", requires = "hardware")]
    model: Option<String>,
    /// Machine of each instance, a built-in name or a file.
    #[arg(long, value_name = "NAME|FILE.toml", requires = "model")]
    hardware: Option<String>,
    /// GPUs of each instance [default: what the hardware says].
    #[arg(long, value_name = "N", requires = "hardware")]
    gpus: Option<u32>,
    /// Prefix cache of an instance that does prefill, in blocks [default: 6000 of 512 tokens, as much memory with other blocks].
    #[arg(long, value_name = "N")]
    pool_blocks: Option<u32>,
    /// Memory for the batch of an instance that decodes, in blocks [default: 3000 of 512 tokens].
    #[arg(long, value_name = "N")]
    decode_blocks: Option<u32>,
    /// Instances that do both compute prompts a part at a time: so many tokens a step, less one for each sequence of the batch
    /// [default: in one go, while the batch stands still].
    #[arg(long, value_name = "N")]
    chunk_tokens: Option<u32>,
    /// Requests are handed over layer by layer while their prompts are computed [default: when these are].
    #[arg(long)]
    layer_wise: bool,
    /// Racks over which the instances of each role are spread [default: 1].
    #[arg(long, value_name = "N")]
    racks: Option<u32>,
    /// What the instances of a rack can send together, beside what the rack can send to others [default: 1].
    #[arg(long, value_name = "X", requires = "racks")]
    oversubscription: Option<f64>,
    /// Time to the first token that requests ask for, or `none` [default: 30s].
    #[arg(long, value_name = "TIME", value_parser = slo)]
    ttft_slo: Option<f32>,
    /// Time between tokens that requests ask for, or `none` [default: 100ms].
    #[arg(long, value_name = "TIME", value_parser = slo)]
    tbt_slo: Option<f32>,
    /// Instances that decode turn away who comes from prefill, if their steps would take longer than --tbt-slo with it.
    #[arg(long)]
    check_at_decode: bool,
    /// Seed of the chance that requests bring to policies [default: 1].
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Send requests at the times of the trace, X times as fast [cluster: 1; mode store: without waiting].
    #[arg(long, value_name = "X", value_parser = speed)]
    pub speed: Option<f64>,
}

impl ClusterFlags {
    pub(crate) const NAMES: &str = "--prefill, --decode, --both, --model, --hardware, --gpus, --pool-blocks, --decode-blocks, --chunk-tokens, --layer-wise, --racks, --oversubscription, --ttft-slo, --tbt-slo, --check-at-decode, --seed, --speed";

    /// Whether any of them was given.
    pub(crate) fn any(&self) -> bool {
        self.speed.is_some() || self.any_but_speed()
    }

    pub(crate) fn any_but_speed(&self) -> bool {
        let Self { prefill, decode, both, model, hardware, gpus, .. } = self;
        let Self { pool_blocks, decode_blocks, chunk_tokens, racks, oversubscription, .. } = self;
        let Self { ttft_slo, tbt_slo, check_at_decode, layer_wise, seed, speed: _, .. } = self;
        let numbers = [prefill, decode, both, gpus, pool_blocks, decode_blocks, chunk_tokens, racks];
        let named = model.is_some() || hardware.is_some();
        named
            || numbers.iter().any(|number| number.is_some())
            || oversubscription.is_some()
            || ttft_slo.is_some()
            || tbt_slo.is_some()
            || *check_at_decode
            || *layer_wise
            || seed.is_some()
    }

    /// `block_size_tokens`: of the trace.
    ///
    /// # Errors
    /// Such a cluster cannot be simulated.
    pub(crate) fn setup(&self, block_size_tokens: u32) -> Result<Setup> {
        let default = match (&self.model, &self.hardware) {
            (Some(model), Some(hardware)) => {
                Setup::of_profile(&Profile::open(model, hardware, self.gpus)?, block_size_tokens)
            }
            _ => Setup::of_blocks(block_size_tokens),
        };
        let apart = |count: Option<u32>, usual| count.unwrap_or(if self.both.is_some() { 0 } else { usual });
        let setup = Setup {
            prefill: apart(self.prefill, default.prefill),
            decode: apart(self.decode, default.decode),
            both: self.both.unwrap_or(0),
            pool_blocks: self.pool_blocks.unwrap_or(default.pool_blocks),
            decode_blocks: self.decode_blocks.unwrap_or(default.decode_blocks),
            chunk_tokens: self.chunk_tokens.unwrap_or(default.chunk_tokens),
            layer_wise: self.layer_wise,
            racks: self.racks.unwrap_or(default.racks),
            oversubscription: self.oversubscription.unwrap_or(default.oversubscription),
            ttft_slo_ms: self.ttft_slo.unwrap_or(default.ttft_slo_ms),
            tbt_slo_ms: self.tbt_slo.unwrap_or(default.tbt_slo_ms),
            check_at_decode: self.check_at_decode,
            seed: self.seed.unwrap_or(default.seed),
            speed: self.speed.unwrap_or(default.speed),
            ..default
        };
        setup.check()?;
        Ok(setup)
    }
}

/// Milliseconds.
fn slo(text: &str) -> Result<f32> {
    if text == "none" {
        return Ok(f32::INFINITY);
    }
    let time = humantime::parse_duration(text).ok().filter(|time| !time.is_zero());
    let time =
        time.with_context(|| format!("`{text}` is no time above 0 such as 30s or 100ms, and not `none`"))?;
    Ok(time.as_secs_f32() * 1e3)
}

fn speed(text: &str) -> Result<f64> {
    let known = text.parse().ok().filter(|speed: &f64| speed.is_finite() && *speed > 0.0);
    known.with_context(|| format!("`{text}` is not a number above 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_speeds_are_above_0() {
        for bad in ["0", "-1", "inf", "NaN", "fast"] {
            assert!(speed(bad).is_err() && slo(bad).is_err(), "{bad}");
        }
        assert_eq!((slo("100ms").unwrap(), slo("none").unwrap()), (100.0, f32::INFINITY));
    }

    #[test]
    fn other_blocks_have_the_same_memory() {
        let setup = |tokens| ClusterFlags::default().setup(tokens).unwrap();
        assert_eq!(setup(512), Setup::default());
        let small = setup(16);
        assert_eq!((small.pool_blocks, small.decode_blocks, small.block_size_tokens), (192_000, 96_000, 16));
        assert_eq!(small.transfer.ms_per_block * 32.0, Setup::default().transfer.ms_per_block);
        let given = ClusterFlags { pool_blocks: Some(7), ..Default::default() }.setup(16).unwrap();
        assert_eq!(given.pool_blocks, 7);
    }

    #[test]
    fn instances_that_do_both_take_the_place_of_others() {
        let counts = |flags: ClusterFlags| {
            let Setup { prefill, decode, both, .. } = flags.setup(512).unwrap();
            (prefill, decode, both)
        };
        assert_eq!(counts(ClusterFlags::default()), (4, 4, 0));
        assert_eq!(counts(ClusterFlags { both: Some(2), ..Default::default() }), (0, 0, 2));
        assert_eq!(counts(ClusterFlags { both: Some(2), decode: Some(1), ..Default::default() }), (0, 1, 2));
        assert!(ClusterFlags { prefill: Some(0), ..Default::default() }.setup(512).is_err());
    }
}
