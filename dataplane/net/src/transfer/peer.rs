//! Peers, the rails to them, and their segments as this node may use them.

use parking_lot::{Mutex, MutexGuard, RwLock};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use super::complete::same;
use super::entry::{Entry, Piece};
use super::order::{self, Order};
use super::plan::{PlanConfig, Rail, Schedule};
use super::submit::Clock;
use crate::transport::{Denied, Endpoint, Error, Grant, OpError, Transport};
use kvasir_memory::region::Location;
use kvasir_os::time::{Duration, Instant};

/// A rail to a peer: how to reach it, and the endpoint while it works.
pub(super) struct Link {
    pub(super) transport: Arc<dyn Transport>,
    pub(super) address: String,
    endpoint: RwLock<Option<Arc<dyn Endpoint>>>,
    /// How often it broke or could not be connected since something last came through whole.
    failures: AtomicU32,
    /// It is not connected again before this time.
    quarantined_until: Mutex<Option<Instant>>,
}

impl Link {
    fn new(transport: Arc<dyn Transport>, address: String) -> Self {
        Self {
            transport,
            address,
            endpoint: RwLock::default(),
            failures: AtomicU32::new(0),
            quarantined_until: Mutex::default(),
        }
    }

    /// The endpoint, if it works.
    pub(super) fn endpoint(&self) -> Option<Arc<dyn Endpoint>> {
        self.current().filter(|endpoint| endpoint.down().is_none())
    }

    /// The endpoint, working or not.
    fn current(&self) -> Option<Arc<dyn Endpoint>> {
        self.endpoint.read().clone()
    }

