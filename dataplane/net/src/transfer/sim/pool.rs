//! Users of a host's [`EndpointPool`] over the same rails: they hold endpoints for a while, and say whether they
//! worked.

use super::*;
use crate::endpoint_pool::{EndpointPool, Error, InUse, PoolConfig};

type Held = InUse<Arc<dyn Transport>>;

pub(super) struct PoolUsers {
    net: Arc<Net>,
    pool: Arc<EndpointPool<Arc<dyn Transport>>>,
    endpoints_max: usize,
    /// Until when each is held.
    held: Vec<(u64, Held)>,
}

impl PoolUsers {
    pub(super) fn new(net: &Arc<Net>, rail: Arc<dyn Transport>, endpoints_max: usize) -> Self {
        let backoff_max = Duration::from_secs(2);
        let config = PoolConfig { endpoints_max, backoff_max, ..PoolConfig::default() };
        Self { net: net.clone(), pool: EndpointPool::new(rail, config), endpoints_max, held: Vec::new() }
    }

    /// Somebody wants an endpoint for `time`.
    pub(super) fn take(&mut self, peer: usize, time: u64) {
        let now = self.net.now();
        match self.pool.get(&peer.to_string(), || now / MS) {
            Ok(endpoint) => {
                assert_eq!(endpoint.peer(), format!("host{peer}"));
                self.held.push((now + time, endpoint));
            }
            Err(Error::Full { .. }) => {
                assert!(self.held.len() >= self.endpoints_max, "full of idle endpoints")
            }
            Err(Error::Quarantined { .. } | Error::Connect { .. }) => {}
        }
        assert!(self.pool.open() <= self.endpoints_max, "{} endpoints open", self.pool.open());
    }

    pub(super) fn tick(&mut self) {
        let now = self.net.now();
        for (_, endpoint) in self.held.extract_if(.., |(until, _)| *until <= now) {
            if endpoint.notify(b"hello").is_ok() { endpoint.worked() } else { endpoint.broke(now / MS) }
        }
        self.pool.tend(|| now / MS, 2);
        assert!(self.pool.open() <= self.endpoints_max, "{} endpoints open", self.pool.open());
    }

    /// Once all is well and quarantines are over, every peer is reached.
    pub(super) fn check_reaches(&mut self, peer: usize) {
        assert!(self.held.is_empty(), "held beyond their time");
        self.take(peer, 0);
        assert_eq!(self.held.len(), 1, "peer {peer} is well and not reached: {:?}", self.pool.stats());
        self.tick();
    }
}
