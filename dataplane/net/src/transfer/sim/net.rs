//! A network in virtual time: hosts, the rails between them, and everything that goes wrong on those.
//!
//! It is a [`Transport`] like the others and keeps their rules: one completion for each operation (sometimes told
//! twice, which must not matter), lent memory untouched after it, a true count of valid bytes. Bytes are really copied,
//! piece by piece, between the memory of the hosts.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use super::Rng;
use crate::transport::{
    Cancel, Capabilities, Completion, Denied, Direction, Endpoint, Error, Grant, Node, Op, OpError, Sink,
    Transport,
};
use kvasir_memory::region::{LocalRange, Region, part_of};
use kvasir_os::time::{Duration, Instant};

pub(super) const MS: u64 = 1_000_000;
const NAME: &str = "simulated";
/// A peer that is silent for this long, while something is asked of it, is down.
const SILENCE: u64 = 700 * MS;
/// Senders try again this often when nothing gets through.
const RESEND: u64 = 40 * MS;
/// How long after its end an endpoint that cannot take anything back may still touch lent memory.
const FLUSH: u64 = 2 * MS;

type Action = Box<dyn FnOnce() + Send>;

/// Virtual time, and all that is on its way.
pub(super) struct Net {
    base: Instant,
    state: Mutex<State>,
}

struct State {
    now: u64,
    next: u64,
    events: BTreeMap<(u64, u64), Action>,
    rng: Rng,
    hosts: Vec<Host>,
    /// By client, server and number.
    rails: BTreeMap<(usize, usize, usize), RailState>,
}

/// One host, as its peers find it.
struct Host {
    /// `None` while it is dead.
    node: Option<Arc<Node>>,
    /// Bytes of its local memory that some completion said to be valid.
    reported: Vec<bool>,
    local: Region,
}

/// A rail between two hosts, and what ails it.
#[derive(Clone)]
pub(super) struct RailState {
    pub(super) latency: u64,
    /// Bytes per second.
    pub(super) rate: u64,
    /// Whether packets get through, from the client and back to it.
    pub(super) up: [bool; 2],
    /// Chances in 256 that an operation fails, gets lost, completes late, or is told twice.
    pub(super) fails: u64,
    pub(super) lost: u64,
    pub(super) late: u64,
    pub(super) twice: u64,
    /// Whether what has begun can be taken back, as over TCP; over RDMA only the end of the endpoint does that.
    pub(super) takes_back: bool,
    busy_until: u64,
}

impl RailState {
    pub(super) fn new(rng: &mut Rng) -> Self {
        Self {
            latency: rng.within(20_000..2 * MS),
            rate: rng.within(2_000_000..200_000_000),
            up: [true; 2],
            fails: 0,
            lost: 0,
            late: rng.below(40),
            twice: rng.below(40),
            takes_back: rng.chance(170),
            busy_until: 0,
        }
    }

    /// Ends its outages, failures and losses. Completions may still be late or told twice.
    pub(super) fn heal(&mut self) {
        (self.up, self.fails, self.lost) = ([true; 2], 0, 0);
    }
}

impl Net {
    pub(super) fn new(rng: Rng) -> Arc<Self> {
        let state = State {
            now: 0,
            next: 0,
            events: BTreeMap::new(),
            rng,
            hosts: Vec::new(),
            rails: BTreeMap::new(),
        };
        // Not the machine's time: who asks that finds it an hour ahead, and does not do what its seed says.
        let base = Instant::now() - Duration::from_secs(3_600);
        Arc::new(Self { base, state: Mutex::new(state) })
    }

    pub(super) fn now(&self) -> u64 {
        self.state().now
    }

    pub(super) fn instant(&self) -> Instant {
        self.base + Duration::from_nanos(self.now())
    }

    pub(super) fn at(&self, when: u64, action: impl FnOnce() + Send + 'static) {
        let mut state = self.state();
        let key = (when.max(state.now), state.next);
        state.next += 1;
        state.events.insert(key, Box::new(action));
    }