    fn set(&self, endpoint: Option<Arc<dyn Endpoint>>) {
        *self.endpoint.write() = endpoint;
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

/// The order in which rails carry what moves between memory here and memory at the peer.
pub type Paths = dyn Fn(Location, Location) -> Order + Send + Sync;

/// A peer and all rails to it.
pub struct Peer {
    name: String,
    pub(super) links: Vec<Link>,
    pub(super) state: Mutex<State>,
    segments: Mutex<Vec<Weak<Segment>>>,
    /// How many requests to hand out work the engine has not served yet.
    pub(super) pumps: AtomicUsize,
    /// A thread is mending its rails.
    pub(super) mending: AtomicBool,
    /// `None` means that all rails are alike.
    paths: RwLock<Option<Arc<Paths>>>,
    clock: Clock,
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
    /// Measured and smoothed.
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
        clock: &Clock,
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
        Ok(Self::new(name.ok_or(last)?, links, plan, clock))
    }

    /// Connects over the first rail at which the peer of this name answers. No further rail is tried after a second, so
    /// that many rails to a peer that is away cost little more time than one.
    pub(super) fn connect_to(
        name: &str,
        rails: Vec<(Arc<dyn Transport>, String)>,
        plan: &PlanConfig,
        clock: &Clock,
    ) -> Result<Arc<Self>, Error> {
        let links: Vec<Link> =
            rails.into_iter().map(|(transport, address)| Link::new(transport, address)).collect();
        const PATIENCE: Duration = Duration::from_secs(1);
        let start = clock();
        let mut last =
            Error::Unsupported { transport: "the engine", what: "connect to a peer without rails" };
        for link in links.iter().take_while(|_| clock() - start < PATIENCE) {
            match link.connect(Some(name)) {
                Ok(_) => return Ok(Self::new(name.to_owned(), links, plan, clock)),
                Err(error) => {
                    link.failed(clock());
                    last = error;
                }
            }
        }
        Err(last)
    }

    fn new(name: String, links: Vec<Link>, plan: &PlanConfig, clock: &Clock) -> Arc<Self> {
        let mut rails = vec![Rail::new(plan); links.len()];
        for (rail, link) in rails.iter_mut().zip(&links) {
            rail.usable = link.endpoint().is_some();
        }
        let state = State { rails, schedule: Schedule::default() };
        Arc::new(Self {
            name,
            links,
            state: Mutex::new(state),
            segments: Mutex::default(),
            pumps: AtomicUsize::new(0),
            mending: AtomicBool::new(false),
            paths: RwLock::default(),
            clock: clock.clone(),
        })
    }

    /// Sets the order for what is submitted from here on.
    pub fn prefer(&self, paths: Arc<Paths>) {
        *self.paths.write() = Some(paths);
    }

    /// Finds the order in which an entry's pieces go.
    pub(super) fn orders(&self) -> Orders {
        Orders { paths: self.paths.read().clone(), last: None }
    }

    /// The name that it gave itself.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Opens a segment over every rail that works. If none of those that are connected so far can give it, the others are
    /// connected first.
    pub fn open_segment(self: &Arc<Self>, name: &str) -> Result<Arc<Segment>, Error> {
        let asked = self.connected();
        self.open_connected(name).or_else(|refused| self.open_over_others(name, asked, refused))
    }

    /// Opens a segment that the rails `asked` do not give: over the others, also those that another thread connects meanwhile.
    fn open_over_others(
        self: &Arc<Self>,
        name: &str,
        asked: u64,
        refused: Error,
    ) -> Result<Arc<Segment>, Error> {
        self.connect_more((self.clock)());
        let connected = self.connected();
        if connected & !asked != 0 {
            return self.open_connected(name);
        }
        // That memory is out of reach for some kinds of rails says nothing of one that is down.
        let some_are_down = (connected.count_ones() as usize) < self.links.len();
        Err(if is_unreachable(&refused) && some_are_down {
            let reason = "no rail that reaches this memory works now".to_owned();
            Error::PeerDown { peer: self.name.clone(), reason }
        } else {
            refused
        })
    }

    /// The rails that work now, one bit each.
    fn connected(&self) -> u64 {
        let works = |(_, link): &(usize, &Link)| link.endpoint().is_some();
        self.links.iter().enumerate().filter(works).fold(0, |rails, (rail, _)| rails | order::bit(rail))
    }

    /// Connects the rails that are down and due.
    fn connect_more(&self, now: Instant) {
        for (rail, link) in self.links.iter().enumerate() {
            if link.endpoint().is_none() && link.due(now) {
                match link.connect(Some(&self.name)) {
                    Ok(_) => self.state().rails[rail].usable = true,
                    Err(_) => link.failed(now),
                }
            }
        }
    }

    fn open_connected(self: &Arc<Self>, name: &str) -> Result<Arc<Segment>, Error> {
        let reason = || "no rail to it works".to_owned();
        let mut result = Err(Error::PeerDown { peer: self.name.clone(), reason: reason() });
        let mut grants = Vec::new();
        let mut unreachable = 0;
        for (rail, link) in self.links.iter().enumerate() {
            let grant = link.endpoint().map(|endpoint| endpoint.open(name));
            grants.push(match grant {
                Some(Ok(grant)) => {
                    // It may just have been connected by a thread that still opens other segments over it.
                    self.state().rails[rail].usable = true;
                    result = Ok(());
                    Some(grant)
                }
                Some(Err(error)) => {
                    unreachable |= if is_unreachable(&error) { order::bit(rail) } else { 0 };
                    if result.is_err() {
                        result = Err(error);
                    }
                    None
                }
                None => None,
            });
        }
        result?;
        // The peer may have restarted while it was asked, so only its latest epoch counts.
        let epoch = grants.iter().flatten().map(|grant: &Arc<Grant>| grant.epoch).max().unwrap_or_default();
        grants.iter_mut().for_each(|grant| *grant = grant.take().filter(|grant| grant.epoch == epoch));
        let segment = Arc::new(Segment {
            id: SEGMENTS.fetch_add(1, Ordering::Relaxed),
            peer: self.clone(),
            name: name.to_owned(),
            epoch,
            stale: AtomicBool::new(false),
            grants: RwLock::new(grants),
            unreachable: AtomicU64::new(unreachable),
        });
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
        self.state.lock()
    }

    /// An endpoint of a rail broke (`None`: the rail had no working endpoint). Nothing new goes over the rail until it
    /// is mended, which may have happened already.
    pub(super) fn broke(&self, rail: usize, endpoint: Option<&Arc<dyn Endpoint>>, now: Instant) {
        let link = &self.links[rail];
        let current = link.current();
        let mended = match endpoint {
            Some(broken) => current.as_ref().is_some_and(|current| !same(current, broken)),
            None => link.endpoint().is_some(),
        };
        if mended {
            return;
        }
        let news = std::mem::replace(&mut self.state().rails[rail].usable, false);
        if news {
            link.failed(now);
        }
        // No lock is held here, because closing completes what is in flight.
        if let Some(endpoint) = current {
            endpoint.close();
        }
    }

    /// Whether [`mend`](Self::mend) would do something.
    pub(super) fn ails(&self, now: Instant) -> bool {
        let segments: Vec<_> = self.segments().iter().filter_map(Weak::upgrade).collect();
        self.links.iter().enumerate().any(|(rail, link)| match link.endpoint() {
            None => link.due(now),
            Some(_) => !self.state().rails[rail].usable || segments.iter().any(|s| s.wants_grant(rail, now)),
        })
    }

    /// Connects broken links whose time has come, and renews grants that end soon. Blocks.
    pub(super) fn mend(&self, now: Instant) {
        for (rail, link) in self.links.iter().enumerate() {
            if link.endpoint().is_none() && link.due(now) && link.connect(Some(&self.name)).is_err() {
                link.failed(now);
            }
            let connected = link.endpoint().is_some();
            if connected {
                self.reopen(rail, now);
            }
            self.state().rails[rail].usable = connected;
        }
    }

    /// Opens segments over a rail where their grants are missing or end soon.
    fn reopen(&self, rail: usize, now: Instant) {
        let segments: Vec<_> = self.segments().iter().filter_map(Weak::upgrade).collect();
        for segment in segments.iter().filter(|segment| segment.wants_grant(rail, now)) {
            let Some(endpoint) = self.links[rail].endpoint() else { return };
            segment.granted(rail, endpoint.open(&segment.name));
        }
    }

    fn segments(&self) -> MutexGuard<'_, Vec<Weak<Segment>>> {
        self.segments.lock()
    }
}

