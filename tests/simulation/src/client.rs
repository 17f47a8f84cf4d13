//! A client of one host, on a machine of its own: puts blocks, reads those of everybody, removes some, all over the data
//! protocol, and goes on with whichever process serves at its host's address.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvasir_client::data::{Client as Connection, ClientError, Endpoint, Options, Put, Reconnecting};
use kvasir_os::net::SocketAddr;
use kvasir_os::thread;
use kvasir_os::time::{Duration, Instant};
use kvasir_os::world::{self, Chance};
use kvasir_protocol::block::BlockMeta;
use kvasir_store::dram::Lookup;

use crate::host::{Host, token};
use crate::model::{By, Model, Run, content, is_right, key, size, tenant};
use crate::plan::{Call, ClientPlan};
use crate::slow::read_slowly;
use crate::violated;

/// How long a call may take beyond its deadline: for a last word, and for the other threads of a machine.
const LATE_MAX: Duration = Duration::from_millis(200);
/// How often a block is asked for whose lease is over before it can be read.
const READ_TRIES: usize = 4;
/// Most calls may take so long, and some of them much less than they need.
const PATIENCE_MS: u64 = 5000;
const IMPATIENCE_MS: u64 = 30;
/// Connecting takes so many steps, each of which may take as long as a call.
const STEPS: u32 = 4;
/// Pause after a host was not reached.
const AGAIN: Duration = Duration::from_millis(150);
pub(crate) const COPIES: u8 = 2;
/// One of so many reads is of what belongs to others.
const TRESPASSES: u64 = 8;

pub(crate) struct Client {
    /// Where its host serves.
    at: SocketAddr,
    model: Arc<Mutex<Model>>,
    plan: ClientPlan,
    /// Of the call that it makes.
    chance: Chance,
}

impl Client {
    pub(crate) fn new(at: SocketAddr, model: Arc<Mutex<Model>>, plan: ClientPlan) -> Self {
        let chance = Chance::new(plan.seed);
        Self { at, model, plan, chance }
    }

    pub(crate) fn work(mut self) {
        let options = Options {
            token: token(self.tenant()),
            timeout: Duration::from_millis(PATIENCE_MS),
            ..Options::default()
        };
        let host = Reconnecting::new(Endpoint::Tcp(self.at), options);
        for n in 0..self.plan.of {
            let (call, chance) = self.plan.call(n);
            self.chance = chance;
            let pause = self.chance.below(60_000);
            if self.plan.calls.contains(&n) {
                self.make(call, &host, self.plan.first_block + n);
            }
            thread::sleep(Duration::from_micros(pause));
        }
    }

    fn make(&mut self, call: Call, host: &Reconnecting, n: u32) {
        match call {
            Call::Put => self.put(host, n),
            Call::PutToo => self.put_too(host),
            Call::Read => self.read(host),
            Call::Hold => self.hold(host),
            Call::ReadSlowly => read_slowly(self.at, token(self.tenant()), &self.known(), &mut self.chance),
            Call::Remove => self.remove(host),
        }
    }

    /// For whom it acts.
    fn tenant(&self) -> u16 {
        tenant(self.plan.first_block)
    }

    fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects to the host. Also the process that it has reached.
    fn connect(&mut self, host: &Reconnecting) -> Option<(Arc<Connection>, Run)> {
        let (begun, patience) = (Begun::now(), self.patience());
        let connected = host.client_within(patience);
        within(begun, patience * STEPS, "connecting");
        match connected {
            Ok(connection) => {
                let run = self.model().run(connection.boot());
                Some((connection, run))
            }
            Err(error) => {
                world::note(&format!("is not let in: {error}"));
                thread::sleep(AGAIN);
                None
            }
        }
    }

    fn patience(&mut self) -> Duration {
        let most = if self.chance.below(5) == 0 { IMPATIENCE_MS } else { PATIENCE_MS };
        Duration::from_millis(1 + most / 2 + self.chance.below(most / 2))
    }

    /// One call, which is answered or fails by its deadline.
    fn call<T>(
        &mut self,
        connection: &Connection,
        what: &str,
        call: impl FnOnce(&Connection) -> Result<T, ClientError>,
    ) -> Option<T> {
        let (begun, patience) = (Begun::now(), self.patience());
        connection.set_deadline(Some(begun.at + patience));
        let answer = call(connection);
        within(begun, patience, what);
        if let Err(error) = &answer {
            world::note(&format!("{what}: {error}"));
            if matches!(error, ClientError::Protocol { .. } | ClientError::WrongReply { .. }) {
                violated(&format!("{what}: {error}"));
            }
            self.model().counts.failed += 1;
        }
        answer.ok()
    }

