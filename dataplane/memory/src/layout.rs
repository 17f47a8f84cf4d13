//! The shape of KV: how many bytes a token and a block take, on the whole model and on one rank.
//!
//! A rank's share of a model is again a [`KvShape`], with fewer layers and fewer heads ([`KvShape::on_rank`]);
//! every other function then needs no notion of parallelism. [`paged`] turns a shape into byte ranges.
//!
//! Not covered: layers that keep less than the whole context (sliding windows, state-space layers). Their engines
//! keep them in separate caches, each of which has a shape of its own.

#[cfg(any(test, feature = "testing"))]
pub mod cases;
pub mod paged;
#[cfg(test)]
mod tests;

/// What can be wrong with a KV shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{what} is 0; a KV shape needs at least 1")]
    Zero { what: &'static str },
    #[error("{what} needs more than 2^64 bytes; check the shape")]
    Overflow { what: &'static str },
    #[error(
        "{kv_heads} KV heads cannot be split over {tp} tensor-parallel ranks: one number must divide the other"
    )]
    UnevenHeads { kv_heads: u32, tp: u32 },
    #[error("{stages} pipeline stages, but only {layers} layers; use at most one stage per layer")]
    TooManyStages { layers: u32, stages: u32 },
    #[error("a stage of {stage_layers} layers does not fit a model of {layers}")]
    StageTooLong { stage_layers: u32, layers: u32 },
    #[error("scales per {group} elements are given for {dtype:?}, which is not quantized; leave them out")]
    ScalesWithoutQuantization { dtype: Dtype, group: u32 },
    #[error("a block of {tokens} tokens needs {needed} pages of {page_tokens} tokens, {given} given")]
    WrongPageCount { tokens: u32, page_tokens: u32, needed: u32, given: usize },
    #[error(
        "page {page} ends {end} B into region {region}, which has {region_bytes} B; the page table is wrong"
    )]
    OutOfRegion { page: u32, region: u32, end: u64, region_bytes: u64 },
}

/// Type of one stored element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Dtype {
    F32 = 1,
    F16 = 2,
    Bf16 = 3,
    /// 8-bit float, 4 exponent bits (OCP E4M3).
    Fp8E4m3 = 4,
    /// 8-bit float, 5 exponent bits (OCP E5M2).
    Fp8E5m2 = 5,
    Int8 = 6,
    /// Two elements per byte; a vector of an odd length is padded to a whole byte.
    Int4 = 7,
}

impl Dtype {
    /// Bits per element.
    pub fn bits(self) -> u32 {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::Bf16 => 16,
            Self::Fp8E4m3 | Self::Fp8E5m2 | Self::Int8 => 8,
            Self::Int4 => 4,
        }
    }

    fn vector_bytes(self, elements: u32) -> u64 {
        (u64::from(elements) * u64::from(self.bits())).div_ceil(8)
    }
}

/// Scales kept beside quantized elements, inside each vector (not per tensor: those live with the weights).
///
/// int8 with one f16 scale per token and head of 128: `{ group: 128, bytes: 2 }`. int4 in groups of 32 with f16 scale
/// and zero point (KIVI, arXiv:2402.02750): `{ group: 32, bytes: 4 }`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scales {
    /// Elements that share one scale; the last group of a vector may be shorter.
    pub group: u32,
    /// Bytes of scale and zero point per group.
    pub bytes: u16,
}

/// What one token leaves in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// One key and one value vector per KV head. Multi-head, grouped-query and multi-query attention differ only in
    /// `kv_heads`: as many as query heads, fewer, one.
    Heads { kv_heads: u32, head_dim: u32 },
    /// One latent and one rotary key per token, shared by all heads (DeepSeek-V2, arXiv:2405.04434 §2.1). The rotary
    /// part may stay unquantized beside a quantized latent.
    Latent { latent_dim: u32, rope_dim: u32, rope_dtype: Dtype },
}

/// The KV of a model, or of one rank of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    pub layers: u32,
    pub attention: Attention,
    pub dtype: Dtype,
    /// `None` if elements need no scale, or one scale serves a whole tensor.
    pub scales: Option<Scales>,
}

impl KvShape {
    /// A shape without scales.
    pub fn plain(layers: u32, attention: Attention, dtype: Dtype) -> Self {
        Self { layers, attention, dtype, scales: None }
    }

    /// # Errors
    /// A dimension is zero, or scales are given for a dtype that has none.
    pub fn check(&self) -> Result<(), Error> {
        let (heads, dim) = match self.attention {
            Attention::Heads { kv_heads, head_dim } => (kv_heads, head_dim),
            Attention::Latent { latent_dim, .. } => (1, latent_dim),
        };
        let group = self.scales.map_or(1, |scales| scales.group);
        for (what, value) in
            [("layers", self.layers), ("KV heads", heads), ("vector length", dim), ("scale group", group)]
        {
            if value == 0 {
                return Err(Error::Zero { what });
            }
        }
        match self.scales {
            Some(Scales { group, .. }) if self.dtype.bits() > 8 => {
                Err(Error::ScalesWithoutQuantization { dtype: self.dtype, group })
            }
            _ => Ok(()),
        }
    }

