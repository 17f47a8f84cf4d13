//! From which tier a block would come, and which blocks have left the host.

use kvasir_protocol::block::{BATCH_MAX, BlockKey};
use kvasir_protocol::wire::{Op, Reply, Request};

use super::error::wrong;
use super::{Client, ClientError};

/// Where a get would find a block, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Source {
    /// Nowhere.
    Absent = 0,
    /// The host's pool, in its memory.
    Pool = 1,
    /// The memory of a GPU of the host.
    Gpu = 2,
    /// A disk of the host.
    Disk = 3,
    /// Another host's pool, or a store that hosts share.
    Elsewhere = 4,
}

impl Source {
    /// From the bits of a stat, which are numbered as `kvasir_store::store::Tier` is.
    fn of(tiers: u8) -> Self {
        match tiers {
            0 => Self::Absent,
            _ if tiers & 1 << 1 != 0 => Self::Pool,
            _ if tiers & 1 << 0 != 0 => Self::Gpu,
            _ if tiers & 1 << 2 != 0 => Self::Disk,
            _ => Self::Elsewhere,
        }
    }
}

/// Blocks that have left a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removals {
    /// What to ask with next; the same as asked, if nothing has left since.
    pub next: u64,
    /// The host does not know what has left since then: a client that remembers what it holds must forget all of it.
    pub lost: bool,
    /// The keys of this client's tenant. Other tiers' and hosts' copies aside, each was gone when this was answered.
    pub keys: Vec<BlockKey>,
}

impl Client {
    /// Where a get would find each block now. This is not a use, and no promise. What a shared store holds is told as far as the
    /// host knows without asking there.
    ///
    /// # Errors
    /// The host cannot be asked, or the batch is too large.
    pub fn tiers(&self, keys: &[BlockKey]) -> Result<Vec<Source>, ClientError> {
        let stats = self.stat(keys)?;
        Ok(stats.into_iter().map(|stat| stat.map_or(Source::Absent, |stat| Source::of(stat.tiers))).collect())
    }

    /// Which blocks have left the host (evicted from its last tier, removed, expired, damaged) since an earlier answer said
    /// [`next`](Removals::next), or since now, for 0: then `lost` is set. Ask again until `next` stays the same. Positions belong to
    /// one run of one host; with a position of another run, everything is lost.
    ///
    /// # Errors
    /// The host cannot be asked, or is of a release that does not know the answer ([`ClientError::TooOld`]).
    pub fn removals(&self, since: u64) -> Result<Removals, ClientError> {
        if self.version < Op::Removals.since() {
            let endpoint = self.endpoint.clone();
            return Err(ClientError::TooOld { endpoint, op: Op::Removals, version: self.version });
        }
        match self.call(&Request::Removals { since, max: BATCH_MAX as u32 })? {
            Reply::Removals { next, lost, keys } => Ok(Removals { next, lost, keys }),
            other => Err(wrong(&self.endpoint, Op::Removals, other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_tier_is_the_one_that_a_get_asks_first() {
        let of = |tiers: &[u8]| Source::of(tiers.iter().fold(0, |bits, tier| bits | 1 << tier)) as u8;
        let rows: [(&[u8], u8); 8] = [
            (&[], 0),
            (&[1], 1),
            (&[0, 1, 2], 1),
            (&[0, 2], 2),
            (&[2, 3, 4], 3),
            (&[3], 4),
            (&[4], 4),
            (&[7], 4),
        ];
        rows.iter().for_each(|(tiers, expected)| assert_eq!(of(tiers), *expected, "{tiers:?}"));
    }
}
