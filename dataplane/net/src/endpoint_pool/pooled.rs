//! A transport whose endpoints come from an [`EndpointPool`]: all who connect through it share endpoints, and find a
//! peer that keeps failing in quarantine.

use parking_lot::Mutex;
use std::sync::Arc;

use super::{EndpointPool, Error, InUse, PoolConfig, Stats};
use crate::transport::{
    self, Cancel, Capabilities, Endpoint, Grant, Mapped, Op, RemoteRange, Sink, Transport,
};
use kvasir_memory::region::Region;
use kvasir_protocol::clock::Clock;

type Pool = EndpointPool<Arc<dyn Transport>>;

/// See the [module](self).
pub struct Pooled {
    transport: Arc<dyn Transport>,
    pool: Arc<Pool>,
    clock: Clock,
}

impl Pooled {
    pub fn new(transport: Arc<dyn Transport>, config: PoolConfig, clock: Clock) -> Self {
        let pool = EndpointPool::new(Arc::clone(&transport), config);
        Self { transport, pool, clock }
    }

    /// Drops endpoints that the other side closed and probes peers whose quarantine is over; see
    /// [`EndpointPool::tend`].
    pub fn tend(&self) {
        /// One thread does this for all peers, and a probe may take as long as a connection.
        const PROBES: usize = 4;
        self.pool.tend(|| self.clock.now_ms(), PROBES);
    }

    pub fn stats(&self) -> Stats {
        self.pool.stats()
    }

    /// Endpoints open now.
    pub fn open(&self) -> usize {
        self.pool.open()
    }
}

impl Transport for Pooled {
    fn capabilities(&self) -> Capabilities {
        self.transport.capabilities()
    }

    fn register(&self, region: &Region) -> Result<(), transport::Error> {
        self.transport.register(region)
    }

    fn unregister(&self, region: &Region) {
        self.transport.unregister(region);
    }

    fn address(&self) -> Option<String> {
        self.transport.address()
    }

    fn connect(&self, address: &str) -> Result<Arc<dyn Endpoint>, transport::Error> {
        let got = self.pool.get(&address.to_owned(), || self.clock.now_ms());
        let in_use = got.map_err(|error| match error {
            Error::Connect { source, .. } => source,
            refused => transport::Error::Unreachable {
                transport: self.transport.capabilities().name,
                address: address.to_owned(),
                reason: refused.to_string(),
            },
        })?;
        let endpoint = Arc::clone(&in_use);
        Ok(Arc::new(Shared { endpoint, clock: self.clock, in_use: Mutex::new(Some(in_use)) }))
    }

    fn revoked(&self) {
        self.transport.revoked();
    }
}

/// One user's share of an endpoint. Closing it says that the endpoint broke; dropping it says that it worked, unless it
/// is down.
struct Shared {
    endpoint: Arc<dyn Endpoint>,
    clock: Clock,
    in_use: Mutex<Option<InUse<Arc<dyn Transport>>>>,
}

impl Shared {
    fn end(&self, worked: bool) {
        let in_use = self.in_use.lock().take();
        match in_use {
            Some(in_use) if worked => in_use.worked(),
            Some(in_use) => in_use.broke(self.clock.now_ms()),
            None => {}
        }
    }
}

impl Endpoint for Shared {
    fn peer(&self) -> &str {
        self.endpoint.peer()
    }

    fn open(&self, segment: &str) -> Result<Arc<Grant>, transport::Error> {
        self.endpoint.open(segment)
    }

    fn submit(&self, ops: Vec<Op>, sink: &Arc<dyn Sink>) {
        self.endpoint.submit(ops, sink);
    }

    fn cancel(&self, cancel: &Cancel) {
        self.endpoint.cancel(cancel);
    }

    fn notify(&self, message: &[u8]) -> Result<(), transport::Error> {
        self.endpoint.notify(message)
    }

    fn map(&self, grant: &Grant, range: RemoteRange) -> Result<Mapped, transport::Error> {
        self.endpoint.map(grant, range)
    }

    fn down(&self) -> Option<String> {
        self.endpoint.down()
    }

    fn in_flight(&self) -> usize {
        self.endpoint.in_flight()
    }

    fn close(&self) {
        self.end(false);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.end(self.endpoint.down().is_none());
    }
}
