//! What memory of this node peers may touch: segments, and the grants on them that peers hold.
//!
//! A segment is a name for regions, for all peers or for one. A grant is one peer's right to it: an unguessable key, good
//! for that peer alone, valid in one epoch of the node and until its lease ends. Software transports look the key up for each operation ([`Exports::authorize`]) and
//! hold an [`Entry`] while they touch the memory; [`Exports::revoke`] returns only when nobody holds one any more, so
//! that the memory can be reused at once.

use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use std::collections::HashMap;
use std::sync::Arc;

use super::op::Direction;
use kvasir_memory::region::{LocalRange, Location, Region};
use kvasir_os::time::{Duration, Instant};

/// The most segments of a node, regions of a segment, and grants alive at once.
pub const SEGMENTS_MAX: usize = 1024;
pub const REGIONS_MAX: usize = 4096;
pub const GRANTS_MAX: usize = 1 << 16;
/// The most of these that one peer has, so that a peer which takes all it can get keeps no other out.
pub const GRANTS_OF_ONE_MAX: usize = GRANTS_MAX / 4;
/// Grants whose leases have ended are taken out when there are twice as many as the last time, and at least so many.
const SWEEP_MIN: usize = 64;
/// The longest segment name in bytes.
pub const NAME_MAX: usize = 255;

/// What a grant allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::FromRepr)]
#[repr(u8)]
pub enum Access {
    Read = 1,
    Write = 2,
    ReadWrite = 3,
}

impl Access {
    pub fn allows(self, direction: Direction) -> bool {
        match direction {
            Direction::Read => self != Self::Write,
            Direction::Write => self != Self::Read,
        }
    }
}

/// Why a node does not let a peer touch its memory. Numbers are part of the wire protocols.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::FromRepr, strum::VariantArray, thiserror::Error)]
#[repr(u8)]
pub enum Denied {
    #[error("no such segment is exported; check the name")]
    NoSegment = 1,
    #[error("the key is not known: it was revoked, or never granted; open the segment again")]
    UnknownKey = 2,
    #[error("the grant is of another epoch of the node; open the segment again")]
    StaleEpoch = 3,
    #[error("the lease of the grant has ended; open the segment again")]
    LeaseEnded = 4,
    #[error("the grant does not allow this direction")]
    Direction = 5,
    #[error("the range is empty or not inside the granted region")]
    OutOfRange = 6,
    #[error("the node holds as many grants or segments as it may; release some")]
    Full = 7,
    #[error("the operation is not understood by the peer, or above its limits")]
    Malformed = 8,
    #[error("the memory is not reachable over this transport")]
    Unreachable = 9,
}

/// One region of a grant, as the peer that may use it sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRegion {
    pub len: u64,
    pub location: Location,
    /// For transports whose hardware addresses memory: the address of the first byte, and the key to it (an rkey).
    /// Zero elsewhere.
    pub address: u64,
    pub key: u64,
}

/// A piece of a granted region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RemoteRange {
    /// Index in [`Grant::regions`].
    pub region: u32,
    pub offset: u64,
    pub len: u64,
}

/// A right to a peer's segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub segment: String,
    pub key: u64,
    pub epoch: u64,
    pub access: Access,
    /// By this node's clock, and never later than the peer's own end of the lease plus one message delay; the peer
    /// checks by its clock.
    pub expires: Instant,
    pub regions: Vec<RemoteRegion>,
}

impl Grant {
    /// Whether a range lies in a granted region.
    pub fn covers(&self, range: RemoteRange) -> Result<(), Denied> {
        let region = self.regions.get(range.region as usize).ok_or(Denied::OutOfRange)?;
        let end = range.offset.checked_add(range.len).ok_or(Denied::OutOfRange)?;
        if range.len == 0 || end > region.len { Err(Denied::OutOfRange) } else { Ok(()) }
    }

    pub fn allows(&self, direction: Direction, now: Instant) -> Result<(), Denied> {
        if now >= self.expires {
            return Err(Denied::LeaseEnded);
        }
        if self.access.allows(direction) { Ok(()) } else { Err(Denied::Direction) }
    }

    /// All of region 0, the usual case of one pool.
    pub fn range(&self, offset: u64, len: u64) -> RemoteRange {
        RemoteRange { region: 0, offset, len }
    }
}

/// What this node lets its peers touch.
pub struct Exports(Mutex<State>);

struct State {
    epoch: u64,
    segments: HashMap<String, Segment>,
    grants: HashMap<u64, Arc<Granted>>,
    /// So many, and those of them whose leases have ended are taken out.
    sweep_at: usize,
    /// How many of these each peer has.
    of_peers: HashMap<String, usize>,
}