    fn after(&self, delay: u64, action: impl FnOnce() + Send + 'static) {
        self.at(self.now() + delay, action);
    }

    /// Lets time pass until `end`.
    pub(super) fn run_until(&self, end: u64) {
        loop {
            let mut state = self.state();
            let due = state.events.first_key_value().is_some_and(|(&(when, _), _)| when <= end);
            let Some(((when, _), action)) = due.then(|| state.events.pop_first()).flatten() else {
                state.now = end;
                return;
            };
            state.now = when;
            drop(state);
            action();
        }
    }

    pub(super) fn add_host(&self, local: Region) {
        let reported = vec![false; local.len() as usize];
        self.state().hosts.push(Host { node: None, reported, local });
    }

    /// Starts a host, or ends it.
    pub(super) fn set_node(&self, host: usize, node: Option<Arc<Node>>) {
        self.state().hosts[host].node = node;
    }

    pub(super) fn node(&self, host: usize) -> Option<Arc<Node>> {
        self.state().hosts[host].node.clone()
    }

    pub(super) fn add_rail(&self, client: usize, server: usize, number: usize, rail: RailState) {
        self.state().rails.insert((client, server, number), rail);
    }

    pub(super) fn change_rails(&self, mut change: impl FnMut(&(usize, usize, usize), &mut RailState)) {
        self.state().rails.iter_mut().for_each(|(key, rail)| change(key, rail));
    }

