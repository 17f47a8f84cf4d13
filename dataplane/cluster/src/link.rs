//! One peer: whether it is up, what it said last, and the connections to it.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::channel::{Channel, ChannelError};
use super::counts::add;
use super::message::{Reply, Request, Since, Status, Welcome};
use super::paths::{self, Pair, RailView, Tally};
use super::serve::HOLD;
use super::stop::Stop;
use super::table::{Duty, Fact, Heard, REMOVALS_MAX};
use super::ways::{SEGMENT, Ways};
use super::{Event, PeerConfig, Shared};
use kvasir_net::topology::matrix::Matrix;
use kvasir_net::transfer::{Paths, Segment};
use kvasir_net::transport::Error as TransportError;
use kvasir_net::transport::tcp::socket::Socket;
use kvasir_os::planted::{self, Bug};
use kvasir_os::thread;
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::{BATCH_MAX, BlockKey, BlockMeta};
use kvasir_store::dram::{DramStore, OwnerId, Reserve};

const CONNECT: Duration = Duration::from_secs(2);
/// The pause between two attempts to connect: at first, and at most, doubling in between.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Idle connections kept for calls.
const IDLE_MAX: usize = 4;
/// A peer's pool that nobody read for this long is given up, so that its endpoint can be evicted.
const SEGMENT_IDLE: Duration = Duration::from_secs(10);

/// The state of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// Never reached so far.
    Connecting,
    Up,
    Down,
    /// It answers, but something is wrong that a person must correct.
    Refused,
}

impl LinkState {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Up => "up",
            Self::Down => "down",
            Self::Refused => "refused",
        }
    }
}

/// A peer at one moment.
#[derive(Clone, Debug)]
pub struct PeerView {
    pub name: String,
    pub address: String,
    pub rack: String,
    pub state: LinkState,
    /// Why it is not up.
    pub reason: Option<String>,
    pub status: Status,
    /// How long ago it was last heard; `None` if it never was.
    pub last_seen: Option<Duration>,
    /// Which NICs serve which memory there, as JSON; empty if it did not say.
    pub matrix: String,
    /// How its pool is read, best first.
    pub rails: Vec<RailView>,
    /// Copies waiting to be made there.
    pub queued: usize,
    /// Copies that it took, blocks that were read from it, calls that failed, times it was lost.
    pub copied: u64,
    pub read: u64,
    pub failed: u64,
    pub lost: u64,
}

pub(super) struct Link {
    /// Its index in the table.
    pub(super) place: usize,
    pub(super) config: PeerConfig,
    /// Owner of what this peer borrowed.
    pub(super) owner: OwnerId,
    /// Owner of places for what this peer writes, or has copied here. Its reservations have no time of their own: each is
    /// given back once no transfer writes there.
    pub(super) writer: OwnerId,
    /// Held while places are reserved for `writer`, so that calls at the same time keep to its share together.
    reserving: Mutex<()>,
    ways: Arc<Ways>,
    state: Mutex<State>,
    idle: Mutex<Vec<Channel>>,
    /// Connections on which somebody waits for an answer, to end them when the peer is lost.
    calling: Mutex<Vec<Arc<Socket>>>,
    segment: Mutex<OpenSegment>,
    /// Held while the segment is opened, which takes as long as the peer likes. Taken before `segment`.
    opening: Mutex<()>,
    tally: Mutex<Tally>,
    /// Loans of this peer's that are no longer needed; told with the next call.
    pub(super) done: Mutex<DoneLoans>,
    queue: Mutex<VecDeque<BlockKey>>,
    /// The queue has something, or the host stops.
    wake: Condvar,
    stop: Arc<Stop>,
    pub(super) copied: AtomicU64,
    pub(super) read: AtomicU64,
    failed: AtomicU64,
}

/// Loans of a peer's that are no longer needed, since the peer was last lost.
///
/// A peer that was lost may be another process when it is back. What the former one lent means nothing to it, or worse,
/// something else; so what was borrowed before the loss is not given back, and ends by its time.
#[derive(Debug, Default)]
pub(super) struct DoneLoans {
    /// How often the peer was lost.
    run: u64,
    leases: Vec<u64>,
}

impl DoneLoans {
    /// The number of the run, and leases to give back with the next call, as many as one takes.
    pub(super) fn take(&mut self) -> (u64, Vec<u64>) {
        let keep = self.leases.len().saturating_sub(BATCH_MAX);
        (self.run, self.leases.split_off(keep))
    }

