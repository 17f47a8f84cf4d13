//! Peers, the rails to them, and their segments as this node may use them.

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use super::entry::Piece;
use super::plan::{PlanConfig, Rail, Schedule};
use crate::transport::{Endpoint, Error, Grant, Transport};

/// A rail to a peer: how to reach it, and the endpoint while it works.
pub(super) struct Link {
    pub(super) transport: Arc<dyn Transport>,
    pub(super) address: String,
    endpoint: RwLock<Option<Arc<dyn Endpoint>>>,
    mending: Mutex<Mending>,
}

/// When to try a broken link again.
#[derive(Default)]
struct Mending {
    failed: u32,
    next: Option<Instant>,
}

impl Link {
    fn new(transport: Arc<dyn Transport>, address: String) -> Self {
        Self { transport, address, endpoint: RwLock::default(), mending: Mutex::default() }
    }

    pub(super) fn endpoint(&self) -> Option<Arc<dyn Endpoint>> {
        let endpoint = self.endpoint.read().unwrap_or_else(PoisonError::into_inner).clone();
        endpoint.filter(|endpoint| endpoint.down().is_none())
    }

    fn set(&self, endpoint: Option<Arc<dyn Endpoint>>) {
        *self.endpoint.write().unwrap_or_else(PoisonError::into_inner) = endpoint;
    }

    fn connect(&self, expected: Option<&str>) -> Result<Arc<dyn Endpoint>, Error> {
        let endpoint = self.transport.connect(&self.address)?;
        if let Some(name) = expected.filter(|&name| name != endpoint.peer()) {
            let reason = format!("{} answers where {name} was", endpoint.peer());
            return Err(Error::Unreachable {
                transport: self.transport.capabilities().name,
                address: self.address.clone(),
                reason,
            });
        }
        self.set(Some(endpoint.clone()));
        Ok(endpoint)
    }
}

/// A peer and all rails to it.
pub struct Peer {
    name: String,
    pub(super) links: Vec<Link>,
    pub(super) state: Mutex<State>,
    segments: Mutex<Vec<Weak<Segment>>>,
    /// How often the engine was asked to hand out work and has not yet.
    pub(super) pumps: AtomicUsize,
}

pub(super) struct State {
    pub(super) rails: Vec<Rail>,
    pub(super) schedule: Schedule<Piece>,
}

/// A rail in numbers. Totals count from its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RailMetrics {
    pub transport: &'static str,
    pub address: String,
    pub usable: bool,
    pub queued_bytes: u64,
    /// Measured, smoothed.
    pub rate_bytes_per_second: u64,
    pub delivered_bytes: u64,
    pub slices: u64,
    pub failures: u64,
}

impl Peer {
    /// Connects over every transport given; one that works is enough, and those that do not are tried again later.
    pub(super) fn connect(
        rails: Vec<(Arc<dyn Transport>, String)>,
        plan: &PlanConfig,
    ) -> Result<Arc<Self>, Error> {
        let links: Vec<Link> =
            rails.into_iter().map(|(transport, address)| Link::new(transport, address)).collect();
        let mut name: Option<String> = None;
        let mut last =
            Error::Unsupported { transport: "the engine", what: "connect to a peer without rails" };
        for link in &links {
            match link.connect(name.as_deref()) {
                Ok(endpoint) => name = Some(name.unwrap_or_else(|| endpoint.peer().to_owned())),
                Err(error) => last = error,
            }
        }
        let name = name.ok_or(last)?;
        let usable = |link: &Link| Rail { usable: link.endpoint().is_some(), ..Rail::new(plan) };
        let state = State { rails: links.iter().map(usable).collect(), schedule: Schedule::default() };
        Ok(Arc::new(Self {
            name,
            links,
            state: Mutex::new(state),
            segments: Mutex::default(),
            pumps: AtomicUsize::new(0),
        }))
    }

    /// As it called itself.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Opens a segment over every rail that works.
    pub fn open_segment(self: &Arc<Self>, name: &str) -> Result<Arc<Segment>, Error> {
        let reason = || "no rail to it works".to_owned();
        let mut result = Err(Error::PeerDown { peer: self.name.clone(), reason: reason() });
        let mut grants = Vec::new();
        for link in &self.links {
            let grant = link.endpoint().map(|endpoint| endpoint.open(name));
            grants.push(match grant {
                Some(Ok(grant)) => {
                    result = Ok(());
                    Some(grant)
                }
                Some(Err(error)) => {
                    if result.is_err() {
                        result = Err(error);
                    }
                    None
                }
                None => None,
            });
        }
        result?;
        let segment =
            Arc::new(Segment { peer: self.clone(), name: name.to_owned(), grants: RwLock::new(grants) });
        let mut segments = self.segments();
        segments.retain(|segment| segment.strong_count() > 0);
        segments.push(Arc::downgrade(&segment));
        Ok(segment)
    }