    /// The ranges of `local` that completions called valid.
    pub(super) fn reported(&self, host: usize, local: &[LocalRange]) -> Vec<std::ops::Range<u64>> {
        let state = self.state();
        let mut bytes = Vec::new();
        for range in local {
            let start = range.offset() as usize;
            bytes.extend_from_slice(&state.hosts[host].reported[start..start + range.len() as usize]);
        }
        let mut ranges: Vec<std::ops::Range<u64>> = Vec::new();
        for (n, _) in bytes.iter().enumerate().filter(|(_, valid)| **valid) {
            match ranges.last_mut() {
                Some(last) if last.end == n as u64 => last.end += 1,
                _ => ranges.push(n as u64..n as u64 + 1),
            }
        }
        ranges
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// One rail of a host; addresses are numbers of hosts.
pub(super) struct SimTransport {
    pub(super) net: Arc<Net>,
    pub(super) us: usize,
    pub(super) number: usize,
}

fn capabilities() -> Capabilities {
    Capabilities {
        name: NAME,
        one_sided: true,
        zero_copy: false,
        message_bytes_max: u64::MAX,
        ranges_max: 1 << 16,
        queue_depth: 1 << 16,
        needs_registration: false,
        host_memory: true,
        cuda_memory: false,
    }
}

impl Transport for SimTransport {
    fn capabilities(&self) -> Capabilities {
        capabilities()
    }

    fn register(&self, _region: &Region) -> Result<(), Error> {
        Ok(())
    }

    fn unregister(&self, _region: &Region) {}

    fn address(&self) -> Option<String> {
        Some(self.us.to_string())
    }

    fn connect(&self, address: &str) -> Result<Arc<dyn Endpoint>, Error> {
        let peer: usize = address.parse().expect("addresses are numbers of hosts");
        let rail = (self.us, peer, self.number);
        let unreachable = || Error::Unreachable {
            transport: NAME,
            address: address.to_owned(),
            reason: "no answer".into(),
        };
        let node = self.net.node(peer).ok_or_else(unreachable)?;
        let through = self.net.state().rails[&rail].up == [true; 2];
        if !through {
            return Err(unreachable());
        }
        let heard = self.net.now();
        let endpoint = Arc::new_cyclic(|this| SimEndpoint {
            this: this.clone(),
            net: self.net.clone(),
            rail,
            node,
            state: Mutex::new(Inner { down: None, flights: BTreeMap::new(), next: 0, heard }),
        });
        listen(&self.net, Arc::downgrade(&endpoint));
        Ok(endpoint)
    }
}

struct SimEndpoint {
    this: Weak<Self>,
    net: Arc<Net>,
    rail: (usize, usize, usize),
    /// The peer as it was when this endpoint connected: a peer that restarted is another one.
    node: Arc<Node>,
    state: Mutex<Inner>,
}

struct Inner {
    down: Option<String>,
    flights: BTreeMap<u64, Flight>,
    next: u64,
    /// When something last came from the peer.
    heard: u64,
}

/// An operation on its way.
struct Flight {
    op: Op,
    sink: Arc<dyn Sink>,
    /// Leading bytes in place: for a read those that came, for a write those that were sent.
    moved: u64,
    begun: bool,
    /// Fails when this many bytes have moved.
    fails_at: Option<u64>,
    lost: bool,
    result: Option<Result<(), OpError>>,
}

impl SimEndpoint {
    fn rail(&self) -> RailState {
        self.net.state().rails[&self.rail].clone()
    }

    fn roll(&self, chance: u64) -> bool {
        self.net.state().rng.chance(chance)
    }

    fn peer_lives(&self) -> bool {
        self.net.node(self.rail.1).is_some_and(|node| Arc::ptr_eq(&node, &self.node))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.state.lock()
    }

    fn me(&self) -> Arc<Self> {
        self.this.upgrade().expect("called through an Arc")
    }

    fn start(&self, op: Op, sink: &Arc<dyn Sink>) {
        let id = op.id;
        let refused = match self.down() {
            Some(_) => Err(self.peer_down()),
            None => op.check(&capabilities(), self.net.instant()),
        };
        if let Err(error) = refused {
            return sink.complete(Completion::failed(id, 0, error));
        }
        let rail = self.rail();
        let fails_at = self.roll(rail.fails).then(|| self.net.state().rng.below(op.len()));
        let lost = self.roll(rail.lost);
        let flight = Flight { op, sink: sink.clone(), moved: 0, begun: false, fails_at, lost, result: None };
        let mut inner = self.inner();
        let key = inner.next;
        inner.next += 1;
        inner.flights.insert(key, flight);
        drop(inner);
        let me = self.me();
        self.net.after(rail.latency, move || me.advance(key));
    }

    /// Sends a ping, which may go unanswered. Returns whether to go on pinging.
    fn ping(&self) -> bool {
        let through = self.rail().up == [true; 2];
        let mut inner = self.inner();
        let now = self.net.now();
        if inner.down.is_some() {
            return false;
        }
        if through && self.peer_lives() {
            inner.heard = now;
        }
        let silent = now - inner.heard >= SILENCE;
        drop(inner);
        match (through && !self.peer_lives(), silent) {
            (true, _) => self.end("connection reset"),
            (_, true) => self.end("nothing was heard"),
            _ => return true,
        }
        false
    }

    /// The next piece of an operation moves, or it is tried again later.
    fn advance(&self, key: u64) {
        let rail = self.rail();
        let mut inner = self.inner();
        if inner.down.is_some() && !self.lingers(&inner, key, &rail) {
            return;
        }
        let Some(flight) = inner.flights.get_mut(&key).filter(|flight| !flight.lost) else { return };
        let direction = flight.op.direction;
        let (there, back) = (rail.up[0], rail.up[1]);
        if !there && (direction == Direction::Write || !flight.begun) || !back && direction == Direction::Read
        {
            drop(inner);
            return self.again(key, RESEND);
        }
        if !self.peer_lives() {
            drop(inner);
            return self.end("connection reset");
        }
        flight.begun = true;
        if flight.result.is_none() {
            self.move_piece(flight, &rail, key);
        } else if back {
            drop(inner);
            return self.tell(key);
        } else {
            drop(inner);
            return self.again(key, RESEND);
        }
        if direction == Direction::Read || back {
            inner.heard = self.net.now();
        }
    }

    /// Whether lent memory may still be touched although the endpoint has ended.
    fn lingers(&self, inner: &Inner, key: u64, rail: &RailState) -> bool {
        !rail.takes_back && inner.flights.contains_key(&key)
    }

    fn move_piece(&self, flight: &mut Flight, rail: &RailState, key: u64) {
        let op = &flight.op;
        let stop = flight.fails_at.unwrap_or(op.len());
        let len = (stop - flight.moved).min((op.len() / 3).max(1));
        let ranges = self.authorize(op);
        match ranges {
            Ok(remote) if len > 0 => {
                let (ours, theirs) =
                    (part_of(&op.local, flight.moved, len), part_of(&remote, flight.moved, len));
                match op.direction {
                    Direction::Read => write(&read(&theirs), &ours),
                    Direction::Write => self.send(&ours, theirs, rail.latency),
                }
                flight.moved += len;
            }
            Ok(_) => {}
            Err(denied) => flight.result = Some(Err(denied.into())),
        }
        if flight.result.is_none() && flight.moved == stop {
            let failed = flight.fails_at.is_some();
            flight.result = Some(if failed { Err(OpError::PeerChecksum) } else { Ok(()) });
        }
        let took = len * 1_000_000_000 / rail.rate;
        let mut state = self.net.state();
        let now = state.now;
        let mut delay = {
            let rail = state.rails.get_mut(&self.rail).expect("it was made with the net");
            rail.busy_until = rail.busy_until.max(now) + took;
            rail.busy_until - now
        };
        if flight.result.is_some() {
            // The answer needs the way back as well; what was written has arrived before it.
            delay += 2 * rail.latency;
            if state.rng.chance(rail.late) {
                delay += state.rng.below(30 * MS);
            }
        }
        drop(state);
        self.again(key, delay);
    }

    /// Bytes written arrive a little later, even if the sender has given up by then.
    fn send(&self, ours: &[LocalRange], theirs: Vec<LocalRange>, latency: u64) {
        let bytes = read(ours);
        let me = self.me();
        self.net.after(latency, move || {
            if me.peer_lives() {
                write(&bytes, &theirs);
            }
        });
    }

    fn authorize(&self, op: &Op) -> Result<Vec<LocalRange>, Denied> {
        if op.grant.expires < self.net.instant() {
            return Err(Denied::LeaseEnded);
        }
        let granted = self.node.exports.authorize("client", op.grant.key, op.grant.epoch, op.direction)?;
        op.remote.iter().map(|range| granted.range(*range)).collect()
    }

    fn again(&self, key: u64, delay: u64) {
        let me = self.me();
        self.net.after(delay, move || me.advance(key));
    }

    /// Tells the end of an operation that has a result.
    fn tell(&self, key: u64) {
        let Some(mut flight) = self.inner().flights.remove(&key) else { return };
        let result = flight.result.take().unwrap_or(Err(OpError::Cancelled));
        let valid = match (flight.op.direction, &result) {
            (Direction::Write, Err(_)) => 0,
            _ => flight.moved,
        };
        self.complete(flight, valid, result);
    }

    fn complete(&self, flight: Flight, valid_bytes: u64, result: Result<(), OpError>) {
        let Flight { op, sink, .. } = flight;
        let us = self.rail.0;
        {
            let mut state = self.net.state();
            for range in part_of(&op.local, 0, valid_bytes) {
                let start = range.offset() as usize;
                assert_eq!(range.region().id(), state.hosts[us].local.id(), "another host's memory");
                state.hosts[us].reported[start..start + range.len() as usize].fill(true);
            }
        }
        let completion = Completion { id: op.id, valid_bytes, result };
        drop(op);
        let twice = self.roll(self.rail().twice);
        if twice {
            let (sink, completion) = (sink.clone(), completion.clone());
            self.net.after(MS, move || sink.complete(completion));
        }
        sink.complete(completion);
    }

    /// The endpoint ends: at once where operations can be taken back, else a little later.
    fn end(&self, reason: &str) {
        if self.inner().down.replace(reason.to_owned()).is_some() {
            return;
        }
        if self.rail().takes_back {
            return self.flush();
        }
        let me = self.me();
        self.net.after(FLUSH, move || me.flush());
    }

    fn flush(&self) {
        let flights = std::mem::take(&mut self.inner().flights);
        for flight in flights.into_values() {
            let valid = if flight.op.direction == Direction::Read { flight.moved } else { 0 };
            self.complete(flight, valid, Err(self.peer_down()));
        }
    }

    fn peer_down(&self) -> OpError {
        OpError::PeerDown { peer: self.peer().to_owned(), reason: self.down().unwrap_or_default() }
    }
}

/// An endpoint pings for as long as it lives.
fn listen(net: &Arc<Net>, endpoint: Weak<SimEndpoint>) {
    let again = net.clone();
    net.after(100 * MS, move || {
        if endpoint.upgrade().is_some_and(|endpoint| endpoint.ping()) {
            listen(&again, endpoint);
        }
    });
}

impl Endpoint for SimEndpoint {
    fn peer(&self) -> &str {
        &self.node.name
    }

    fn open(&self, segment: &str) -> Result<Arc<Grant>, Error> {
        let peer = || self.peer().to_owned();
        if self.rail().up != [true; 2] || !self.peer_lives() || self.down().is_some() {
            return Err(Error::PeerDown { peer: peer(), reason: "no answer".into() });
        }
        let denied = |denied| Error::Denied { peer: peer(), segment: segment.to_owned(), denied };
        let granted = self.node.exports.grant(segment, "client").map_err(denied)?;
        // Leases end in virtual time.
        let expires = self.net.instant() + super::LEASE;
        Ok(Arc::new(Grant { expires, ..granted.describe() }))
    }

    fn submit(&self, ops: Vec<Op>, sink: &Arc<dyn Sink>) {
        ops.into_iter().for_each(|op| self.start(op, sink));
    }

    fn cancel(&self, cancel: &Cancel) {
        cancel.set();
        if !self.rail().takes_back {
            return;
        }
        let ours = |flight: &Flight| flight.op.cancel.as_ref().is_some_and(|token| token.is(cancel));
        let back = |flight: &Flight| flight.op.direction == Direction::Read || !flight.begun;
        let taken: Vec<Flight> = {
            let mut inner = self.inner();
            let keys: Vec<u64> =
                inner.flights.iter().filter(|(_, f)| ours(f) && back(f)).map(|(key, _)| *key).collect();
            keys.iter().filter_map(|key| inner.flights.remove(key)).collect()
        };
        for flight in taken {
            let valid = if flight.op.direction == Direction::Read { flight.moved } else { 0 };
            self.complete(flight, valid, Err(OpError::Cancelled));
        }
    }

    fn notify(&self, message: &[u8]) -> Result<(), Error> {
        if self.down().is_some() {
            return Err(Error::PeerDown { peer: self.peer().to_owned(), reason: "ended".into() });
        }
        self.node.notices.push(&self.rail.0.to_string(), message);
        Ok(())
    }

    fn down(&self) -> Option<String> {
        self.inner().down.clone()
    }

    fn in_flight(&self) -> usize {
        self.inner().flights.len()
    }

    fn close(&self) {
        self.end("closed");
    }
}

/// The bytes of a list of ranges.
pub(super) fn read(ranges: &[LocalRange]) -> Vec<u8> {
    let mut bytes = vec![0; ranges.iter().map(LocalRange::len).sum::<u64>() as usize];
    let mut rest = &mut bytes[..];
    for range in ranges {
        let count = range.copy_out(rest);
        rest = &mut rest[count..];
    }
    bytes
}

/// Fills a list of ranges.
pub(super) fn write(mut bytes: &[u8], ranges: &[LocalRange]) {
    for range in ranges {
        bytes = &bytes[range.copy_in(bytes)..];
    }
}
