//! What bodies are made of: numbers, keys, texts and lists.

use super::{Found, Outcome, Stat, TEXT_MAX, VERSIONS, Versions, WireError};
use crate::block::{BATCH_MAX, BlockKey, BlockMeta, Pin};

pub(super) fn put_u64(out: &mut Vec<u8>, value: &u64) {
    out.extend(value.to_le_bytes());
}

pub(super) fn put_key(out: &mut Vec<u8>, key: &BlockKey) {
    out.extend(key.0.to_le_bytes());
}

pub(super) fn put_meta(out: &mut Vec<u8>, meta: &BlockMeta) {
    put_key(out, &meta.key);
    out.push(u8::from(meta.parent.is_some()));
    put_key(out, &meta.parent.unwrap_or_default());
    out.extend(meta.depth.to_le_bytes());
    out.extend(meta.class.to_le_bytes());
    out.extend(meta.ttl_ms.to_le_bytes());
    out.extend(meta.size.to_le_bytes());
}

pub(super) fn put_pin(out: &mut Vec<u8>, pin: Pin) {
    let (hard, amount) = match pin {
        Pin::Hard { duration_ms } => (true, duration_ms),
        Pin::Soft { weight } => (false, weight),
    };
    out.push(u8::from(hard));
    out.extend(amount.to_le_bytes());
}

pub(super) fn put_found(out: &mut Vec<u8>, found: &Found) {
    match found {
        Found::Hit { offset, size, checksum, lease } => {
            out.push(Outcome::Done as u8);
            out.extend(size.to_le_bytes());
            [offset, checksum, lease].into_iter().for_each(|value| put_u64(out, value));
        }
        Found::Not(outcome) => out.push(*outcome as u8),
    }
}

pub(super) fn put_stat(out: &mut Vec<u8>, stat: &Option<Stat>) {
    out.push(u8::from(stat.is_some()));
    if let Some(stat) = stat {
        [stat.size, stat.depth, stat.uses, stat.leases]
            .into_iter()
            .for_each(|value| out.extend(value.to_le_bytes()));
        out.extend(stat.class.to_le_bytes());
        out.push(stat.tiers);
        [stat.checksum, stat.age_ms, stat.idle_ms].iter().for_each(|value| put_u64(out, value));
    }
}

/// Text is cut at 1 KiB, on a character boundary.
pub(super) fn put_text(out: &mut Vec<u8>, text: &str) {
    let text = &text[..text.floor_char_boundary(TEXT_MAX)];
    out.extend((text.len() as u16).to_le_bytes());
    out.extend(text.as_bytes());
}

pub(super) fn put_list<T>(out: &mut Vec<u8>, items: &[T], put: impl Fn(&mut Vec<u8>, &T)) {
    out.extend((items.len() as u32).to_le_bytes());
    items.iter().for_each(|item| put(out, item));
}

/// The bytes that are left to decode.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl Reader<'_> {
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (head, rest) =
            self.0.split_first_chunk().ok_or(WireError::Truncated { had: self.0.len(), wanted: N })?;
        self.0 = rest;
        Ok(*head)
    }

    pub(super) fn u8(&mut self) -> Result<u8, WireError> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(super) fn u16(&mut self) -> Result<u16, WireError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, WireError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, WireError> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn key(&mut self) -> Result<BlockKey, WireError> {
        self.array().map(|bytes| BlockKey(u128::from_le_bytes(bytes)))
    }

    pub(super) fn bool(&mut self, field: &'static str) -> Result<bool, WireError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(WireError::Value { field, value: value.into() }),
        }
    }

    /// The versions of a client with which this side can speak.
    pub(super) fn versions(&mut self) -> Result<Versions, WireError> {
        let client = Versions { lowest: self.u8()?, highest: self.u8()? };
        client.common(VERSIONS).map(|_| client).ok_or(WireError::NoCommonVersion { client })
    }

    pub(super) fn outcome(&mut self) -> Result<Outcome, WireError> {
        let value = self.u8()?;
        Outcome::from_repr(value).ok_or(WireError::Value { field: "outcome", value: value.into() })
    }

    pub(super) fn text(&mut self) -> Result<String, WireError> {
        let len = usize::from(self.u16()?);
        if len > TEXT_MAX {
            return Err(WireError::Value { field: "text length", value: len as u64 });
        }
        let (text, rest) =
            self.0.split_at_checked(len).ok_or(WireError::Truncated { had: self.0.len(), wanted: len })?;
        self.0 = rest;
        let mut text = String::from_utf8_lossy(text).into_owned();
        // What stands for bytes that are no text is longer than they are.
        text.truncate(text.floor_char_boundary(TEXT_MAX));
        Ok(text)
    }

    pub(super) fn meta(&mut self) -> Result<BlockMeta, WireError> {
        let (key, has_parent, parent) = (self.key()?, self.bool("has parent")?, self.key()?);
        let parent = has_parent.then_some(parent);
        let (depth, class, ttl_ms, size) = (self.u32()?, self.u16()?, self.u32()?, self.u32()?);
        Ok(BlockMeta { key, parent, depth, class, tenant: 0, ttl_ms, size })
    }

    pub(super) fn pin(&mut self) -> Result<Pin, WireError> {
        let (hard, amount) = (self.bool("hard pin")?, self.u32()?);
        Ok(if hard { Pin::Hard { duration_ms: amount } } else { Pin::Soft { weight: amount } })
    }

    pub(super) fn found(&mut self) -> Result<Found, WireError> {
        match self.outcome()? {
            Outcome::Done => {
                let size = self.u32()?;
                Ok(Found::Hit { size, offset: self.u64()?, checksum: self.u64()?, lease: self.u64()? })
            }
            outcome => Ok(Found::Not(outcome)),
        }
    }

    pub(super) fn stat(&mut self) -> Result<Option<Stat>, WireError> {
        if !self.bool("has stat")? {
            return Ok(None);
        }
        let (size, depth, uses, leases, class, tiers) =
            (self.u32()?, self.u32()?, self.u32()?, self.u32()?, self.u16()?, self.u8()?);
        let (checksum, age_ms, idle_ms) = (self.u64()?, self.u64()?, self.u64()?);
        Ok(Some(Stat { size, tiers, checksum, depth, class, uses, leases, age_ms, idle_ms }))
    }

    pub(super) fn list<T>(
        &mut self,
        item: impl Fn(&mut Self) -> Result<T, WireError>,
    ) -> Result<Vec<T>, WireError> {
        let len = self.u32()?;
        if len as usize > BATCH_MAX {
            return Err(WireError::Batch { len });
        }
        (0..len).map(|_| item(self)).collect()
    }

    pub(super) fn end(self) -> Result<(), WireError> {
        if self.0.is_empty() { Ok(()) } else { Err(WireError::Trailing { extra: self.0.len() }) }
    }
}