    /// Leases that were taken in the run of this number.
    pub(super) fn add(&mut self, run: u64, leases: impl Iterator<Item = u64>) {
        if run == self.run {
            self.leases.extend(leases);
        }
    }

    fn start_over(&mut self) {
        self.run += 1;
        self.leases.clear();
    }
}

/// Asks peers at the same time. Returns what each answers, in their order; `None` if its thread panicked.
pub(super) fn ask_at_once<T: Send>(links: &[&Link], ask: impl Fn(&Link) -> T + Sync) -> Vec<Option<T>> {
    let ask = &ask;
    thread::scope(|scope| {
        let asked: Vec<_> = links.iter().map(|&link| scope.spawn(move || ask(link))).collect();
        asked.into_iter().map(|asked| asked.join().ok()).collect()
    })
}

/// The peer's pool, if it is open, and when it was last used.
#[derive(Default)]
struct OpenSegment {
    open: Option<(Arc<Segment>, Instant)>,
    /// How often it was given up because the peer was lost, reading failed, or the way to it changed.
    given_up: u64,
}

impl OpenSegment {
    fn use_now(&mut self) -> Option<Arc<Segment>> {
        let (segment, used) = self.open.as_mut()?;
        *used = Instant::now();
        Some(Arc::clone(segment))
    }

    fn give_up(&mut self) -> Option<(Arc<Segment>, Instant)> {
        self.given_up += 1;
        self.open.take()
    }
}

struct State {
    state: LinkState,
    reason: Option<String>,
    status: Status,
    welcome: Welcome,
    seen: Option<Instant>,
    claims: Claims,
    lost: u64,
    /// The connection that listens, to end it from outside.
    handle: Option<Arc<Socket>>,
}

/// What counts of what a peer said that it holds.
#[derive(Clone, Copy, Debug)]
enum Claims {
    /// Nothing: it has not said it yet, or is missed.
    None,
    /// All of it.
    All,
    /// All of it until then, though the peer was lost.
    Until(Instant),
}

impl Link {
    pub(super) fn new(
        place: usize,
        config: PeerConfig,
        store: &DramStore,
        ways: &Arc<Ways>,
        stop: &Arc<Stop>,
    ) -> Self {
        let state = State {
            state: LinkState::Connecting,
            reason: None,
            status: Status::default(),
            welcome: Welcome::default(),
            seen: None,
            claims: Claims::None,
            lost: 0,
            handle: None,
        };
        Self {
            place,
            config,
            owner: store.new_owner(),
            writer: store.new_peer_owner(),
            reserving: Mutex::default(),
            ways: Arc::clone(ways),
            state: Mutex::new(state),
            idle: Mutex::default(),
            calling: Mutex::default(),
            segment: Mutex::default(),
            opening: Mutex::default(),
            tally: Mutex::default(),
            done: Mutex::default(),
            queue: Mutex::default(),
            wake: Condvar::new(),
            stop: Arc::clone(stop),
            copied: AtomicU64::new(0),
            read: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        }
    }

    /// Places for what this peer writes, or has copied here: no more than its share of the pool.
    pub(super) fn reserve(&self, store: &DramStore, metas: &[BlockMeta], now_ms: u64) -> Vec<Reserve> {
        let _one = self.reserving.lock();
        store.reserve(self.writer, metas, now_ms).unwrap_or_default()
    }

    pub(super) fn is_up(&self) -> bool {
        self.state().state == LinkState::Up
    }

    pub(super) fn status(&self) -> Status {
        self.state().status
    }

    /// Where it takes puts over TCP.
    pub(super) fn data(&self) -> Option<String> {
        Some(self.state().welcome.data.clone()).filter(|data| !data.is_empty())
    }

    pub(super) fn view(&self) -> PeerView {
        let (queued, rails) = (self.queued(), self.rails());
        let state = self.state();
        let PeerConfig { name, address, rack } = self.config.clone();
        PeerView {
            name,
            address,
            rack,
            state: state.state,
            reason: state.reason.clone(),
            status: state.status,
            last_seen: state.seen.map(|seen| seen.elapsed()),
            matrix: state.welcome.matrix.clone(),
            rails,
            queued,
            copied: self.copied.load(Ordering::Relaxed),
            read: self.read.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            lost: state.lost,
        }
    }

