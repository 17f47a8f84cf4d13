//! Endpoints to peers: made on demand, reused, capped, evicted by SIEVE, and quarantined when they break.
//!
//! * The first caller that asks for a peer connects; others that ask for it meanwhile wait for that one attempt.
//! * Each transfer holds an [`InUse`]. An endpoint is never evicted while one is held; if all are in use, the answer is
//!   [`Error::Full`], at once.
//! * An endpoint that breaks is closed at once, which the other side notices ([`Connector::is_broken`]) and drops its
//!   half. The peer is then refused for a time that doubles with each failure since the last transfer that worked.
//!   After that one caller, or [`EndpointPool::tend`], probes; until the probe has succeeded the others are refused
//!   at once.
//! * An endpoint that the *other* side closed, perhaps because its pool was full, is made again without quarantine.
//!
//! There is one lock, not held while connecting or closing. The state behind it ([`state`]) is a machine without
//! clock or I/O. What is counted against the cap includes endpoints that were dropped but are still in use.

mod pooled;
mod sieve;
mod state;
#[cfg(test)]
mod tests;

use parking_lot::{Condvar, Mutex};
use std::fmt;
use std::hash::Hash;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use crate::transport::{self, Endpoint, Transport};
use state::{Ask, Generation, State};

pub use pooled::Pooled;

/// Makes and ends endpoints. A peer is what it connects to: a host, or one NIC of a host.
pub trait Connector {
    type Peer: Clone + Eq + Hash + fmt::Display;
    /// A handle; clones are the same endpoint.
    type Endpoint: Clone;
    type Error: std::error::Error + 'static;

    /// Connects. May block, for a time that the connector bounds.
    ///
    /// # Errors
    /// Any error counts as a failure of the peer.
    fn connect(&self, peer: &Self::Peer) -> Result<Self::Endpoint, Self::Error>;

    /// Whether it no longer works, as far as is known without trying. Called under the pool's lock: no I/O.
    fn is_broken(&self, endpoint: &Self::Endpoint) -> bool;

    /// Ends it, so that the other side notices. What is in flight on it fails.
    fn close(&self, endpoint: &Self::Endpoint);
}

/// Peers of a transport are addresses.
impl Connector for Arc<dyn Transport> {
    type Peer = String;
    type Endpoint = Arc<dyn Endpoint>;
    type Error = transport::Error;

    fn connect(&self, address: &String) -> Result<Self::Endpoint, transport::Error> {
        self.as_ref().connect(address)
    }

    fn is_broken(&self, endpoint: &Self::Endpoint) -> bool {
        endpoint.down().is_some()
    }

    fn close(&self, endpoint: &Self::Endpoint) {
        endpoint.close();
    }
}

/// Settings of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// The most endpoints open at once. Default 1,024. At least 1.
    pub endpoints_max: usize,
    /// How long a peer is refused after its first failure. Default 50 ms.
    pub backoff_min: Duration,
    /// The longest that a peer is refused. Default 10 s.
    pub backoff_max: Duration,
    /// The most peers in quarantine that are remembered. Default 4,096.
    pub quarantine_max: usize,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            endpoints_max: 1024,
            backoff_min: Duration::from_millis(50),
            backoff_max: Duration::from_secs(10),
            quarantine_max: 4096,
        }
    }
}

impl PoolConfig {
    /// How long the quarantine is after this many failures in a row.
    fn backoff_ms(&self, failures: u32) -> u64 {
        let factor = 1u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.backoff_min.saturating_mul(factor).min(self.backoff_max).as_millis() as u64
    }
}

/// Why a peer is refused without trying.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Quarantined { failures: u32, retry_in_ms: u64 },
    Full { endpoints_max: usize },
}

/// Why there is no endpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error<E> {
    #[error(
        "peer {peer} failed {failures} times in a row and is left alone for another {retry_in_ms} ms; use another path"
    )]
    Quarantined { peer: String, failures: u32, retry_in_ms: u64 },
    #[error(
        "all {endpoints_max} endpoints have transfers in flight, so none can make room for peer {peer}; \
         try again when one completes, or raise the limit"
    )]
    Full { peer: String, endpoints_max: usize },
    #[error("cannot connect to peer {peer}: {source}")]
    Connect { peer: String, source: E },
}

/// What a pool has done since it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Stats {
    /// Attempts to connect, and how many of them failed.
    pub connects: u64,
    pub connect_failures: u64,
    /// Callers that waited for another's attempt.
    pub waits: u64,
    /// Endpoints closed to make room.
    pub evicted: u64,
    /// Endpoints that a transfer here found broken.
    pub broken: u64,
    /// Endpoints that the other side had closed.
    pub dropped_by_peer: u64,
    /// Callers refused at the cap, and because of quarantine.
    pub refused_full: u64,
    pub refused_quarantined: u64,
}

/// See the [module](self).
pub struct EndpointPool<C: Connector> {
    connector: C,
    state: Mutex<State<C::Peer, C::Endpoint>>,
    /// An attempt to connect has ended.
    attempt_ended: Condvar,
}

impl<C: Connector> EndpointPool<C> {
    pub fn new(connector: C, config: PoolConfig) -> Arc<Self> {
        let config = PoolConfig { endpoints_max: config.endpoints_max.max(1), ..config };
        Arc::new(Self { connector, state: Mutex::new(State::new(config)), attempt_ended: Condvar::new() })
    }

