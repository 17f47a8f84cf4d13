//! What an instance takes for its work, computed from the shape of a model and the hardware under it.

mod model;

pub use model::Model;

use crate::fleet::{DecodeCost, PrefillCost, TransferCost};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::path::PathBuf;

/// Share of the peak that long matrix products reach in prefill, all-reduces included: an assumption.
const PREFILL_EFFICIENCY: f64 = 0.55;
/// Share of the memory's rate that decode reaches: 0.35 % of an A40's peak at one sequence (Mooncake's talk, "Decode Need Bigger
/// Batch Size").
const MEMORY_EFFICIENCY: f64 = 0.75;
/// Share of the network's rate that a transfer of blocks reaches (Mooncake, FAST '25, section 5.3: 87 of 100 GB/s).
const NETWORK_EFFICIENCY: f64 = 0.87;
/// Memory of a GPU that weights and the cache may fill.
const MEMORY_SHARE: f64 = 0.9;
/// Starting the kernels of one layer, ms.
const LAYER_MS: f64 = 0.05;
/// Setting up a transfer, ms.
const TRANSFER_MS: f32 = 2.0;

const MODELS: [(&str, &str); 4] = [
    ("deepseek-v3", include_str!("../../profiles/models/deepseek-v3.toml")),
    ("llama3-70b", include_str!("../../profiles/models/llama3-70b.toml")),
    ("llama3-8b", include_str!("../../profiles/models/llama3-8b.toml")),
    ("qwen2-7b", include_str!("../../profiles/models/qwen2-7b.toml")),
];
const HARDWARE: [(&str, &str); 4] = [
    ("a40", include_str!("../../profiles/hardware/a40.toml")),
    ("a800", include_str!("../../profiles/hardware/a800.toml")),
    ("h200", include_str!("../../profiles/hardware/h200.toml")),
    ("h800", include_str!("../../profiles/hardware/h800.toml")),
];

/// Why there is no such profile.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no {kind} `{name}`: built in are {known}; a file's name ends in .toml")]
    Unknown { kind: &'static str, name: String, known: String },
    #[error("cannot read {}: {error}", path.display())]
    Read { path: PathBuf, error: std::io::Error },
    #[error("{name} describes no {kind}: {error}")]
    Text { kind: &'static str, name: String, error: Box<toml::de::Error> },
    #[error("{name}: {field} is {value}, and must be above 0")]
    Value { name: String, field: &'static str, value: f64 },
    #[error("{name}: {what}")]
    Shape { name: String, what: &'static str },
    #[error(
        "{weights:.0} GB of weights do not fit into nine tenths of {gpus} × {memory} GB; give more --gpus, or other \
         hardware"
    )]
    Memory { weights: f64, gpus: u32, memory: f64 },
}

/// The machine of one instance.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    pub gpus: u32,
    /// Of one GPU.
    gpu_memory_gb: f64,
    gpu_memory_gb_per_s: f64,
    /// Peak of dense products, 10^12 FLOP/s.
    tflops_16bit: f64,
    /// `None` means that such products run as those of 16 bits do.
    #[serde(default)]
    tflops_8bit: Option<f64>,
    /// For the prefix cache, of the whole machine.
    host_memory_gb: f64,
    /// To other instances, of the whole machine.
    network_gb_per_s: f64,
}

/// A model on a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// "llama3-70b on 8 × a800"
    pub name: String,
    pub model: Model,
    pub hardware: Hardware,
}

impl Profile {
    /// Each is one that is built in, or a file that ends in `.toml`. `gpus`: others than the hardware says.
    ///
    /// # Errors
    /// There is none such, it says what cannot be, or the model does not fit.
    pub fn open(model: &str, hardware: &str, gpus: Option<u32>) -> Result<Self, Error> {
        let shape: Model = read("model", model, &MODELS)?;
        shape.check(model)?;
        let mut machine: Hardware = read("hardware", hardware, &HARDWARE)?;
        machine.gpus = gpus.unwrap_or(machine.gpus);
        machine.check(hardware)?;
        let name = format!("{model} on {} × {hardware}", machine.gpus);
        let profile = Self { name, model: shape, hardware: machine };
        let Hardware { gpus, gpu_memory_gb: memory, .. } = profile.hardware;
        if profile.free_bytes() <= 0.0 {
            return Err(Error::Memory { weights: profile.model.weight_bytes() / 1e9, gpus, memory });
        }
        Ok(profile)
    }

    /// Bytes of a block of the cache.
    pub fn block_bytes(&self, tokens: u32) -> f64 {
        self.model.kv_bytes_per_token() * f64::from(tokens)
    }

    /// Blocks that fit into the GPUs beside the weights.
    pub fn gpu_blocks(&self, tokens: u32) -> u32 {
        (self.free_bytes() / self.block_bytes(tokens)) as u32
    }

    /// Blocks that fit into the memory of the host.
    pub fn host_blocks(&self, tokens: u32) -> u32 {
        (self.hardware.host_memory_gb * 1e9 / self.block_bytes(tokens)) as u32
    }