    /// Copies waiting.
    pub(super) fn queued(&self) -> usize {
        self.queue.lock().len()
    }

    /// Queues a copy. Returns false if too many wait.
    pub(super) fn push(&self, key: BlockKey, max: usize) -> bool {
        let mut queue = self.queue.lock();
        let room = queue.len() < max;
        if room {
            queue.push_back(key);
            self.wake.notify_all();
        }
        room
    }

    /// The next copies to make, as soon as there are any, at most `max`; empty when the host stops.
    pub(super) fn pop(&self, max: usize) -> Vec<BlockKey> {
        let mut queue = self.queue.lock();
        while queue.is_empty() && !self.stop.is_set() {
            self.wake.wait(&mut queue);
        }
        let count = queue.len().min(max);
        queue.drain(..count).collect()
    }

    /// Called when the host stops: wakes everybody who waits.
    pub(super) fn wake(&self) {
        {
            // Under the locks, so that every waiter is either waiting or has seen that the host stops.
            let (_queue, state) = (self.queue.lock(), self.state());
            if let Some(handle) = &state.handle {
                handle.shut_down();
            }
        }
        self.hang_up();
        self.wake.notify_all();
    }

    /// One call, over an idle connection or a new one.
    pub(super) fn call(&self, request: &Request, patience: Duration) -> Result<Reply, ChannelError> {
        let until = Instant::now() + patience;
        let idle = self.idle.lock().pop();
        // An idle connection may have ended meanwhile; that says nothing about the peer. Calls may be repeated.
        if let Some(mut channel) = idle
            && let Ok(reply) = self.ask(&mut channel, request, until)
        {
            self.keep(channel);
            return Ok(reply);
        }
        let called = || {
            let (mut channel, _) = self.connect(until.saturating_duration_since(Instant::now()))?;
            let reply = self.ask(&mut channel, request, until)?;
            self.keep(channel);
            Ok(reply)
        };
        called().inspect_err(|_| add(&self.failed, 1))
    }

    fn ask(&self, channel: &mut Channel, request: &Request, until: Instant) -> Result<Reply, ChannelError> {
        let handle = channel.handle();
        self.calling.lock().push(Arc::clone(&handle));
        let reply = channel.call(request, until);
        self.calling.lock().retain(|other| !Arc::ptr_eq(other, &handle));
        reply
    }

    /// Ends all calls that wait for an answer.
    fn hang_up(&self) {
        self.idle.lock().clear();
        self.calling.lock().iter().for_each(|socket| socket.shut_down());
    }

    fn keep(&self, channel: Channel) {
        let mut idle = self.idle.lock();
        if idle.len() < IDLE_MAX && self.is_up() {
            idle.push(channel);
        }
    }

    fn connect(&self, patience: Duration) -> Result<(Channel, Welcome), ChannelError> {
        let PeerConfig { name, address, .. } = &self.config;
        let (config, patience) = (&self.ways.config, patience.min(CONNECT));
        Channel::connect(address, &self.ways.node, config.tls.as_ref(), &config.cluster, name, patience)
    }

    /// The peer's pool, opened now if it is not.
    pub(super) fn segment(&self) -> Result<Arc<Segment>, TransportError> {
        let open = || self.segment.lock().use_now();
        if let Some(segment) = open() {
            return Ok(segment);
        }
        // A caller that waited for an attempt in vain is refused soon: transports do not try an address again at once.
        let _one = self.opening.lock();
        open().map_or_else(|| self.open_segment(), Ok)
    }

    /// Opens the peer's pool, without a lock that anybody else needs. It is kept unless it would have been given up meanwhile.
    fn open_segment(&self) -> Result<Arc<Segment>, TransportError> {
        let (given_up, pairs) = {
            let kept = self.segment.lock();
            (kept.given_up, self.tally.lock().pairs.clone())
        };
        let rails: Vec<(usize, String)> =
            pairs.iter().map(|pair| (pair.rail, pair.address.clone())).collect();
        let peer = self.ways.engine.connect_to(&self.config.name, &rails)?;
        let segment = peer.open_segment(SEGMENT)?;
        let mut kept = self.segment.lock();
        peer.prefer(self.paths(pairs));
        if kept.given_up == given_up {
            kept.open = Some((Arc::clone(&segment), Instant::now()));
        }
        Ok(segment)
    }