/// Finds the order of one entry after another. The last answer is kept, as most entries move between the same places
/// as the one before.
pub(super) struct Orders {
    paths: Option<Arc<Paths>>,
    last: Option<((Location, u64, u32), Order)>,
}

impl Orders {
    pub(super) fn of(&mut self, entry: &Entry) -> Order {
        let (Some(paths), Some(local), Some(remote)) =
            (&self.paths, entry.local.first(), entry.remote.first())
        else {
            return Order::default();
        };
        let key = (local.region().location(), entry.segment.id, remote.region);
        if let Some((_, order)) = self.last.filter(|(last, _)| *last == key) {
            return order;
        }
        let grant = entry.segment.description();
        let region = grant.as_ref().and_then(|grant| grant.regions.get(remote.region as usize));
        // Where the segment is not open over any rail, the order does not matter.
        let order = region.map_or_else(Order::default, |region| paths(key.0, region.location));
        let order = order.without(entry.segment.unreachable.load(Ordering::Relaxed));
        self.last = Some((key, order));
        order
    }
}

impl Link {
    /// For error messages.
    pub(super) fn describe(&self) -> String {
        format!("{} to {}", self.transport.capabilities().name, self.address)
    }

    fn due(&self, now: Instant) -> bool {
        let until = self.quarantined_until.lock();
        until.is_none_or(|until| now >= until)
    }

