//! The 64 bytes in front of a block that say what its bytes are. Format: `docs/kv-layout.md`.
//!
//! A block travels between engines, versions and years; the header lets a reader refuse one that it would read
//! wrongly. It is written once, at the first hand-over, and never changes.

use crate::block::checksum;
use crate::layout::paged::Order;
use crate::layout::{self, Attention, Dtype, KvShape, Scales};

/// Bytes of a header.
pub const HEADER_BYTES: usize = 64;
/// The version written, and the only one read.
pub const VERSION: u32 = 1;
const MAGIC: [u8; 4] = *b"KVBH";

/// Why bytes are not a block that this reader can use. All of them make the block a miss.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    #[error("{found} B are too few for a block header of {HEADER_BYTES}; the block was cut short")]
    Short { found: usize },
    #[error("no block header: {found:02x?} where \"KVBH\" should be")]
    Magic { found: [u8; 4] },
    #[error(
        "block header version {found}; this build reads {VERSION}. Read it with a newer build, or drop it"
    )]
    Version { found: u32 },
    #[error("block header has checksum {found:#018x} instead of {expected:#018x}; it is damaged")]
    HeaderChecksum { expected: u64, found: u64 },
    #[error("block header names {field} {found}, which is not one; it was written by something else")]
    Field { field: &'static str, found: u32 },
    #[error("block header describes an impossible shape: {0}")]
    Shape(#[from] layout::Error),
    #[error("block header says {stated} B follow, but its shape comes to {computed} B")]
    StatedSize { stated: u64, computed: u64 },
    #[error("{found} B follow the block header instead of {stated}; the block was cut short or runs on")]
    PayloadSize { stated: u64, found: u64 },
    #[error("block has checksum {found:#018x} instead of {expected:#018x}; its bytes are damaged")]
    PayloadChecksum { expected: u64, found: u64 },
    #[error("block holds {found}, the reader needs {expected}; it belongs to another model or rank")]
    OtherShape { expected: Box<str>, found: Box<str> },
}

/// What a header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHeader {
    /// The KV of one rank.
    pub kv: KvShape,
    pub order: Order,
    pub tokens: u32,
    payload_bytes: u64,
    payload_checksum: u64,
}

impl BlockHeader {
    /// The header for `payload`, which holds `tokens` tokens of `kv`.
    ///
    /// # Errors
    /// The shape is impossible, or does not come to the length of `payload`.
    pub fn describe(kv: KvShape, order: Order, tokens: u32, payload: &[u8]) -> Result<Self, HeaderError> {
        let stated = kv.bytes_per_block(tokens)?;
        let found = payload.len() as u64;
        if stated != found {
            return Err(HeaderError::PayloadSize { stated, found });
        }
        Ok(Self { kv, order, tokens, payload_bytes: stated, payload_checksum: checksum(payload) })
    }