    /// Gives up a pool that nobody reads.
    fn tend(&self) {
        let mut kept = self.segment.lock();
        if kept.open.as_ref().is_some_and(|(_, used)| used.elapsed() > SEGMENT_IDLE) {
            self.let_go(kept.open.take());
        }
    }

    /// Forgets the peer's pool, because reading it failed: it will be opened again.
    pub(super) fn forget_segment(&self) {
        self.let_go(self.segment.lock().give_up());
    }

    fn let_go(&self, segment: Option<(Arc<Segment>, Instant)>) {
        if let Some((segment, _)) = segment {
            self.tally.lock().add(&segment.peer().rails());
        }
    }

    /// Pairs this host's rails with the peer's, because either may have changed.
    pub(super) fn pair(&self) {
        let found = self.ways.whereabouts.now();
        let pairs = paths::pairs(&self.ways.rails, &found.nics, &found.machine, &self.state().welcome);
        let mut kept = self.segment.lock();
        // What it has moved so far belongs to the previous pairs.
        let moved = kept.open.as_ref().map(|(segment, _)| segment.peer().rails()).unwrap_or_default();
        let mut tally = self.tally.lock();
        if pairs != tally.pairs {
            tally.add(&moved);
            tally.set(pairs);
            kept.give_up();
        } else if let Some((segment, _)) = kept.open.as_ref() {
            segment.peer().prefer(self.paths(pairs));
        }
    }

    /// The order in which these pairs are used, as both hosts are now.
    fn paths(&self, pairs: Vec<Pair>) -> Arc<Paths> {
        let (own, theirs) = (self.ways.whereabouts.now(), self.matrix());
        Arc::new(move |from, to| paths::order(&pairs, &own.matrix, &theirs, from, to))
    }

    /// What the peer says of its NICs; nothing if it makes no sense.
    fn matrix(&self) -> Matrix {
        Matrix::from_json(self.state().welcome.matrix.as_bytes()).unwrap_or_default()
    }