    pub fn rails(&self) -> Vec<RailMetrics> {
        let state = self.state();
        let row = |(link, rail): (&Link, &Rail)| RailMetrics {
            transport: link.transport.capabilities().name,
            address: link.address.clone(),
            usable: rail.usable,
            queued_bytes: rail.queued_bytes,
            rate_bytes_per_second: rail.rate,
            delivered_bytes: rail.delivered_bytes,
            slices: rail.slices,
            failures: rail.failures,
        };
        self.links.iter().zip(&state.rails).map(row).collect()
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A rail's endpoint broke: nothing new goes over it until it is mended.
    pub(super) fn broke(&self, rail: usize) {
        self.state().rails[rail].usable = false;
        if let Some(endpoint) =
            self.links[rail].endpoint.read().unwrap_or_else(PoisonError::into_inner).as_ref()
        {
            endpoint.close();
        }
    }

    /// Connects broken links whose time has come, and renews grants that end soon. Blocks.
    pub(super) fn mend(&self) {
        for (rail, link) in self.links.iter().enumerate() {
            if link.endpoint().is_none() && link.due() {
                let mended = link.connect(Some(&self.name)).is_ok() && self.reopen(rail, |_| true);
                link.tried(mended);
                self.state().rails[rail].usable = mended;
            } else if link.endpoint().is_some() {
                self.reopen(rail, |grant| grant.is_none_or(|grant| grant.ends_soon()));
            }
        }
    }

    /// Opens segments again over one rail, those that `wanted` says. Whether all that were wanted could be.
    fn reopen(&self, rail: usize, wanted: impl Fn(Option<&Grant>) -> bool) -> bool {
        let segments: Vec<_> = self.segments().iter().filter_map(Weak::upgrade).collect();
        segments.iter().filter(|segment| wanted(segment.grant(rail).as_deref())).all(|segment| {
            let grant = self.links[rail].endpoint().and_then(|endpoint| endpoint.open(&segment.name).ok());
            let opened = grant.is_some();
            segment.grants.write().unwrap_or_else(PoisonError::into_inner)[rail] = grant;
            opened
        })
    }

    fn segments(&self) -> MutexGuard<'_, Vec<Weak<Segment>>> {
        self.segments.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Link {
    /// For messages.
    pub(super) fn describe(&self) -> String {
        format!("{} to {}", self.transport.capabilities().name, self.address)
    }

    fn due(&self) -> bool {
        let mending = self.mending.lock().unwrap_or_else(PoisonError::into_inner);
        mending.next.is_none_or(|next| Instant::now() >= next)
    }

    /// Doubles the wait with each failure, from 100 ms to 5 s.
    fn tried(&self, mended: bool) {
        const FIRST: Duration = Duration::from_millis(100);
        let mut mending = self.mending.lock().unwrap_or_else(PoisonError::into_inner);
        if mended {
            *mending = Mending::default();
            return;
        }
        let wait = (FIRST * (1 << mending.failed.min(10))).min(Duration::from_secs(5));
        *mending = Mending { failed: mending.failed + 1, next: Some(Instant::now() + wait) };
    }
}

/// A peer's segment, open over the rails that work.
pub struct Segment {
    peer: Arc<Peer>,
    name: String,
    grants: RwLock<Vec<Option<Arc<Grant>>>>,
}

impl Segment {
    pub fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The right to it over one rail.
    pub(super) fn grant(&self, rail: usize) -> Option<Arc<Grant>> {
        self.grants.read().unwrap_or_else(PoisonError::into_inner).get(rail).cloned().flatten()
    }

    /// Any of its grants, for what they all say: regions and lengths.
    pub fn description(&self) -> Option<Arc<Grant>> {
        self.grants.read().unwrap_or_else(PoisonError::into_inner).iter().flatten().next().cloned()
    }
}

impl Grant {
    /// Whether it should be renewed: less than this is left of it.
    fn ends_soon(&self) -> bool {
        const MARGIN: Duration = Duration::from_secs(2);
        self.expires < Instant::now() + MARGIN
    }
}
