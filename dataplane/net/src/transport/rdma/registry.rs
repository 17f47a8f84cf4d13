//! What this node has registered: its own regions for operations, and those that peers hold grants on.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

use super::Error;
use super::device::Device;
use super::memory::MemoryRegion;
use crate::transport::grant::Granted;
use kvasir_memory::region::Region;
use kvasir_os::time::Instant;

/// Regions by their id, and grants by their key.
///
/// Every peer has registrations of its own for each segment, and so its own keys: they go with the last of its grants on
/// that segment, and what other peers hold stays. The price is one more pinning of the same pages per peer.
pub(super) struct Registry {
    device: Arc<Device>,
    ours: Mutex<HashMap<u64, Arc<MemoryRegion>>>,
    granted: Mutex<HashMap<u64, Lent>>,
}

struct Lent {
    /// Dropped first: the grant is in use for as long as they are registered.
    regions: Vec<Arc<MemoryRegion>>,
    granted: Arc<Granted>,
}

impl Registry {
    pub(super) fn new(device: &Arc<Device>) -> Self {
        Self { device: Arc::clone(device), ours: Mutex::default(), granted: Mutex::default() }
    }

    pub(super) fn register(&self, region: &Region) -> Result<(), Error> {
        if self.find(region).is_some() {
            return Ok(());
        }
        let registered = MemoryRegion::of(&self.device, region, None)?;
        self.ours.lock().insert(region.id(), registered);
        Ok(())
    }

    pub(super) fn unregister(&self, region: &Region) {
        self.ours.lock().remove(&region.id());
    }

    pub(super) fn find(&self, region: &Region) -> Option<Arc<MemoryRegion>> {
        self.ours.lock().get(&region.id()).cloned()
    }

    /// Registers what a peer was granted, until [`sweep`](Self::sweep) finds it dead. A grant that renews one still alive
    /// shares its registration, as the peer may reach that memory anyway: nothing is pinned again while a lease is renewed.
    pub(super) fn lend(&self, granted: Arc<Granted>) -> Result<Vec<Arc<MemoryRegion>>, Error> {
        let register = |region| MemoryRegion::of(&self.device, region, Some(granted.access));
        let regions = match self.renewed_by(&granted) {
            Some(regions) => regions,
            None => granted.regions.iter().map(register).collect::<Result<Vec<_>, _>>()?,
        };
        let lent = Lent { granted, regions: regions.clone() };
        self.granted.lock().insert(lent.granted.key, lent);
        Ok(regions)
    }

    /// What a living grant of the same peer on the same export of the same segment has registered. Revoking the segment or
    /// moving to the next epoch ends both grants, and nothing else does before their leases.
    fn renewed_by(&self, granted: &Granted) -> Option<Vec<Arc<MemoryRegion>>> {
        let all = self.granted.lock();
        let renewed = all.values().find(|lent| {
            let held = &lent.granted;
            held.peer == granted.peer
                && held.access == granted.access
                && Arc::ptr_eq(&held.regions, &granted.regions)
                && held.enter().is_ok()
        });
        renewed.map(|lent| lent.regions.clone())
    }

    /// Invalidates the keys of grants that were revoked, fenced off or have expired. Returns when the next one expires.
    pub(super) fn sweep(&self) -> Option<Instant> {
        let mut granted = self.granted.lock();
        granted.retain(|_, lent| lent.granted.enter().is_ok());
        granted.values().map(|lent| lent.granted.expires).min()
    }
}