    /// The rails as they are now.
    fn rails(&self) -> Vec<RailView> {
        let segment = self.segment.lock().open.as_ref().map(|(segment, _)| Arc::clone(segment));
        let there = segment.as_ref().and_then(|segment| segment.description());
        let there = there.and_then(|grant| grant.regions.first().map(|region| region.location));
        let from = self.ways.pool.location();
        let (own, theirs) = (self.ways.whereabouts.now(), self.matrix());
        let tally = self.tally.lock();
        let order = paths::order(&tally.pairs, &own.matrix, &theirs, from, there.unwrap_or(from));
        let metrics = segment.map(|segment| segment.peer().rails());
        tally.view(metrics.as_deref(), order)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl Shared {
    /// Listens to a peer until the host stops.
    pub(super) fn watch(&self, link: &Link) {
        let mut wait = RETRY.0;
        while !self.is_stopping() {
            let Err(error) = self.listen(link, &mut wait) else { return };
            if self.is_stopping() {
                return;
            }
            self.lost(link, &error);
            self.pause(wait);
            wait = (wait * 2).min(RETRY.1);
        }
    }

    /// Hears the peer's news; returns when the host stops, or with the reason for which the peer is lost.
    fn listen(&self, link: &Link, wait: &mut Duration) -> Result<(), ChannelError> {
        let (mut channel, welcome) = link.connect(CONNECT)?;
        let mut revision = welcome.revision;
        link.state().handle = Some(channel.handle());
        self.described(link, &channel, welcome);
        let (mut since, mut missed) = (Since::Start, false);
        // What it says from the start on, until that is complete.
        let mut telling: Option<Vec<Fact>> = None;
        while !self.is_stopping() {
            let until = Instant::now() + HOLD + self.config.silence;
            let reply = channel.call(&Request::Watch { since }, until)?;
            let Reply::News { reset, facts, next, status } = reply else { return Err(channel.wrong_reply()) };
            if reset {
                telling = Some(Vec::new());
            }
            since = next;
            match telling.take() {
                None => missed |= self.hear(link, false, &facts),
                Some(mut all) => {
                    all.extend(facts);
                    // There is no room for more here anyway.
                    let enough = all.len() > self.config.blocks_max + REMOVALS_MAX;
                    if enough || matches!(since, Since::At(_)) {
                        // At once, or what it has not repeated yet would seem to be missing.
                        missed = self.hear(link, true, &all);
                    } else {
                        telling = Some(all);
                    }
                }
            }
            if missed && matches!(since, Since::At(_)) && self.table().has_room() {
                since = Since::Start;
            }
            if status.revision != revision {
                let until = Instant::now() + CONNECT;
                let Reply::Welcome(welcome) = channel.call(&Request::Describe, until)? else {
                    return Err(channel.wrong_reply());
                };
                revision = welcome.revision;
                self.described(link, &channel, welcome);
            }
            if self.seen(link, status, matches!(next, Since::At(_))) {
                *wait = RETRY.0;
            }
            let _state = planted::is(Bug::LooksAtPoolUnderState).then(|| link.state());
            link.tend();
        }
        Ok(())
    }

    /// Notes what a peer says of itself. It counts as up only when everything is heard: its copies are known from here on.
    /// Returns whether it has come up.
    fn seen(&self, link: &Link, status: Status, all_is_heard: bool) -> bool {
        let mut state = link.state();
        (state.status, state.seen) = (status, Some(Instant::now()));
        if !all_is_heard || state.state == LinkState::Up {
            return false;
        }
        (state.state, state.reason) = (LinkState::Up, None);
        self.up.fetch_or(1 << link.place, Ordering::SeqCst);
        drop(state);
        self.tell(Event::Up { peer: link.config.name.clone() });
        self.todo.look_at_all();
        true
    }

    /// Takes in how the peer is reached, as it said.
    fn described(&self, link: &Link, channel: &Channel, mut welcome: Welcome) {
        if let Some(ip) = channel.peer_ip() {
            welcome.rails.iter_mut().for_each(|(_, address)| complete(address, ip));
            complete(&mut welcome.data, ip);
        }
        link.state().welcome = welcome;
        link.pair();
    }

    /// Takes in what a peer says. Returns whether the table had no room for some of it.
    fn hear(&self, link: &Link, reset: bool, facts: &[Fact]) -> bool {
        let (mut to_do, mut removed, mut missed) = (Vec::new(), Vec::new(), false);
        let some_removed = facts.iter().any(|fact| matches!(fact, Fact::Removed(..)));
        let _alone = some_removed.then(|| self.one_removal());
        let plausible = || facts.iter().filter(|fact| fact.generation().is_plausible());
        if let Some(latest) = plausible().map(|fact| fact.generation()).max() {
            self.heard(latest);
        }
        {
            let mut table = self.table();
            if reset {
                // From here on, though it may take long until it counts as up: what was removed is taken from the tiers first.
                link.state().claims = Claims::All;
                if !planted::is(Bug::BelievesAnEarlierRun) {
                    table.lose(link.place);
                }
            }
            for &fact in plausible() {
                match table.hear(link.place, fact) {
                    Heard::Removal(removal) => removed.push((fact.key(), fact.generation(), removal)),
                    Heard::Full => missed = true,
                    Heard::New | Heard::Known | Heard::Outdated => {}
                }
                if table.duty(fact.key()) != Duty::Nothing {
                    to_do.push(fact.key());
                }
            }
        }
        self.todo.told(link.place, reset, facts.iter().map(|fact| fact.key()));
        if !facts.is_empty() {
            // A claim that this host merged into its own may be news to others.
            self.copies.changed();
        }
        self.spare_later_puts(&mut removed);
        let late = self.carry_out(&removed);
        add(&self.counts.told_late, late.len() as u64);
        // While it says everything again its copies seem to be missing; look when it is done.
        if link.is_up() {
            self.todo.look_at(&to_do);
        }
        missed
    }

    /// Called when a peer is gone, or cannot be trusted: nothing it said counts any more.
    fn lost(&self, link: &Link, error: &ChannelError) {
        let (peer, reason) = (link.config.name.clone(), error.to_string());
        let new = if error.is_refusal() { LinkState::Refused } else { LinkState::Down };
        let before = {
            let mut state = link.state();
            let before = (state.state, state.reason.replace(reason.clone()));
            state.handle = None;
            // A host that was never reached may simply not have been started yet.
            if new == LinkState::Refused || before.0 != LinkState::Connecting {
                state.state = new;
            }
            state.lost += u64::from(before.0 == LinkState::Up);
            if matches!(state.claims, Claims::All) {
                state.claims = Claims::Until(Instant::now() + self.config.repair_after);
            }
            self.up.fetch_and(!(1 << link.place), Ordering::SeqCst);
            before
        };
        self.miss_the_lost();
        if before.0 == LinkState::Up && new == LinkState::Down {
            self.tell(Event::Down { peer, reason });
        } else if new == LinkState::Refused && before != (new, Some(reason.clone())) {
            self.tell(Event::Refused { peer, reason });
        }
        link.hang_up();
        link.done.lock().start_over();
        link.forget_segment();
        // A host that was never reached from here may still reach this one.
        if before.0 == LinkState::Connecting {
            return;
        }
        self.store.release_owner(link.owner, self.clock.now_ms());
        if error.is_end() {
            // A host that is merely silent may still be writing; then time ends what it began.
            self.receiving.end("the host that wrote it is gone", |_, from| from == link.config.name);
        }
    }

    /// Forgets what peers held that were lost a while ago. Until then it counts, though nobody reads it: most come back, and
    /// copies made again for a blip would only be dropped again.
    pub(super) fn miss_the_lost(&self) {
        let mut table = self.table();
        for link in &self.links {
            let mut state = link.state();
            if matches!(state.claims, Claims::Until(end) if end <= Instant::now()) {
                state.claims = Claims::None;
                table.lose(link.place);
                self.todo.look_at_all();
                if planted::is(Bug::BeatsBehindTheTable) {
                    // As long as among some ten million blocks.
                    thread::sleep(Duration::from_secs(3));
                }
            }
        }
    }
}

/// A host that listens on all addresses does not know by which one it is reached.
fn complete(address: &mut String, ip: std::net::IpAddr) {
    if let Ok(mut parsed) = address.parse::<std::net::SocketAddr>()
        && parsed.ip().is_unspecified()
    {
        parsed.set_ip(ip);
        *address = parsed.to_string();
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::rails::Kind;
    use crate::table::{Generation, Holding, NodeId};

    /// It takes the connection, and says nothing.
    #[test]
    fn a_peer_that_does_not_open_its_pool_holds_up_only_those_that_want_it() {
        let host = crate::tests::host_alone();
        let link = &host.cluster.shared.links[0];
        let nobody_else_waits = |_| {
            let silent = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = silent.local_addr().unwrap().to_string();
            link.state().welcome.rails = vec![(Kind::Tcp.name().to_owned(), address)];
            link.pair();
            thread::scope(|scope| {
                let opening = scope.spawn(|| link.segment().is_err());
                let connection = silent.accept().unwrap();
                drop(link.segment.lock());
                let is_opening = link.opening.try_lock().is_none();
                drop(connection);
                assert!(opening.join().unwrap());
                is_opening
            })
        };
        // On a machine that is very slow it may have given up by then.
        assert!((0..4).any(nobody_else_waits), "others wait until it has given up");
    }

    /// Between the two it carries out removals, on disks that may be slow.
    #[test]
    fn what_a_peer_says_counts_before_it_is_up_and_is_missed_if_it_is_lost_then() {
        let host = crate::tests::host_alone_that_misses_nothing();
        let (shared, key) = (&host.cluster.shared, BlockKey(1));
        let link = &shared.links[0];
        let holding = Holding { size: 1, target: 2, primary: NodeId(0), generation: Generation(1) };
        link.state().claims = Claims::Until(Instant::now());
        shared.hear(link, true, &[Fact::Holds(key, holding)]);
        shared.miss_the_lost();
        assert!(shared.table().holders(key).has(link.place), "it is back");
        shared.lost(link, &ChannelError::WrongReply { address: String::new() });
        assert!(matches!(link.state().claims, Claims::Until(_)));
        link.state().claims = Claims::Until(Instant::now());
        shared.miss_the_lost();
        assert!(shared.table().is_empty());
    }

    #[test]
    fn loans_of_a_peer_that_was_lost_meanwhile_are_not_given_back() {
        let mut done = DoneLoans::default();
        let (before, _) = done.take();
        done.add(before, [1, 2].into_iter());
        assert_eq!(done.take(), (before, vec![1, 2]));
        done.add(before, [3].into_iter());
        done.start_over();
        // A read that was under way when the peer was lost ends only now.
        done.add(before, [4].into_iter());
        let (now, leases) = done.take();
        assert!(leases.is_empty());
        done.add(now, [5].into_iter());
        assert_eq!(done.take(), (now, vec![5]));
    }
}