    /// Bytes that follow the header.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let (kind, head_dim, rope_dtype, rope_dim) = match self.kv.attention {
            Attention::Heads { kv_heads: _, head_dim } => (0, head_dim, 0, 0),
            Attention::Latent { latent_dim, rope_dim, rope_dtype } => {
                (1, latent_dim, rope_dtype as u8, rope_dim)
            }
        };
        let (group, scale_bytes) = self.kv.scales.map_or((0, 0), |scales| (scales.group, scales.bytes));
        let mut out = [0; HEADER_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &VERSION.to_le_bytes());
        put(4, &self.kv.layers.to_le_bytes());
        put(8, &self.kv.heads().to_le_bytes());
        put(12, &head_dim.to_le_bytes());
        put(16, &self.tokens.to_le_bytes());
        put(20, &[self.kv.dtype as u8, kind, self.order as u8, rope_dtype]);
        put(24, &rope_dim.to_le_bytes());
        put(28, &group.to_le_bytes());
        put(32, &scale_bytes.to_le_bytes());
        put(36, &MAGIC);
        put(40, &self.payload_bytes.to_le_bytes());
        put(48, &self.payload_checksum.to_le_bytes());
        let own = checksum(&out[..56]);
        out[56..].copy_from_slice(&own.to_le_bytes());
        out
    }

    /// Reads the header at the start of `bytes` and checks that it is whole and makes sense. The bytes of the block
    /// are not looked at: see [`verify`](Self::verify).
    ///
    /// # Errors
    /// See [`HeaderError`]; checked in the order of `docs/kv-layout.md`.
    pub fn decode(bytes: &[u8]) -> Result<Self, HeaderError> {
        let raw = Raw(bytes.first_chunk().ok_or(HeaderError::Short { found: bytes.len() })?);
        if raw.take(36) != MAGIC {
            return Err(HeaderError::Magic { found: raw.take(36) });
        }
        if raw.u32(0) != VERSION {
            return Err(HeaderError::Version { found: raw.u32(0) });
        }
        let (expected, found) = (raw.u64(56), checksum(&raw.0[..56]));
        if expected != found {
            return Err(HeaderError::HeaderChecksum { expected, found });
        }
        let header = Self {
            kv: raw.shape()?,
            order: raw.coded(22, "order", Order::from_code)?,
            tokens: raw.u32(16),
            payload_bytes: raw.u64(40),
            payload_checksum: raw.u64(48),
        };
        let computed = header.kv.bytes_per_block(header.tokens)?;
        if header.payload_bytes != computed {
            return Err(HeaderError::StatedSize { stated: header.payload_bytes, computed });
        }
        Ok(header)
    }

    /// Whether `payload` is what the header was written for.
    ///
    /// # Errors
    /// Its length or its checksum differs.
    pub fn verify(&self, payload: &[u8]) -> Result<(), HeaderError> {
        let (stated, found) = (self.payload_bytes, payload.len() as u64);
        if stated != found {
            return Err(HeaderError::PayloadSize { stated, found });
        }
        let (expected, found) = (self.payload_checksum, checksum(payload));
        if expected != found {
            return Err(HeaderError::PayloadChecksum { expected, found });
        }
        Ok(())
    }

    /// Whether a reader that works with `kv` in `order` can use the block.
    ///
    /// # Errors
    /// [`HeaderError::OtherShape`].
    pub fn expect(&self, kv: &KvShape, order: Order) -> Result<(), HeaderError> {
        if (self.kv, self.order) == (*kv, order) {
            return Ok(());
        }
        let say = |kv: &KvShape, order: Order| format!("{kv:?} {order:?}").into_boxed_str();
        Err(HeaderError::OtherShape { expected: say(kv, order), found: say(&self.kv, self.order) })
    }
}

struct Raw<'a>(&'a [u8; HEADER_BYTES]);