    /// Called when something came through whole: earlier failures are forgotten.
    pub(super) fn worked(&self) {
        if self.failures.load(Ordering::Relaxed) > 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    /// Called when it broke, or could not be connected. After the first failure it may be connected again at once; then the wait
    /// doubles with each failure, from 100 ms to 5 s, even for a rail that connects and then breaks each time.
    fn failed(&self, now: Instant) {
        const FIRST: Duration = Duration::from_millis(100);
        let before = self.failures.fetch_add(1, Ordering::Relaxed);
        let wait = match before {
            0 => Duration::ZERO,
            n => (FIRST * (1 << (n - 1).min(10))).min(Duration::from_secs(5)),
        };
        *self.quarantined_until.lock() = Some(now + wait);
    }
}

/// Numbers of segments, over all peers.
static SEGMENTS: AtomicU64 = AtomicU64::new(0);

/// A peer's segment, open over the rails that work.
///
/// It belongs to one epoch of the peer. A peer that restarted may hold other bytes under the same name, so what is left
/// to move then fails with [`Denied::StaleEpoch`], and the segment must be opened again.
pub struct Segment {
    pub(super) id: u64,
    peer: Arc<Peer>,
    name: String,
    epoch: u64,
    /// The peer has begun another epoch.
    stale: AtomicBool,
    grants: RwLock<Vec<Option<Arc<Grant>>>>,
    /// Rails over which the peer can never give this segment, one bit each.
    unreachable: AtomicU64,
}

impl Segment {
    pub fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The grant on it over one rail.
    pub(super) fn grant(&self, rail: usize) -> Result<Arc<Grant>, OpError> {
        if self.stale.load(Ordering::Acquire) {
            return Err(OpError::Denied(Denied::StaleEpoch));
        }
        let grant = self.grants.read().get(rail).cloned().flatten();
        grant.ok_or_else(|| OpError::NotOpen { segment: self.name.clone() })
    }

    /// Any of its grants, for what all of them say: regions and lengths.
    pub fn description(&self) -> Option<Arc<Grant>> {
        self.grants.read().iter().flatten().next().cloned()
    }

    fn wants_grant(&self, rail: usize, now: Instant) -> bool {
        if self.unreachable.load(Ordering::Relaxed) & order::bit(rail) != 0 {
            return false;
        }
        match self.grant(rail) {
            Ok(grant) => grant.ends_soon(now),
            Err(OpError::NotOpen { .. }) => true,
            Err(_) => false,
        }
    }