impl State {
    fn of_peer(&self, peer: &str) -> usize {
        self.of_peers.get(peer).copied().unwrap_or(0)
    }

    fn is_full_for(&self, peer: &str) -> bool {
        self.grants.len() >= GRANTS_MAX || self.of_peer(peer) >= GRANTS_OF_ONE_MAX
    }

    /// Takes away the grants of which `which` is true.
    fn take(&mut self, mut which: impl FnMut(&Arc<Granted>) -> bool) -> Vec<Arc<Granted>> {
        let taken: Vec<_> =
            self.grants.extract_if(|_, granted| which(granted)).map(|(_, granted)| granted).collect();
        for granted in &taken {
            if let Some(count) = self.of_peers.get_mut(&granted.peer) {
                *count -= 1;
            }
        }
        self.of_peers.retain(|_, count| *count > 0);
        taken
    }
}

struct Segment {
    /// The only peer that may open it, if there is one.
    peer: Option<String>,
    regions: Arc<[Region]>,
    access: Access,
    lease: Duration,
}

/// A grant as the node that gave it keeps it.
pub struct Granted {
    pub segment: String,
    /// The peer that has it.
    pub peer: String,
    pub key: u64,
    pub epoch: u64,
    pub access: Access,
    pub expires: Instant,
    pub lease: Duration,
    pub regions: Arc<[Region]>,
    alive: RwLock<bool>,
    on_death: Mutex<Vec<Box<dyn FnOnce() + Send>>>,
}

impl Granted {
    /// The right to touch the memory now. Hold it during a copy or a system call, but not while waiting for a peer.
    pub fn enter(&self) -> Result<Entry<'_>, Denied> {
        let alive = self.alive.read();
        if !*alive {
            return Err(Denied::UnknownKey);
        }
        if Instant::now() >= self.expires { Err(Denied::LeaseEnded) } else { Ok(Entry(alive)) }
    }

    /// The memory that a peer's range stands for.
    pub fn range(&self, range: RemoteRange) -> Result<LocalRange, Denied> {
        let region = self.regions.get(range.region as usize).ok_or(Denied::OutOfRange)?;
        region.range(range.offset, range.len).ok_or(Denied::OutOfRange)
    }

    /// Calls `tell` when the grant is revoked or fenced off, before that returns; at once if it was already. It is not
    /// called when the lease ends: everyone who knows the grant knows when that is.
    pub fn on_death(&self, tell: impl FnOnce() + Send + 'static) {
        let alive = self.alive.read();
        if *alive {
            self.on_death.lock().push(Box::new(tell));
        } else {
            tell();
        }
    }

    fn kill(&self) {
        *self.alive.write() = false;
        let tell = std::mem::take(&mut *self.on_death.lock());
        tell.into_iter().for_each(|tell| tell());
    }
}

/// While it is held, the grant it came from cannot finish dying.
pub struct Entry<'a>(#[allow(dead_code)] RwLockReadGuard<'a, bool>);

impl Exports {
    /// `epoch` must be larger than that of every earlier run of this node.
    pub fn new(epoch: u64) -> Self {
        Self(Mutex::new(State {
            epoch,
            segments: HashMap::new(),
            grants: HashMap::new(),
            sweep_at: SWEEP_MIN,
            of_peers: HashMap::new(),
        }))
    }

    pub fn epoch(&self) -> u64 {
        self.state().epoch
    }

    /// Lets peers open `name`. Each grant lives for `lease`. It replaces a segment of that name, whose grants die.
    pub fn export(
        &self,
        name: &str,
        regions: Vec<Region>,
        access: Access,
        lease: Duration,
    ) -> Result<(), Denied> {
        self.export_for(None, name, regions, access, lease)
    }

    /// As [`export`](Self::export), for one peer alone if one is given: for others there is no such segment.
    pub fn export_for(
        &self,
        peer: Option<&str>,
        name: &str,
        regions: Vec<Region>,
        access: Access,
        lease: Duration,
    ) -> Result<(), Denied> {
        if regions.is_empty() || regions.len() > REGIONS_MAX || name.is_empty() || name.len() > NAME_MAX {
            return Err(Denied::Malformed);
        }
        if access != Access::Read && regions.iter().any(|region| !region.writable()) {
            return Err(Denied::Direction);
        }
        self.revoke(name);
        let mut state = self.state();
        if state.segments.len() >= SEGMENTS_MAX {
            return Err(Denied::Full);
        }
        let peer = peer.map(str::to_owned);
        state.segments.insert(name.to_owned(), Segment { peer, regions: regions.into(), access, lease });
        Ok(())
    }

