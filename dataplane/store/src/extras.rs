//! What few blocks have: a time to live of their own, and pins. Kept aside, so that the others do not pay for it;
//! a block that has either costs about 150 B more.

use std::collections::{BTreeSet, HashMap};

use super::tenants::TenantIndex;

/// A tenant's word that a block must stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pinned {
    pub(super) tenant: TenantIndex,
    /// Bytes of the tenant's pin quota that it takes.
    pub(super) bytes: u64,
    pub(super) until_ms: u64,
    pub(super) hard: bool,
}

#[derive(Default)]
struct Extra {
    expires_ms: Option<u64>,
    /// When to check again whether it can go; later than `expires_ms` if someone read it then.
    look_ms: Option<u64>,
    /// One per tenant.
    pins: Vec<Pinned>,
}

impl Extra {
    fn due(&self) -> Option<u64> {
        self.pins.iter().map(|pin| pin.until_ms).chain(self.look_ms).min()
    }
}

/// The extras of one shard, by the block's place in it.
#[derive(Default)]
pub(super) struct Extras {
    by_local: HashMap<u32, Extra>,
    /// When something about a block runs out; one entry per block.
    due: BTreeSet<(u64, u32)>,
}

impl Extras {
    pub(super) fn set_expiry(&mut self, local: u32, expires_ms: u64) {
        self.change(local, |extra| (extra.expires_ms, extra.look_ms) = (Some(expires_ms), Some(expires_ms)));
    }

    pub(super) fn look_again(&mut self, local: u32, look_ms: u64) {
        self.change(local, |extra| extra.look_ms = Some(look_ms));
    }

    pub(super) fn expires_ms(&self, local: u32) -> Option<u64> {
        self.by_local.get(&local)?.expires_ms
    }

    /// Adds a pin, or replaces that of the same tenant and returns the replaced one.
    pub(super) fn pin(&mut self, local: u32, pin: Pinned) -> Option<Pinned> {
        let old = self.unpin(local, pin.tenant);
        self.change(local, |extra| extra.pins.push(pin));
        old
    }

    pub(super) fn unpin(&mut self, local: u32, tenant: TenantIndex) -> Option<Pinned> {
        self.change(local, |extra| {
            let at = extra.pins.iter().position(|pin| pin.tenant == tenant)?;
            Some(extra.pins.swap_remove(at))
        })
    }

    pub(super) fn pins(&self, local: u32) -> &[Pinned] {
        self.by_local.get(&local).map_or(&[], |extra| &extra.pins)
    }

    /// Takes out the pins of a block that have run out.
    pub(super) fn end_pins(&mut self, local: u32, now_ms: u64) -> Vec<Pinned> {
        let over = |pin: &mut Pinned| pin.until_ms <= now_ms;
        self.change(local, |extra| extra.pins.extract_if(.., over).collect())
    }

    /// Forgets a block and returns its pins.
    pub(super) fn remove(&mut self, local: u32) -> Vec<Pinned> {
        self.change(local, |extra| {
            (extra.expires_ms, extra.look_ms) = (None, None);
            std::mem::take(&mut extra.pins)
        })
    }

    /// Blocks about which something has run out.
    pub(super) fn due(&self, now_ms: u64) -> Vec<u32> {
        self.due.range(..=(now_ms, u32::MAX)).map(|&(_, local)| local).collect()
    }

    /// Bytes these tables take.
    pub(super) fn memory_bytes(&self) -> usize {
        let table = self.by_local.capacity() * size_of::<(u32, Extra)>();
        let pins: usize =
            self.by_local.values().map(|extra| extra.pins.capacity() * size_of::<Pinned>()).sum();
        table + pins + self.due.len() * 2 * size_of::<(u64, u32)>()
    }

    fn change<R>(&mut self, local: u32, change: impl FnOnce(&mut Extra) -> R) -> R {
        let extra = self.by_local.entry(local).or_default();
        let before = extra.due();
        let result = change(extra);
        let after = extra.due();
        if before != after {
            before.map(|due| self.due.remove(&(due, local)));
            after.map(|due| self.due.insert((due, local)));
        }
        if after.is_none() {
            self.by_local.remove(&local);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runs_out_is_due_once_and_leaves_nothing() {
        let mut extras = Extras::default();
        let pin = |tenant, until_ms| Pinned { tenant, bytes: 1, until_ms, hard: true };
        extras.set_expiry(1, 500);
        assert_eq!(extras.pin(1, pin(7, 300)), None);
        assert_eq!(extras.pin(1, pin(8, 400)), None);
        assert_eq!(extras.pin(1, pin(7, 350)), Some(pin(7, 300)), "one pin per tenant");
        extras.set_expiry(2, 300);
        assert_eq!((extras.due(299), extras.due(300), extras.due(350)), (vec![], vec![2], vec![2, 1]));
        assert_eq!(extras.end_pins(1, 350), [pin(7, 350)]);
        assert_eq!((extras.pins(1), extras.due(399)), (&[pin(8, 400)][..], vec![2]));
        assert_eq!(extras.unpin(1, 7), None);
        assert_eq!(extras.unpin(1, 8), Some(pin(8, 400)));
        assert_eq!((extras.expires_ms(1), extras.expires_ms(3)), (Some(500), None));
        extras.look_again(2, 600);
        assert_eq!((extras.due(599), extras.expires_ms(2)), (vec![1], Some(300)));
        assert!(extras.remove(1).is_empty() && extras.remove(2).is_empty());
        assert!(extras.by_local.is_empty() && extras.due.is_empty() && extras.due(u64::MAX).is_empty());
    }
}