    /// The peer's answer to opening it again over a rail.
    fn granted(&self, rail: usize, answer: Result<Arc<Grant>, Error>) {
        let grant = match answer {
            Ok(grant) if grant.epoch > self.epoch => return self.stale.store(true, Ordering::Release),
            Ok(grant) => Some(grant).filter(|grant| grant.epoch == self.epoch),
            Err(error @ Error::Denied { .. }) => {
                let unreachable = if is_unreachable(&error) { order::bit(rail) } else { 0 };
                self.unreachable.fetch_or(unreachable, Ordering::Relaxed);
                None
            }
            // The grant that we have may still be good for a while.
            Err(_) => return,
        };
        self.grants.write()[rail] = grant;
    }
}

fn is_unreachable(error: &Error) -> bool {
    matches!(error, Error::Denied { denied: Denied::Unreachable, .. })
}

impl Grant {
    /// Whether it ends so soon that it should be renewed now.
    fn ends_soon(&self, now: Instant) -> bool {
        const MARGIN: Duration = Duration::from_secs(2);
        self.expires < now + MARGIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::{Batch, Class, Engine, EngineConfig};
    use crate::transport::loopback::Loopback;
    use crate::transport::node::{Node, Secret};
    use crate::transport::{Access, Direction, RemoteRange};
    use kvasir_memory::host::HostPool;
    use kvasir_memory::region::Region;

    #[test]
    fn what_one_rail_alone_gives_goes_over_it_as_soon_as_it_is_connected() {
        let node = |name: &str| Arc::new(Node::new(name, Secret::new(b"secret"), 1));
        let region = || Region::of_pool(Arc::new(HostPool::new(4096, false).unwrap()));
        let (ours, theirs, client) = (region(), region(), node("client"));
        let lease = Duration::from_secs(3600);
        let (mut stations, mut rails): (Vec<_>, Vec<Arc<dyn Transport>>) = Default::default();
        // Only the second rail reaches the places.
        for segments in [&["pool"][..], &["pool", "places"]] {
            let (net, server) = (Arc::default(), node("server"));
            for name in segments {
                server.exports.export(name, vec![theirs.clone()], Access::Write, lease).unwrap();
            }
            stations.push(Loopback::new(Arc::clone(&net), server));
            rails.push(Arc::new(Loopback::new(net, Arc::clone(&client))));
        }
        let engine = Engine::without_threads(EngineConfig::default(), rails, Arc::new(Instant::now));
        engine.register(&ours).unwrap();
        let peer = engine.connect_to("server", &[(0, "server".into()), (1, "server".into())]).unwrap();
        let _pool = peer.open_segment("pool").unwrap();

        // The mending thread has connected the second rail, and is opening the pool over it.
        peer.links[1].connect(Some("server")).unwrap();
        let segment = peer.open_segment("places").unwrap();
        let (local, remote) =
            (vec![ours.range(0, 100).unwrap()], RemoteRange { region: 0, offset: 0, len: 100 });
        let entry = Entry { direction: Direction::Write, segment, local, remote: vec![remote] };
        let sent = engine.submit(Batch { entries: vec![entry], ..Batch::new(Class::Prefill) }).unwrap();
        assert_eq!(sent.poll_entry(0).unwrap().error, None);
        assert_eq!(sent.poll().valid_bytes, 100);
    }

    #[test]
    fn a_rail_that_another_thread_connects_meanwhile_is_asked_too() {
        let node = |name: &str| Arc::new(Node::new(name, Secret::new(b"secret"), 1));
        let places = Region::of_pool(Arc::new(HostPool::new(4096, false).unwrap()));
        let client = node("client");
        let (mut stations, mut rails): (Vec<_>, Vec<Arc<dyn Transport>>) = Default::default();
        for gives in [false, true] {
            let (net, server) = (Arc::default(), node("server"));
            if gives {
                let lease = Duration::from_secs(3600);
                server.exports.export("places", vec![places.clone()], Access::Write, lease).unwrap();
            }
            stations.push(Loopback::new(Arc::clone(&net), server));
            rails.push(Arc::new(Loopback::new(net, Arc::clone(&client))));
        }
        let engine = Engine::without_threads(EngineConfig::default(), rails, Arc::new(Instant::now));
        let peer = engine.connect_to("server", &[(0, "server".into()), (1, "server".into())]).unwrap();
        let asked = peer.connected();
        let refused = peer.open_connected("places").err().unwrap();
        peer.links[1].connect(Some("server")).unwrap();
        assert!(peer.open_over_others("places", asked, refused).is_ok());
        assert!(peer.open_segment("nowhere").is_err());
    }

    #[test]
    fn memory_is_not_called_unreachable_while_a_rail_is_down() {
        let node = |name: &str| Arc::new(Node::new(name, Secret::new(b"secret"), 1));
        let client = node("client");
        let nets: [Arc<_>; 2] = Default::default();
        let up = Loopback::new(Arc::clone(&nets[0]), node("server"));
        let rails = nets.map(|net| Arc::new(Loopback::new(net, Arc::clone(&client))) as Arc<dyn Transport>);
        let engine = Engine::without_threads(EngineConfig::default(), rails.into(), Arc::new(Instant::now));
        let connect = |rails: &[(usize, String)]| engine.connect_to("server", rails).unwrap();
        let open = |peer: Arc<Peer>| {
            let denied = Denied::Unreachable;
            let refused = Error::Denied { peer: "server".into(), segment: "places".into(), denied };
            peer.open_over_others("places", peer.connected(), refused).err().unwrap()
        };
        let error = open(connect(&[(0, "server".into()), (1, "server".into())]));
        assert!(matches!(error, Error::PeerDown { .. }), "{error}");
        let error = open(connect(&[(0, "server".into())]));
        assert!(is_unreachable(&error), "{error}");
        drop(up);
    }
}