    fn put(&mut self, host: &Reconnecting, n: u32) {
        let Some((connection, run)) = self.connect(host) else { return };
        self.model().promise(n);
        let Some(put) = self.store(&connection, n, By::First) else { return };
        world::note(&format!("puts block {n}: {put:?}"));
        if put != Put::Stored {
            violated(&format!("block {n} has never been put, and a put answers {put:?}"));
        }
        let asked = self.call(&connection, "the wish for copies", |host| host.replicate(&[key(n)], COPIES));
        if asked.is_some_and(|all| matches!(all[..], [Ok(())])) {
            self.model().acknowledge(n, run);
        }
    }

    fn store(&mut self, connection: &Connection, n: u32, by: By) -> Option<Put> {
        let bytes = content(n, by);
        let meta = BlockMeta::single(key(n), bytes.len() as u32);
        self.call(connection, "a put", |host| host.put(&meta, &bytes))
    }

    /// Puts what another client has put, as two do that compute the same, not to the bit. It asks for no copies.
    fn put_too(&mut self, host: &Reconnecting) {
        let Some(n) = self.any(true) else { return };
        let Some((connection, run)) = self.connect(host) else { return };
        {
            let mut model = self.model();
            let promise = model.promise(n);
            if promise.removing {
                return;
            }
            promise.put_too.insert(run.host);
            promise.putting += 1;
        }
        let Some(put) = self.store(&connection, n, By::Another) else { return };
        world::note(&format!("puts block {n} too: {put:?}"));
        let mut model = self.model();
        model.counts.fault("blocks put twice");
        let clocks_differ = model.clocks_differ;
        let promise = model.promise(n);
        promise.putting -= 1;
        promise.out_of_order |= clocks_differ;
    }

    fn read(&mut self, host: &Reconnecting) {
        if self.chance.below(TRESPASSES) == 0 {
            return self.trespass(host);
        }
        let Some(n) = self.any(true) else { return };
        let Some((connection, run)) = self.connect(host) else { return };
        let (before, removed_by) = {
            let mut model = self.model();
            let before = model.promise(n).clone();
            let removed_by = model.removed_by(&before);
            (before, removed_by)
        };
        let Some(mut read) = self.call(&connection, "a get", |host| host.get(&[key(n)], 0)) else { return };
        let block = read.pop().flatten();
        world::note(&format!("reads block {n}: {}", if block.is_some() { "found" } else { "missing" }));
        let (after, is_promised) = {
            let mut model = self.model();
            *(if block.is_some() { &mut model.counts.hits } else { &mut model.counts.misses }) += 1;
            (model.promise(n).clone(), model.promises_blocks())
        };
        let Some(block) = block else {
            if before.acknowledged == Some(run) && !after.removing && is_promised {
                violated(&format!("block {n} is missing at the host that has it"));
            }
            return;
        };
        let mut bytes = vec![0; size(n)];
        if block.copy_to(&mut bytes).is_err() || !is_right(n, 0..size(n), bytes) {
            violated(&format!("block {n} is read with wrong bytes"));
        }
        // One that ended meanwhile may have lost its disk.
        if removed_by == Some(run.host) && self.model().removed_by(&before) == removed_by {
            violated(&format!("block {n} is read from the host that has answered that it is removed"));
        }
    }

    /// Names a block of another tenant, as that one does or without saying whose it is: to this one there is none.
    fn trespass(&mut self, host: &Reconnecting) {
        let Some(n) = self.any(false) else { return };
        let Some((connection, _)) = self.connect(host) else { return };
        let key = if self.chance.below(2) == 0 { key(n) } else { key(n).without_tenant() };
        let read = self.call(&connection, "a get", |host| host.get(&[key], 0));
        let held = self.call(&connection, "a hold", |host| host.hold(&[key], Duration::from_secs(1)));
        let removed = self.call(&connection, "a removal", |host| host.remove(&[key]));
        world::note(&format!("reaches for block {n} of another tenant"));
        let is_read = read.is_some_and(|all| all.iter().any(Option::is_some));
        let is_held = held.is_some_and(|all| all.iter().any(|held| matches!(held, Ok(true))));
        if is_read || is_held || removed.is_some_and(|all| all.contains(&true)) {
            violated(&format!("block {n} is within reach of another tenant"));
        }
        self.model().counts.fault("a reach for blocks of another tenant");
    }