    /// Prefill is bound by computing: products of each token with the active weights, and attention of each pair. Reading the
    /// weights once is added, although it hides behind long prompts.
    pub fn prefill(&self) -> PrefillCost {
        let ms = 1e3 / (self.flops() * PREFILL_EFFICIENCY);
        PrefillCost {
            fixed_ms: self.step_ms() as f32,
            ms_per_token: (self.model.prefill_flop_per_token() * ms) as f32,
            ms_per_pair: (self.model.prefill_flop_per_pair() * ms) as f32,
        }
    }

    /// Decode is bound by reading: the weights once a step, and the cache of every sequence. Products at the peak are added: they hide
    /// in part.
    pub fn decode(&self) -> DecodeCost {
        let reading_ms = self.model.kv_bytes_per_token() / self.memory_rate();
        let attention_ms = self.model.decode_flop_per_pair() / self.flops();
        DecodeCost {
            fixed_ms: self.step_ms() as f32,
            ms_per_sequence: (self.model.decode_flop_per_token() / self.flops() * 1e3) as f32,
            ms_per_context_token: (reading_ms.max(attention_ms) * 1e3) as f32,
        }
    }

    pub fn transfer(&self, tokens: u32) -> TransferCost {
        let rate = self.hardware.network_gb_per_s * 1e9 * NETWORK_EFFICIENCY;
        TransferCost::of_link(self.block_bytes(tokens) as u64, rate, TRANSFER_MS)
    }

    /// Reading the weights, and starting what is computed with them, ms.
    fn step_ms(&self) -> f64 {
        self.model.step_bytes() / self.memory_rate() * 1e3 + f64::from(self.model.layers()) * LAYER_MS
    }

    fn free_bytes(&self) -> f64 {
        let Hardware { gpus, gpu_memory_gb, .. } = self.hardware;
        f64::from(gpus) * gpu_memory_gb * 1e9 * MEMORY_SHARE - self.model.weight_bytes()
    }

    /// Bytes per second.
    fn memory_rate(&self) -> f64 {
        f64::from(self.hardware.gpus) * self.hardware.gpu_memory_gb_per_s * 1e9 * MEMORY_EFFICIENCY
    }

    /// The peak, FLOP per second.
    fn flops(&self) -> f64 {
        let Hardware { gpus, tflops_16bit, tflops_8bit, .. } = self.hardware;
        let narrow = tflops_8bit.filter(|_| self.model.is_8bit());
        f64::from(gpus) * narrow.unwrap_or(tflops_16bit) * 1e12
    }
}

impl Hardware {
    fn check(&self, name: &str) -> Result<(), Error> {
        let values = [
            ("gpus", f64::from(self.gpus)),
            ("gpu_memory_gb", self.gpu_memory_gb),
            ("gpu_memory_gb_per_s", self.gpu_memory_gb_per_s),
            ("tflops_16bit", self.tflops_16bit),
            ("tflops_8bit", self.tflops_8bit.unwrap_or(1.0)),
            ("host_memory_gb", self.host_memory_gb),
            ("network_gb_per_s", self.network_gb_per_s),
        ];
        above_0(name, &values)
    }
}