    /// Separate planes per layer: 2 (keys, values), or 1 if they share a latent.
    pub fn planes(&self) -> u32 {
        match self.attention {
            Attention::Heads { .. } => 2,
            Attention::Latent { .. } => 1,
        }
    }

    /// Vectors per token and plane: KV heads, or 1.
    pub fn heads(&self) -> u32 {
        match self.attention {
            Attention::Heads { kv_heads, .. } => kv_heads,
            Attention::Latent { .. } => 1,
        }
    }

    /// Bytes of one vector: one head of one token in one plane, with its scales.
    pub fn vector_bytes(&self) -> u64 {
        let quantized = |dim: u32| {
            let scales =
                self.scales.map_or(0, |s| u64::from(dim.div_ceil(s.group.max(1))) * u64::from(s.bytes));
            self.dtype.vector_bytes(dim) + scales
        };
        match self.attention {
            Attention::Heads { head_dim, .. } => quantized(head_dim),
            Attention::Latent { latent_dim, rope_dim, rope_dtype } => {
                quantized(latent_dim) + rope_dtype.vector_bytes(rope_dim)
            }
        }
    }

    /// Bytes one token takes in all layers.
    ///
    /// `layers × planes × heads × vector_bytes`: for LLaMA-3-70B in bf16 80 × 2 × 8 × 256 = 327,680.
    ///
    /// # Errors
    /// [`Error::Overflow`], or the shape fails [`check`](Self::check).
    pub fn bytes_per_token(&self) -> Result<u64, Error> {
        self.check()?;
        [self.layers, self.planes(), self.heads()]
            .into_iter()
            .try_fold(self.vector_bytes(), |bytes, factor| bytes.checked_mul(u64::from(factor)))
            .ok_or(Error::Overflow { what: "one token" })
    }

    /// Bytes of a block of `tokens` tokens, without a header.
    ///
    /// # Errors
    /// As [`bytes_per_token`](Self::bytes_per_token), or `tokens` is zero.
    pub fn bytes_per_block(&self, tokens: u32) -> Result<u64, Error> {
        if tokens == 0 {
            return Err(Error::Zero { what: "tokens per block" });
        }
        self.bytes_per_token()?.checked_mul(u64::from(tokens)).ok_or(Error::Overflow { what: "one block" })
    }

    /// What one of `tp` tensor-parallel ranks keeps in a pipeline stage of `stage_layers` layers
    /// ([`layers_per_stage`] computes them; a model that splits in another way passes its own number).
    ///
    /// KV heads are divided; with more ranks than KV heads each rank keeps one and neighbours keep the same
    /// ([`copies`](Self::copies)). A latent cannot be divided: every rank keeps all of it.
    ///
    /// # Errors
    /// Heads and ranks do not divide each other, or the stage is empty or longer than the model.
    pub fn on_rank(&self, tp: u32, stage_layers: u32) -> Result<Self, Error> {
        self.check()?;
        if tp == 0 {
            return Err(Error::Zero { what: "tensor-parallel ranks" });
        }
        if stage_layers == 0 {
            return Err(Error::Zero { what: "layers of a stage" });
        }
        if stage_layers > self.layers {
            return Err(Error::StageTooLong { stage_layers, layers: self.layers });
        }
        let attention = match self.attention {
            Attention::Heads { kv_heads, head_dim } => {
                if !kv_heads.is_multiple_of(tp) && !tp.is_multiple_of(kv_heads) {
                    return Err(Error::UnevenHeads { kv_heads, tp });
                }
                Attention::Heads { kv_heads: (kv_heads / tp).max(1), head_dim }
            }
            latent @ Attention::Latent { .. } => latent,
        };
        Ok(Self { layers: stage_layers, attention, ..*self })
    }

    /// How many of `tp` ranks keep the same bytes. Storing those of one rank is enough.
    pub fn copies(&self, tp: u32) -> u32 {
        match self.attention {
            Attention::Heads { kv_heads, .. } => (tp / kv_heads.max(1)).max(1),
            Attention::Latent { .. } => tp.max(1),
        }
    }
}

/// Layers of each of `stages` pipeline stages, as even as possible. Layers left over go one each to the stages
/// before the last, from the back, because first and last also carry embedding and head. The rule of vLLM
/// (`vllm/distributed/utils.py`, `get_pp_indices`).
///
/// # Errors
/// No stages, or more stages than layers.
pub fn layers_per_stage(layers: u32, stages: u32) -> Result<Vec<u32>, Error> {
    if stages == 0 {
        return Err(Error::Zero { what: "pipeline stages" });
    }
    if stages > layers {
        return Err(Error::TooManyStages { layers, stages });
    }
    let mut split = vec![layers / stages; stages as usize];
    // At most `stages - 1` are left over, so they never reach the last stage again.
    for stage in split.iter_mut().rev().skip(1).take((layers % stages) as usize) {
        *stage += 1;
    }
    Ok(split)
}