    /// Ends a segment and its grants. When this returns no software transport touches its memory any more.
    pub fn revoke(&self, name: &str) {
        let dead: Vec<_> = {
            let mut state = self.state();
            state.segments.remove(name);
            state.take(|granted| granted.segment == name)
        };
        dead.iter().for_each(|granted| granted.kill());
    }

    /// Moves to the next epoch: all grants die, while segments stay and can be opened again.
    pub fn fence(&self) -> u64 {
        let (epoch, dead) = {
            let mut state = self.state();
            state.epoch += 1;
            (state.epoch, state.take(|_| true))
        };
        dead.iter().for_each(|granted| granted.kill());
        epoch
    }

    /// Gives an authenticated peer a right to a segment.
    pub fn grant(&self, name: &str, peer: &str) -> Result<Arc<Granted>, Denied> {
        let now = Instant::now();
        let mut state = self.state();
        if state.grants.len() >= state.sweep_at || state.is_full_for(peer) {
            // One that somebody has may still be in use: `revoke` must find it.
            state.take(|granted| granted.expires <= now && Arc::strong_count(granted) == 1);
            state.sweep_at = SWEEP_MIN.max(2 * state.grants.len());
        }
        if state.is_full_for(peer) {
            return Err(Denied::Full);
        }
        let may = |segment: &&Segment| segment.peer.as_ref().is_none_or(|only| only == peer);
        let segment = state.segments.get(name).filter(may).ok_or(Denied::NoSegment)?;
        let granted = Arc::new(Granted {
            segment: name.to_owned(),
            peer: peer.to_owned(),
            key: super::node::random_u64(),
            epoch: state.epoch,
            access: segment.access,
            expires: now + segment.lease,
            lease: segment.lease,
            regions: segment.regions.clone(),
            alive: RwLock::new(true),
            on_death: Mutex::default(),
        });
        state.grants.insert(granted.key, granted.clone());
        *state.of_peers.entry(peer.to_owned()).or_default() += 1;
        Ok(granted)
    }