fn above_0(name: &str, values: &[(&'static str, f64)]) -> Result<(), Error> {
    let bad = values.iter().find(|(_, value)| !(value.is_finite() && *value > 0.0));
    bad.map_or(Ok(()), |&(field, value)| Err(Error::Value { name: name.to_owned(), field, value }))
}

fn read<T: DeserializeOwned>(
    kind: &'static str,
    name: &str,
    built_in: &[(&'static str, &'static str)],
) -> Result<T, Error> {
    let text = if name.ends_with(".toml") {
        std::fs::read_to_string(name).map_err(|error| Error::Read { path: name.into(), error })?
    } else {
        let found = built_in.iter().find(|(known, _)| *known == name);
        let known = || built_in.iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", ");
        let unknown = || Error::Unknown { kind, name: name.to_owned(), known: known() };
        found.map(|(_, text)| (*text).to_owned()).ok_or_else(unknown)?
    };
    toml::from_str(&text).map_err(|error| Error::Text { kind, name: name.to_owned(), error: error.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(model: &str, hardware: &str) -> Profile {
        Profile::open(model, hardware, None).unwrap()
    }

    fn near(value: f64, expected: f64, share: f64) {
        assert!((value / expected - 1.0).abs() <= share, "{value}, expected {expected}");
    }

    #[test]
    fn what_is_built_in_is_whole_and_has_the_size_it_is_known_by() {
        for (name, billions) in
            [("llama3-70b", 70.6), ("llama3-8b", 8.03), ("qwen2-7b", 7.6), ("deepseek-v3", 671.0)]
        {
            let model: Model = read("model", name, &MODELS).unwrap();
            near(model.weights() / 1e9, billions, 0.01);
        }
        for (hardware, _) in HARDWARE {
            Profile::open("qwen2-7b", hardware, None).unwrap();
        }
        // 320 KiB and 70 KB a token.
        assert_eq!(profile("llama3-70b", "a800").block_bytes(512), 160.0 * f64::from(1 << 20));
        near(profile("deepseek-v3", "h200").block_bytes(1), 70_272.0, 1e-9);
    }

    /// Mooncake's talk, "Decode Need Bigger Batch Size": share of an A40's peak that the products of a step reach, by sequences.
    #[test]
    fn decode_uses_as_much_of_an_a40_as_was_measured() {
        let on_a40 = profile("llama3-8b", "a40");
        let cost = on_a40.decode();
        let starting_ms = f64::from(on_a40.model.layers()) * LAYER_MS;
        let share = |sequences: u32| {
            let flop = f64::from(sequences) * on_a40.model.decode_flop_per_token();
            flop / ((cost.step_ms(sequences, 0) - starting_ms) / 1e3) / on_a40.flops()
        };
        for (sequences, measured) in [
            (1, 0.0035),
            (2, 0.0068),
            (4, 0.0134),
            (8, 0.0269),
            (16, 0.0535),
            (32, 0.1072),
            (64, 0.211),
            (128, 0.3639),
        ] {
            near(share(sequences), measured, 0.17);
        }
        // Attention is bound by reading at any batch: 0.29 to 0.40 % without grouped heads, here with four to a group.
        let flop = on_a40.model.decode_flop_per_pair();
        let attention = flop / (f64::from(cost.ms_per_context_token) / 1e3) / on_a40.flops() / 4.0;
        assert!((0.0029..0.0040).contains(&attention), "{attention}");
    }

    /// Mooncake, FAST '25, section 3: with 8,192 tokens of LLaMA3-70B, fetching is faster than computing from 6 GB/s (8 × A800) and
    /// 19 GB/s (8 × H800) on.
    #[test]
    fn fetching_beats_computing_from_the_published_rate_on() {
        for (hardware, gb_per_s) in [("a800", 6.0), ("h800", 19.0)] {
            let profile = profile("llama3-70b", hardware);
            let cost = PrefillCost { fixed_ms: 0.0, ..profile.prefill() };
            // They compute at the peak.
            let seconds = cost.prefill_ms(0, 8_192) * PREFILL_EFFICIENCY / 1e3;
            near(profile.block_bytes(8_192) / seconds / 1e9, gb_per_s, 0.15);
        }
    }

    /// The same, section 5.3: with 95 % of a prompt of 128 k tokens cached, prefill takes 92 % less time.
    #[test]
    fn a_cached_prefix_saves_as_much_prefill_as_was_measured() {
        let cost = profile("llama3-70b", "a800").prefill();
        let tokens = 128 * 1024;
        let cached = tokens * 95 / 100;
        let left = cost.prefill_ms(cached, tokens - cached) / cost.prefill_ms(0, tokens);
        assert!((1.0 - left - 0.92).abs() < 0.01, "{left}");
    }

    #[test]
    fn more_gpus_are_faster_and_hold_more() {
        let of = |gpus| Profile::open("llama3-70b", "h800", Some(gpus)).unwrap();
        let (four, eight) = (of(4), of(8));
        near(f64::from(four.prefill().ms_per_token / eight.prefill().ms_per_token), 2.0, 1e-3);
        assert!(eight.gpu_blocks(512) > 2 * four.gpu_blocks(512));
        assert_eq!(eight.host_blocks(512), four.host_blocks(512));
        near(f64::from(eight.transfer(512).ms_per_block), 160.0 * 1.048_576 / 400.0 / 0.87, 1e-3);
    }

    #[test]
    fn what_cannot_be_is_refused_with_what_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let a40 = HARDWARE[0].1;
        let qwen = MODELS[3].1;
        let latent = MODELS[0].1;
        for (model, hardware, expected) in [
            ("qwen", "a40".to_owned(), "no model `qwen`: built in are deepseek-v3, llama3-70b"),
            ("qwen2-7b", "b100".to_owned(), "no hardware `b100`"),
            ("/none.toml", "a40".to_owned(), "cannot read /none.toml"),
            ("qwen2-7b", file("a.toml", "gpus = 1"), "describes no hardware"),
            (
                "qwen2-7b",
                file("b.toml", &a40.replace("696", "0")),
                "gpu_memory_gb_per_s is 0, and must be above 0",
            ),
            ("qwen2-7b", file("c.toml", &a40.replace("149.7", "nan")), "tflops_16bit is NaN"),
            ("qwen2-7b", file("d.toml", &format!("{a40}\nwatts = 300")), "unknown field `watts`"),
            (
                &file("e.toml", &qwen.replace("heads = 28", "heads = 0")),
                "a40".to_owned(),
                "attention.heads is 0",
            ),
            (
                &file("f.toml", &qwen.replace("kv_heads = 4", "kv_heads = 40")),
                "a40".to_owned(),
                "more kv_heads than heads",
            ),
            (
                &file("g.toml", &latent.replace("active = 8", "active = 800")),
                "h200".to_owned(),
                "more experts are active",
            ),
            (
                "deepseek-v3",
                "a800".to_owned(),
                "671 GB of weights do not fit into nine tenths of 8 × 80 GB; give more --gpus",
            ),
        ] {
            let error = Profile::open(model, &hardware, None).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}: {expected}");
        }
        Profile::open("deepseek-v3", "a800", Some(16)).unwrap();
    }
}