    /// Keeps some blocks in the pool: for a while, or until it is gone.
    fn hold(&mut self, host: &Reconnecting) {
        let Some((connection, _)) = self.connect(host) else { return };
        let mut known: Vec<_> = self.known().into_iter().map(key).collect();
        known.truncate(16);
        let time = Duration::from_millis(self.chance.below(60_000));
        let held = self.call(&connection, "a hold", |host| host.hold(&known, time));
        world::note(&format!("holds {} blocks", held.map_or(0, |held| held.len())));
    }

    fn remove(&mut self, host: &Reconnecting) {
        let Some(n) = self.any_put_twice().or_else(|| self.any(true)) else { return };
        let Some((connection, run)) = self.connect(host) else { return };
        {
            let mut model = self.model();
            let promise = model.promise(n);
            if promise.putting > 0 || std::mem::replace(&mut promise.removing, true) {
                return;
            }
        }
        let removed = self.call(&connection, "a removal", |host| host.remove(&[key(n)]));
        world::note(&format!("removes block {n}: {removed:?}"));
        // That it was not there promises nothing: somebody else may be putting it.
        if removed.is_some_and(|all| all == [true]) {
            let mut model = self.model();
            model.counts.removals += 1;
            let unknown = model.has_bucket && model.clocks_differ;
            let promise = model.promise(n);
            promise.out_of_order |= unknown;
            promise.removed = (!promise.out_of_order).then_some(run);
        }
    }

    /// The blocks of its own tenant that were acknowledged.
    fn known(&self) -> Vec<u32> {
        self.acknowledged(true)
    }

    fn acknowledged(&self, own: bool) -> Vec<u32> {
        let model = self.model();
        let known = model.promises.iter().filter(|(_, promise)| promise.acknowledged.is_some());
        known.map(|(n, _)| *n).filter(|&n| (tenant(n) == self.tenant()) == own).collect()
    }

    /// Every other time one of those that were put twice, if there are any.
    fn any_put_twice(&mut self) -> Option<u32> {
        let known = self.known();
        let twice: Vec<u32> = {
            let mut model = self.model();
            known.into_iter().filter(|&n| model.promise(n).is_put_twice()).collect()
        };
        let at = self.chance.below(2 * twice.len().max(1) as u64) as usize;
        twice.get(at).copied()
    }

    /// One of the blocks that were acknowledged, of its own tenant or of another, of the last ones more often.
    fn any(&mut self, own: bool) -> Option<u32> {
        let known = self.acknowledged(own);
        let count = known.len() as u64;
        (count > 0).then(|| {
            let back = self.chance.below(count).min(self.chance.below(count));
            known[(count - 1 - back) as usize]
        })
    }
}

/// When something began.
struct Begun {
    at: Instant,
    /// How long this machine had stood still by then.
    still: Duration,
}

impl Begun {
    fn now() -> Self {
        Self { at: Instant::now(), still: world::stood_still() }
    }
}

fn within(begun: Begun, limit: Duration, what: &str) {
    let took = begun.at.elapsed().saturating_sub(world::stood_still() - begun.still);
    if took > limit + LATE_MAX {
        violated(&format!("{what} took {took:?}, and may take {limit:?}"));
    }
}

/// Those of some blocks that are found; their bytes must be right. What was lent for less time than the call took is asked for again.
pub(crate) fn read(host: &Host, blocks: &[u32]) -> BTreeSet<u32> {
    let (mut found, mut left) = (BTreeSet::new(), blocks.to_vec());
    for _ in 0..READ_TRIES {
        left = read_once(host, &left, &mut found);
        if left.is_empty() {
            break;
        }
    }
    found
}

/// Returns those whose lease was over before they could be read.
fn read_once(host: &Host, blocks: &[u32], found: &mut BTreeSet<u32>) -> Vec<u32> {
    let owner = host.store.new_owner();
    let keys: Vec<_> = blocks.iter().map(|&n| key(n)).collect();
    let answer = host.tiering.get(owner, &keys, 0, host.clock.now_ms()).unwrap_or_default();
    let mut over = Vec::new();
    for (&n, lookup) in blocks.iter().zip(answer) {
        let Lookup::Hit(lease) = lookup else { continue };
        let bytes = host.store.pool().mapping().bytes(lease.offset, lease.size.into());
        let is_right = bytes.is_some_and(|bytes| is_right(n, 0..size(n), bytes));
        if host.clock.now_ms() >= lease.expires_ms {
            over.push(n);
        } else if is_right {
            found.insert(n);
        } else {
            violated(&format!("block {n} is read with wrong bytes"));
        }
    }
    host.store.release_owner(owner, host.clock.now_ms());
    over
}