impl Raw<'_> {
    fn take<const N: usize>(&self, at: usize) -> [u8; N] {
        std::array::from_fn(|i| self.0[at + i])
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.take(at))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.take(at))
    }

    fn coded<T>(
        &self,
        at: usize,
        field: &'static str,
        from_code: fn(u8) -> Option<T>,
    ) -> Result<T, HeaderError> {
        let code = self.0[at];
        from_code(code).ok_or(HeaderError::Field { field, found: code.into() })
    }

    fn shape(&self) -> Result<KvShape, HeaderError> {
        let field = |field, found| Err(HeaderError::Field { field, found });
        let (heads, dim, rope_dim) = (self.u32(8), self.u32(12), self.u32(24));
        let attention = match self.0[21] {
            0 if self.0[23] != 0 => return field("rotary dtype of heads", self.0[23].into()),
            0 if rope_dim != 0 => return field("rotary size of heads", rope_dim),
            0 => Attention::Heads { kv_heads: heads, head_dim: dim },
            1 if heads != 1 => return field("heads of a latent", heads),
            1 => {
                let rope_dtype = self.coded(23, "rotary dtype", Dtype::from_code)?;
                Attention::Latent { latent_dim: dim, rope_dim, rope_dtype }
            }
            other => return field("attention", other.into()),
        };
        let [bytes, reserved] = [32, 34].map(|at| u16::from_le_bytes(self.take(at)));
        if reserved != 0 {
            return field("reserved bytes", reserved.into());
        }
        let scales = match (self.u32(28), bytes) {
            (0, 0) => None,
            (0, _) => return field("elements per scale", 0),
            (_, 0) => return field("bytes per scale", 0),
            (group, bytes) => Some(Scales { group, bytes }),
        };
        Ok(KvShape {
            layers: self.u32(4),
            attention,
            dtype: self.coded(20, "dtype", Dtype::from_code)?,
            scales,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KV: KvShape = KvShape {
        layers: 2,
        attention: Attention::Heads { kv_heads: 2, head_dim: 4 },
        dtype: Dtype::Bf16,
        scales: None,
    };

    fn block() -> (BlockHeader, Vec<u8>) {
        let payload: Vec<u8> = (0..KV.bytes_per_block(3).unwrap()).map(|i| i as u8).collect();
        (BlockHeader::describe(KV, Order::HeadsTokens, 3, &payload).unwrap(), payload)
    }

    /// A header with `bytes` put at `at` and a checksum to match: what another program might write.
    fn forged(at: usize, bytes: &[u8]) -> Result<BlockHeader, HeaderError> {
        let mut raw = block().0.encode();
        raw[at..at + bytes.len()].copy_from_slice(bytes);
        let own = checksum(&raw[..56]);
        raw[56..].copy_from_slice(&own.to_le_bytes());
        BlockHeader::decode(&raw)
    }

    #[test]
    fn the_format_on_disk_is_pinned() {
        let kv = KvShape {
            layers: 61,
            attention: Attention::Latent { latent_dim: 512, rope_dim: 64, rope_dtype: Dtype::Bf16 },
            dtype: Dtype::Fp8E4m3,
            scales: Some(Scales { group: 128, bytes: 4 }),
        };
        let payload = vec![7; kv.bytes_per_block(16).unwrap() as usize];
        let raw = BlockHeader::describe(kv, Order::TokensHeads, 16, &payload).unwrap().encode();
        let stated = [
            &[1, 0, 0, 0, 61, 0, 0, 0, 1, 0, 0, 0, 0, 2, 0, 0, 16, 0, 0, 0][..],
            &[4, 1, 1, 3, 64, 0, 0, 0, 128, 0, 0, 0, 4, 0, 0, 0],
            b"KVBH",
            &(61u64 * 656 * 16).to_le_bytes(),
            &crate::block::checksum(&payload).to_le_bytes(),
        ];
        assert_eq!(raw[..56], stated.concat());
        assert_eq!(BlockHeader::decode(&raw).unwrap().kv, kv);
    }

    #[test]
    fn every_bad_form_has_its_error() {
        let check = |at: usize, bytes: &[u8], expected: HeaderError| {
            assert_eq!(forged(at, bytes), Err(expected), "{bytes:?} at {at}");
        };
        let field = |field, found| HeaderError::Field { field, found };
        check(36, b"KVBX", HeaderError::Magic { found: *b"KVBX" });
        check(0, &[2, 0, 0, 0], HeaderError::Version { found: 2 });
        check(4, &[0; 4], HeaderError::Shape(layout::Error::Zero { what: "layers" }));
        check(16, &[0; 4], HeaderError::Shape(layout::Error::Zero { what: "tokens per block" }));
        check(4, &[0xff; 12], HeaderError::Shape(layout::Error::Overflow { what: "one token" }));
        check(20, &[0], field("dtype", 0));
        check(20, &[99], field("dtype", 99));
        check(21, &[2], field("attention", 2));
        check(21, &[1], field("heads of a latent", 2));
        check(22, &[2], field("order", 2));
        check(23, &[3], field("rotary dtype of heads", 3));
        check(24, &[1], field("rotary size of heads", 1));
        check(28, &[32], field("bytes per scale", 0));
        check(32, &[2], field("elements per scale", 0));
        check(34, &[1], field("reserved bytes", 1));
        check(40, &[1], HeaderError::StatedSize { stated: 1, computed: 192 });
        check(16, &[4], HeaderError::StatedSize { stated: 192, computed: 256 });
        let scales_on_bf16 = layout::Error::ScalesWithoutQuantization { dtype: Dtype::Bf16, group: 32 };
        check(28, &[32, 0, 0, 0, 2], HeaderError::Shape(scales_on_bf16));
        assert_eq!(BlockHeader::decode(&[1; 63]), Err(HeaderError::Short { found: 63 }));
    }

    #[test]
    fn a_block_that_is_not_what_was_written_is_refused() {
        let (header, mut payload) = block();
        assert_eq!(header.verify(&payload), Ok(()));
        assert_eq!(header.verify(&payload[1..]), Err(HeaderError::PayloadSize { stated: 192, found: 191 }));
        payload[100] ^= 1;
        assert!(matches!(header.verify(&payload), Err(HeaderError::PayloadChecksum { .. })));
        assert_eq!(header.expect(&KV, Order::HeadsTokens), Ok(()));
        let other = KvShape { dtype: Dtype::F16, ..KV };
        assert!(matches!(header.expect(&other, Order::HeadsTokens), Err(HeaderError::OtherShape { .. })));
        assert!(matches!(header.expect(&KV, Order::TokensHeads), Err(HeaderError::OtherShape { .. })));
        let short = BlockHeader::describe(KV, Order::HeadsTokens, 4, &payload);
        assert_eq!(short, Err(HeaderError::PayloadSize { stated: 256, found: 192 }));
    }

    fn shapes() -> impl Strategy<Value = KvShape> {
        let dtype = || (1u8..=7).prop_map(|code| Dtype::from_code(code).unwrap());
        let attention = prop_oneof![
            (1u32..9, 1u32..99).prop_map(|(kv_heads, head_dim)| Attention::Heads { kv_heads, head_dim }),
            (1u32..99, 0u32..9, dtype()).prop_map(|(latent_dim, rope_dim, rope_dtype)| {
                Attention::Latent { latent_dim, rope_dim, rope_dtype }
            }),
        ];
        let scales = (1u32..200, 1u16..9).prop_map(|(group, bytes)| Scales { group, bytes });
        (1u32..9, attention, dtype(), prop::option::of(scales)).prop_map(
            |(layers, attention, dtype, scales)| KvShape {
                layers,
                attention,
                dtype,
                scales: scales.filter(|_| dtype.bits() <= 8),
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(kv in shapes(), tokens in 1u32..9, fill in any::<u8>()) {
            let payload = vec![fill; kv.bytes_per_block(tokens).unwrap() as usize];
            let header = BlockHeader::describe(kv, Order::TokensHeads, tokens, &payload).unwrap();
            prop_assert_eq!(BlockHeader::decode(&header.encode()), Ok(header));
            prop_assert_eq!(header.verify(&payload), Ok(()));
        }

        #[test]
        fn no_changed_byte_goes_unnoticed(at in 0..HEADER_BYTES, flip in 1u8..) {
            let mut raw = block().0.encode();
            raw[at] ^= flip;
            prop_assert!(BlockHeader::decode(&raw).is_err());
        }

        /// With a checksum that matches, whatever is accepted is what its own encoding says.
        #[test]
        fn no_forged_byte_panics_or_is_half_read(at in 0..56usize, bytes in prop::collection::vec(any::<u8>(), 1..9)) {
            let bytes = &bytes[..bytes.len().min(56 - at)];
            if let Ok(header) = forged(at, bytes) {
                let again = header.encode();
                prop_assert_eq!(&again[at..at + bytes.len()], bytes);
            }
        }

        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(BlockHeader::decode(&bytes).is_err());
        }
    }
}
