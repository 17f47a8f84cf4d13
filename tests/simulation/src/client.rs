//! A client of one host: puts blocks, reads those of everybody, removes some.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvasir_os::thread;
use kvasir_os::time::{Duration, Instant};
use kvasir_os::world::{self, Chance};
use kvasir_protocol::block::BlockMeta;
use kvasir_protocol::wire::Outcome;
use kvasir_store::dram::{Lookup, Remove, Reserve};

use crate::host::Host;
use crate::model::{Model, Run, content, key};
use crate::violated;

/// No call takes longer, whatever happens to the network.
const CALL_MAX: Duration = Duration::from_secs(10);
pub(crate) const COPIES: u8 = 2;

pub(crate) struct Client {
    pub(crate) run: Run,
    pub(crate) host: Arc<Host>,
    pub(crate) model: Arc<Mutex<Model>>,
    pub(crate) chance: Chance,
    /// Its blocks are named from here on.
    pub(crate) first: u32,
    pub(crate) calls: u32,
}

impl Client {
    pub(crate) fn work(mut self) {
        for n in 0..self.calls {
            let begun = Instant::now();
            match self.chance.below(10) {
                0..4 => self.put(self.first + n),
                4..9 => self.read(),
                _ => self.remove(),
            }
            let took = begun.elapsed();
            if took > CALL_MAX {
                violated(&format!("a call took {took:?}, and none may take longer than {CALL_MAX:?}"));
            }
            thread::sleep(Duration::from_micros(self.chance.below(60_000)));
        }
    }

    fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, n: u32) {
        let Host { store, cluster, clock, .. } = &*self.host;
        let bytes = content(n);
        let owner = store.new_owner();
        let put = store.put(owner, &BlockMeta::single(key(n), bytes.len() as u32), &bytes, clock.now_ms());
        if !matches!(put, Ok(Reserve::Reserved(_))) {
            violated(&format!("block {n} cannot be put into a pool with room: {put:?}"));
        }
        let outcome = cluster.replicate(&[key(n)], COPIES)[0];
        world::note(&format!("puts block {n}: {outcome:?}"));
        if outcome == Outcome::Done {
            let mut model = self.model();
            model.promise(n).acknowledged = Some(self.run);
            model.counts.puts += 1;
        }
    }

    fn read(&mut self) {
        let Some(n) = self.any() else { return };
        let before = self.model().promise(n).clone();
        let found = read(&self.host, n);
        world::note(&format!("reads block {n}: {}", if found { "found" } else { "missing" }));
        let after = {
            let mut model = self.model();
            *(if found { &mut model.counts.hits } else { &mut model.counts.misses }) += 1;
            model.promise(n).clone()
        };
        if found && before.removed == Some(self.run) {
            violated(&format!("block {n} is read from the host that has answered that it is removed"));
        }
        if !found && before.acknowledged == Some(self.run) && !after.removing {
            violated(&format!("block {n} is missing at the host that has it"));
        }
    }

    fn remove(&mut self) {
        let Some(n) = self.any() else { return };
        if std::mem::replace(&mut self.model().promise(n).removing, true) {
            return;
        }
        let Host { tiering, clock, .. } = &*self.host;
        let removed = tiering.remove(&[key(n)], clock.now_ms());
        world::note(&format!("removes block {n}: {removed:?}"));
        if matches!(removed.as_deref(), Ok([Remove::Removed | Remove::Missing])) {
            let mut model = self.model();
            model.promise(n).removed = Some(self.run);
            model.counts.removals += 1;
        }
    }

    /// One of the blocks that were acknowledged, of the last ones more often.
    fn any(&mut self) -> Option<u32> {
        let known: Vec<u32> = {
            let model = self.model();
            model.promises.iter().filter(|(_, p)| p.acknowledged.is_some()).map(|(n, _)| *n).collect()
        };
        let count = known.len() as u64;
        (count > 0).then(|| {
            let back = self.chance.below(count).min(self.chance.below(count));
            known[(count - 1 - back) as usize]
        })
    }
}

/// Whether a block is found; if it is, its bytes must be right.
pub(crate) fn read(host: &Host, n: u32) -> bool {
    let owner = host.store.new_owner();
    let found = host.tiering.get(owner, &[key(n)], 0, host.clock.now_ms());
    let Ok([Lookup::Hit(lease)]) = found.as_deref() else { return false };
    let bytes = host.store.pool().mapping().bytes(lease.offset, lease.size.into());
    if bytes.is_none_or(|bytes| bytes != content(n)) {
        violated(&format!("block {n} is read with wrong bytes"));
    }
    host.store.release_owner(owner, host.clock.now_ms());
    true
}