    /// Checks what a peer presents with an operation.
    pub fn authorize(
        &self,
        peer: &str,
        key: u64,
        epoch: u64,
        direction: Direction,
    ) -> Result<Arc<Granted>, Denied> {
        let state = self.state();
        if epoch != state.epoch {
            return Err(Denied::StaleEpoch);
        }
        let own = |granted: &&Arc<Granted>| granted.peer == peer;
        let granted = state.grants.get(&key).filter(own).ok_or(Denied::UnknownKey)?;
        if Instant::now() >= granted.expires {
            return Err(Denied::LeaseEnded);
        }
        if granted.access.allows(direction) { Ok(granted.clone()) } else { Err(Denied::Direction) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }
}

impl Granted {
    /// What the peer is told, for transports that address memory by grant and offset.
    pub fn describe(&self) -> Grant {
        let regions = self.regions.iter().map(|region| RemoteRegion {
            len: region.len(),
            location: region.location(),
            address: 0,
            key: 0,
        });
        Grant {
            segment: self.segment.clone(),
            key: self.key,
            epoch: self.epoch,
            access: self.access,
            expires: self.expires,
            regions: regions.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_memory::buffer::Buffer;
    use strum::VariantArray;

    const HOUR: Duration = Duration::from_secs(3600);

    fn exports(access: Access, lease: Duration) -> Exports {
        let exports = Exports::new(7);
        exports.export("kv", vec![Region::of_buffer(Buffer::zeroed(100))], access, lease).unwrap();
        exports
    }

    #[test]
    fn grants_die_with_segment_epoch_and_lease() {
        let exports = exports(Access::Read, HOUR);
        let granted = exports.grant("kv", "peer").unwrap();
        let check = |epoch, direction| exports.authorize("peer", granted.key, epoch, direction).map(|_| ());
        assert_eq!(check(7, Direction::Read), Ok(()));
        assert_eq!(check(7, Direction::Write), Err(Denied::Direction));
        assert_eq!(check(6, Direction::Read), Err(Denied::StaleEpoch));
        assert!(granted.enter().is_ok());
        assert_eq!(exports.fence(), 8);
        assert_eq!(check(7, Direction::Read), Err(Denied::StaleEpoch));
        assert_eq!(check(8, Direction::Read), Err(Denied::UnknownKey));
        assert_eq!(granted.enter().err(), Some(Denied::UnknownKey));

        let again = exports.grant("kv", "peer").unwrap();
        exports.revoke("kv");
        assert_eq!(again.enter().err(), Some(Denied::UnknownKey));
        assert_eq!(exports.grant("kv", "peer").err(), Some(Denied::NoSegment));
    }

    #[test]
    fn a_grant_is_good_for_its_peer_alone_and_so_may_be_a_segment() {
        let exports = exports(Access::Read, HOUR);
        let granted = exports.grant("kv", "a").unwrap();
        let check = |peer| exports.authorize(peer, granted.key, 7, Direction::Read).map(|_| ());
        assert_eq!((check("a"), check("b")), (Ok(()), Err(Denied::UnknownKey)));
        let region = vec![Region::of_buffer(Buffer::zeroed(1))];
        exports.export_for(Some("a"), "own", region, Access::Write, HOUR).unwrap();
        assert_eq!(exports.grant("own", "b").err(), Some(Denied::NoSegment));
        assert!(exports.grant("own", "a").is_ok());
    }

    #[test]
    fn an_ended_lease_is_refused_on_both_sides() {
        let exports = exports(Access::ReadWrite, Duration::ZERO);
        let granted = exports.grant("kv", "peer").unwrap();
        assert_eq!(granted.enter().err(), Some(Denied::LeaseEnded));
        assert_eq!(
            exports.authorize("peer", granted.key, 7, Direction::Read).err(),
            Some(Denied::LeaseEnded)
        );
        let grant = granted.describe();
        assert_eq!(grant.allows(Direction::Read, Instant::now()), Err(Denied::LeaseEnded));
    }

    #[test]
    fn ranges_are_checked_alike_on_both_sides() {
        let exports = exports(Access::Read, HOUR);
        let granted = exports.grant("kv", "peer").unwrap();
        let grant = granted.describe();
        for (region, offset, len, ok) in [
            (0, 0, 100, true),
            (0, 99, 1, true),
            (0, 99, 2, false),
            (0, 0, 0, false),
            (1, 0, 1, false),
            (0, u64::MAX, 1, false),
        ] {
            let range = RemoteRange { region, offset, len };
            assert_eq!((grant.covers(range).is_ok(), granted.range(range).is_ok()), (ok, ok), "{range:?}");
        }
    }

    #[test]
    fn full_tables_refuse_and_expired_grants_make_room() {
        let exports = exports(Access::Read, Duration::ZERO);
        for _ in 0..GRANTS_MAX + 1 {
            assert!(exports.grant("kv", "peer").is_ok());
            assert!(exports.state().grants.len() <= SWEEP_MIN, "what has ended does not stay");
        }
        let regions = || vec![Region::of_buffer(Buffer::zeroed(1))];
        for n in 1..SEGMENTS_MAX {
            assert_eq!(exports.export(&n.to_string(), regions(), Access::Read, HOUR), Ok(()));
        }
        assert_eq!(exports.export("more", regions(), Access::Read, HOUR), Err(Denied::Full));
        assert_eq!(exports.export("kv", regions(), Access::Read, HOUR), Ok(()), "replaced in place");
    }

    #[test]
    fn a_grant_in_use_whose_lease_has_ended_dies_before_a_revocation_returns() {
        let exports = exports(Access::Read, Duration::ZERO);
        let in_use = exports.grant("kv", "peer").unwrap();
        let (died, told) = std::sync::mpsc::channel();
        in_use.on_death(move || died.send(()).unwrap());
        for _ in 0..2 * SWEEP_MIN {
            exports.grant("kv", "peer").unwrap();
        }
        exports.revoke("kv");
        assert_eq!(told.try_recv(), Ok(()));
    }

    #[test]
    fn a_peer_that_takes_all_grants_it_can_get_leaves_the_others_theirs() {
        let exports = exports(Access::Read, HOUR);
        let all: Vec<_> = (0..GRANTS_OF_ONE_MAX).map(|_| exports.grant("kv", "greedy").unwrap()).collect();
        assert_eq!(exports.grant("kv", "greedy").err(), Some(Denied::Full));
        assert!(exports.grant("kv", "honest").is_ok());
        exports.fence();
        assert!(all.iter().all(|granted| granted.enter().is_err()));
        assert!(exports.grant("kv", "greedy").is_ok(), "none of them counts any more");
    }

    #[test]
    fn numbers_on_the_wire_mean_what_they_meant() {
        for (n, &denied) in Denied::VARIANTS.iter().enumerate() {
            assert_eq!((denied as usize, Denied::from_repr(denied as u8)), (n + 1, Some(denied)));
        }
        assert_eq!((Denied::from_repr(0), Denied::from_repr(10), Access::from_repr(0)), (None, None, None));
    }
}
