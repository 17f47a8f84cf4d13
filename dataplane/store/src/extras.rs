//! What few blocks have: a time to live of their own, and pins. Kept aside, so that the others do not pay for it;
//! a block that has either costs about 150 B more.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::dram::OwnerId;
use super::tenants::TenantIndex;

/// A demand that a block must stay: a tenant's, or that of one of its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pinned {
    pub(super) tenant: TenantIndex,
    /// The connection with which it ends. `None` means that it is the tenant's.
    pub(super) holder: Option<OwnerId>,
    /// How many of the holder's requests for it have not ended.
    pub(super) times: u32,
    /// Bytes of the tenant's pin quota that it takes: those of the block for one of a tenant's pins on it, else 0.
    pub(super) bytes: u64,
    pub(super) until_ms: u64,
    pub(super) hard: bool,
}

impl Pinned {
    fn is_of(&self, tenant: TenantIndex, holder: Option<OwnerId>) -> bool {
        (self.tenant, self.holder) == (tenant, holder)
    }
}

#[derive(Default)]
struct Extra {
    expires_ms: Option<u64>,
    /// When to check again whether it can go; later than `expires_ms` if someone read it then.
    look_ms: Option<u64>,
    /// One per tenant, and one per holder.
    pins: Vec<Pinned>,
}

impl Extra {
    fn due(&self) -> Option<u64> {
        self.pins.iter().map(|pin| pin.until_ms).chain(self.look_ms).min()
    }

    /// Takes out pins. What one of them paid passes to another pin of its tenant.
    fn take_out(&mut self, over: impl FnMut(&mut Pinned) -> bool) -> Vec<Pinned> {
        let mut ended: Vec<Pinned> = self.pins.extract_if(.., over).collect();
        for pin in ended.iter_mut().filter(|pin| pin.bytes > 0) {
            if let Some(heir) = self.pins.iter_mut().find(|heir| heir.tenant == pin.tenant) {
                heir.bytes = std::mem::take(&mut pin.bytes);
            }
        }
        ended
    }
}

/// The extras of one shard, by the block's place in it.
#[derive(Default)]
pub(super) struct Extras {
    by_local: HashMap<u32, Extra>,
    /// When something about a block runs out; one entry per block.
    due: BTreeSet<(u64, u32)>,
    /// Which blocks each holder holds, and how many that is in total.
    by_holder: HashMap<OwnerId, HashSet<u32>>,
    held: usize,
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

    /// Adds a pin, or replaces that of the same tenant and holder and returns the replaced one.
    pub(super) fn pin(&mut self, local: u32, pin: Pinned) -> Option<Pinned> {
        if let Some(holder) = pin.holder {
            self.held += usize::from(self.by_holder.entry(holder).or_default().insert(local));
        }
        self.change(local, |extra| {
            match extra.pins.iter_mut().find(|old| old.is_of(pin.tenant, pin.holder)) {
                Some(old) => Some(std::mem::replace(old, pin)),
                None => {
                    extra.pins.push(pin);
                    None
                }
            }
        })
    }

    pub(super) fn unpin(
        &mut self,
        local: u32,
        tenant: TenantIndex,
        holder: Option<OwnerId>,
    ) -> Option<Pinned> {
        self.end(local, |pin| pin.is_of(tenant, holder)).pop()
    }

    /// Takes back one of the times that a holder asked for a block to stay. Returns `None` if it did not. The last one ends its pin.
    pub(super) fn end_one(
        &mut self,
        local: u32,
        tenant: TenantIndex,
        holder: OwnerId,
    ) -> Option<Vec<Pinned>> {
        let extra = self.by_local.get_mut(&local)?;
        let pin = extra.pins.iter_mut().find(|pin| pin.is_of(tenant, Some(holder)))?;
        pin.times -= 1;
        let is_last = pin.times == 0;
        Some(if is_last { self.end(local, |pin| pin.is_of(tenant, Some(holder))) } else { Vec::new() })
    }

    /// Ends what a connection holds of a block.
    pub(super) fn end_held(&mut self, local: u32, holder: OwnerId) -> Vec<Pinned> {
        self.end(local, |pin| pin.holder == Some(holder))
    }

    /// Blocks that a connection holds.
    pub(super) fn held_by(&self, holder: OwnerId) -> Option<&HashSet<u32>> {
        self.by_holder.get(&holder)
    }

    /// How many blocks all connections of the caller of `holder` hold. Looks at each connection that holds any.
    pub(super) fn held_by_caller(&self, holder: OwnerId) -> usize {
        let own = self.by_holder.iter().filter(|(other, _)| holder.has_caller_of(**other));
        own.map(|(_, held)| held.len()).sum()
    }