    /// An endpoint to `peer`, connected now if there is none. `now_ms` reads the clock that counts quarantines.
    ///
    /// # Errors
    /// The peer is in quarantine, the pool is full of transfers in flight (both at once), or connecting failed.
    pub fn get(
        self: &Arc<Self>,
        peer: &C::Peer,
        now_ms: impl Fn() -> u64,
    ) -> Result<InUse<C>, Error<C::Error>> {
        let mut closed = Vec::new();
        let mut state = self.state.lock();
        let ask = loop {
            match state.ask(peer, now_ms(), |endpoint| self.connector.is_broken(endpoint), &mut closed) {
                Ask::Wait => {
                    self.attempt_ended.wait(&mut state);
                }
                ask => break ask,
            }
        };
        drop(state);
        match ask {
            Ask::Use(endpoint, generation) => Ok(self.in_use(peer, endpoint, generation)),
            Ask::Connect => self.connect(peer, &closed, now_ms),
            Ask::Refused(refused) => {
                self.close(&closed);
                Err(refuse(peer, refused))
            }
            Ask::Wait => unreachable!("the loop above waits"),
        }
    }

    /// Drops endpoints that the other side closed, and probes peers whose quarantine is over and that somebody has
    /// asked for, at most `probes_max` of them. One thread must call it now and then; it blocks as long as the
    /// probes do.
    pub fn tend(self: &Arc<Self>, now_ms: impl Fn() -> u64, probes_max: usize) {
        let broken = |endpoint: &_| self.connector.is_broken(endpoint);
        let (closed, probes) = self.state.lock().tend(now_ms(), probes_max, broken);
        self.close(&closed);
        for peer in probes {
            // The state records a failure, and a success too.
            let _ = self.get(&peer, &now_ms);
        }
    }

    /// Endpoints that take resources now.
    pub fn open(&self) -> usize {
        self.state.lock().open()
    }

    pub fn stats(&self) -> Stats {
        self.state.lock().stats
    }

    fn connect(
        self: &Arc<Self>,
        peer: &C::Peer,
        closed: &[C::Endpoint],
        now_ms: impl Fn() -> u64,
    ) -> Result<InUse<C>, Error<C::Error>> {
        let mut ending = Ending { pool: self, peer, connected: None, now_ms };
        self.close(closed);
        match self.connector.connect(peer) {
            Ok(endpoint) => {
                let generation = ending.connected.insert(self.state.lock().connected(peer, endpoint.clone()));
                Ok(self.in_use(peer, endpoint, *generation))
            }
            Err(source) => Err(Error::Connect { peer: peer.to_string(), source }),
        }
    }

    fn in_use(self: &Arc<Self>, peer: &C::Peer, endpoint: C::Endpoint, generation: Generation) -> InUse<C> {
        InUse { pool: self.clone(), peer: peer.clone(), endpoint, generation, worked: false }
    }

    fn close(&self, endpoints: &[C::Endpoint]) {
        for endpoint in endpoints {
            self.connector.close(endpoint);
        }
    }
}

impl<C: Connector> Drop for EndpointPool<C> {
    fn drop(&mut self) {
        let endpoints: Vec<_> = self.state.lock().endpoints().cloned().collect();
        self.close(&endpoints);
    }
}

fn refuse<E>(peer: &impl fmt::Display, refused: Refused) -> Error<E> {
    let peer = peer.to_string();
    match refused {
        Refused::Quarantined { failures, retry_in_ms } => Error::Quarantined { peer, failures, retry_in_ms },
        Refused::Full { endpoints_max } => Error::Full { peer, endpoints_max },
    }
}

/// Ends an attempt to connect however it ends, panics included, because others may be waiting for it.
struct Ending<'a, C: Connector, N: Fn() -> u64> {
    pool: &'a EndpointPool<C>,
    peer: &'a C::Peer,
    connected: Option<Generation>,
    now_ms: N,
}

impl<C: Connector, N: Fn() -> u64> Drop for Ending<'_, C, N> {
    fn drop(&mut self) {
        if self.connected.is_none() {
            self.pool.state.lock().failed(self.peer, (self.now_ms)());
        }
        self.pool.attempt_ended.notify_all();
    }
}

/// An endpoint that a transfer uses. While it is held the endpoint is not evicted.
///
/// Dropping it says nothing about the transfer: [`worked`](Self::worked) and [`broke`](Self::broke) do.
pub struct InUse<C: Connector> {
    pool: Arc<EndpointPool<C>>,
    peer: C::Peer,
    endpoint: C::Endpoint,
    generation: Generation,
    worked: bool,
}

impl<C: Connector> InUse<C> {
    /// The transfer is done: the peer's failures are forgotten.
    pub fn worked(mut self) {
        self.worked = true;
    }

    /// The endpoint failed: it is closed, and the peer quarantined. If the pool has dropped this endpoint before, its
    /// successor is not touched.
    pub fn broke(self, now_ms: u64) {
        let broken = self.pool.state.lock().broke(&self.peer, self.generation, now_ms);
        if let Some(endpoint) = broken {
            self.pool.connector.close(&endpoint);
        }
    }
}

impl<C: Connector> Deref for InUse<C> {
    type Target = C::Endpoint;

    fn deref(&self) -> &C::Endpoint {
        &self.endpoint
    }
}

impl<C: Connector> Drop for InUse<C> {
    fn drop(&mut self) {
        self.pool.state.lock().release(&self.peer, self.generation, self.worked);
    }
}