    /// How many blocks are held, each counted once for each of its holders.
    pub(super) fn held(&self) -> usize {
        self.held
    }

    pub(super) fn pins(&self, local: u32) -> &[Pinned] {
        self.by_local.get(&local).map_or(&[], |extra| &extra.pins)
    }

    /// Takes out the pins of a block that have run out.
    pub(super) fn end_pins(&mut self, local: u32, now_ms: u64) -> Vec<Pinned> {
        self.end(local, |pin| pin.until_ms <= now_ms)
    }

    fn end(&mut self, local: u32, over: impl Fn(&Pinned) -> bool) -> Vec<Pinned> {
        let ended = self.change(local, |extra| extra.take_out(|pin| over(pin)));
        self.forget_holders(local, &ended);
        ended
    }

    fn forget_holders(&mut self, local: u32, ended: &[Pinned]) {
        for holder in ended.iter().filter_map(|pin| pin.holder) {
            let Some(held) = self.by_holder.get_mut(&holder) else { continue };
            self.held -= usize::from(held.remove(&local));
            if held.is_empty() {
                self.by_holder.remove(&holder);
            }
        }
    }

    /// Forgets a block and returns its pins.
    pub(super) fn remove(&mut self, local: u32) -> Vec<Pinned> {
        let pins = self.change(local, |extra| {
            (extra.expires_ms, extra.look_ms) = (None, None);
            std::mem::take(&mut extra.pins)
        });
        self.forget_holders(local, &pins);
        pins
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
        table + pins + (self.due.len() + self.held) * 2 * size_of::<(u64, u32)>()
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
        let pin =
            |tenant, until_ms| Pinned { tenant, holder: None, times: 1, bytes: 1, until_ms, hard: true };
        extras.set_expiry(1, 500);
        assert_eq!(extras.pin(1, pin(7, 300)), None);
        assert_eq!(extras.pin(1, pin(8, 400)), None);
        assert_eq!(extras.pin(1, pin(7, 350)), Some(pin(7, 300)), "one pin per tenant");
        extras.set_expiry(2, 300);
        assert_eq!((extras.due(299), extras.due(300), extras.due(350)), (vec![], vec![2], vec![2, 1]));
        assert_eq!(extras.end_pins(1, 350), [pin(7, 350)]);
        assert_eq!((extras.pins(1), extras.due(399)), (&[pin(8, 400)][..], vec![2]));
        assert_eq!(extras.unpin(1, 7, None), None);
        assert_eq!(extras.unpin(1, 8, None), Some(pin(8, 400)));
        assert_eq!((extras.expires_ms(1), extras.expires_ms(3)), (Some(500), None));
        extras.look_again(2, 600);
        assert_eq!((extras.due(599), extras.expires_ms(2)), (vec![1], Some(300)));
        assert!(extras.remove(1).is_empty() && extras.remove(2).is_empty());
        assert!(extras.by_local.is_empty() && extras.due.is_empty() && extras.due(u64::MAX).is_empty());
    }

    #[test]
    fn what_a_tenant_pays_for_a_block_stays_with_it_until_its_last_pin_ends() {
        let mut extras = Extras::default();
        let [a, b] = [OwnerId(1), OwnerId(2)];
        let pin =
            |holder, bytes, until_ms| Pinned { tenant: 7, holder, times: 1, bytes, until_ms, hard: true };
        extras.pin(1, pin(Some(a), 64, 300));
        extras.pin(1, pin(Some(b), 0, 400));
        extras.pin(1, pin(None, 0, 500));
        assert_eq!((extras.held_by(a), extras.held()), (Some(&HashSet::from([1])), 2));
        assert_eq!(extras.end_pins(1, 300), [pin(Some(a), 0, 300)], "another one pays now");
        assert_eq!((extras.held_by(a), extras.held()), (None, 1));
        extras.pin(1, Pinned { times: 2, ..pin(Some(b), 64, 450) });
        assert_eq!(extras.end_one(1, 7, b), Some(Vec::new()), "asked for twice");
        assert_eq!(extras.end_one(1, 7, a), None);
        assert_eq!(extras.end_one(1, 7, b).unwrap().iter().map(|pin| pin.bytes).sum::<u64>(), 0);
        assert_eq!(extras.unpin(1, 7, None), Some(pin(None, 64, 500)));
        extras.pin(2, pin(Some(b), 64, 500));
        assert_eq!(extras.end_held(2, b), [pin(Some(b), 64, 500)]);
        extras.pin(3, pin(Some(b), 64, 500));
        assert_eq!(extras.remove(3).len(), 1);
        assert!(extras.held == 0 && extras.by_holder.is_empty() && extras.by_local.is_empty());
    }
}
