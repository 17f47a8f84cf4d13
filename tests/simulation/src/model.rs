//! What was promised, and whether it is kept.
//!
//! Each block has a name of its own, and two right contents. One client puts it and asks for copies; later others put it too, at
//! other hosts, and ask for none. The model is told of each call before it is made and after it was answered, and forgets nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

use kvasir_cluster::ClusterStats;
use kvasir_os::time::Duration;
use kvasir_os::world;
use kvasir_protocol::block::BlockKey;

use crate::violated;

/// Whole words.
const SIZES: [usize; 4] = [512, 4096, 9000, 20_000];

/// One block.
#[derive(Clone, Debug, Default)]
pub(crate) struct Promise {
    /// The run of a host that answered "stored, and copies will be made".
    pub(crate) acknowledged: Option<Run>,
    /// No host had it when one crashed: nobody promises it any more.
    pub(crate) is_lost: bool,
    /// Hosts where it was put too, for nobody else, which they do not tell of.
    pub(crate) put_too: BTreeSet<usize>,
    /// Such puts that were not answered. They may yet be served, so it is not removed any more.
    pub(crate) putting: u32,
    /// By then clocks of hosts differed. Of hosts that did not hear each other nobody can tell what came later, a put or a removal.
    pub(crate) out_of_order: bool,
    /// Somebody has begun to remove it.
    pub(crate) removing: bool,
    /// The run of the host that answered that it is removed.
    pub(crate) removed: Option<Run>,
}

impl Promise {
    /// A second client has begun to put it, and nobody to remove it.
    pub(crate) fn is_put_twice(&self) -> bool {
        !self.put_too.is_empty() && !self.removing
    }
}

/// A process: the host, and how often it had been started before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) host: usize,
    pub(crate) number: u32,
}

#[derive(Default)]
pub(crate) struct Model {
    pub(crate) promises: BTreeMap<u32, Promise>,
    /// Processes, by the number that each tells its clients.
    pub(crate) runs: BTreeMap<u64, Run>,
    /// Those that have crashed.
    pub(crate) ended: Vec<Run>,
    /// Those of them whose host knows nothing any more of what they removed, nor of what those before them did.
    pub(crate) forgotten: Vec<Run>,
    /// Disks have failed. What one does not take is dropped from the pool as any victim is, so that no block is promised any more.
    pub(crate) disks_failed: bool,
    /// Pools and disks are small: of what does not fit, something is dropped, and no block is promised either.
    pub(crate) drops: bool,
    /// Hosts share a bucket: one can remove what another has put that it does not hear.
    pub(crate) has_bucket: bool,
    /// All is removed in the end.
    pub(crate) is_over: bool,
    /// The clock on the wall of some host was ahead.
    pub(crate) clocks_differ: bool,
    pub(crate) counts: Counts,
}

/// What a run did, so that one which does nothing is not taken for one in which nothing is wrong.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) puts: u32,
    pub(crate) hits: u32,
    pub(crate) misses: u32,
    pub(crate) removals: u32,
    /// Calls that were not answered.
    pub(crate) failed: u32,
    /// Faults of each kind, and what hosts did that not every run makes them do.
    pub(crate) more: BTreeMap<&'static str, u64>,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { puts, hits, misses, removals, failed, more } = self;
        write!(
            f,
            "puts {puts}, hits {hits}, misses {misses}, removals {removals}, calls that failed {failed}"
        )?;
        more.iter().try_for_each(|(what, count)| write!(f, ", {what} {count}"))
    }
}

impl Counts {
    pub(crate) fn fault(&mut self, kind: &'static str) {
        *self.more.entry(kind).or_default() += 1;
    }

    /// What a host did; `moved` and `swaps`: as [`crate::host::Host`] has them.
    pub(crate) fn reached(&mut self, stats: &ClusterStats, (down, up): (u64, u64), swaps: u64) {
        let all = [
            ("blocks down", down),
            ("blocks up", up),
            ("evictors swapped", swaps),
            ("copies made", stats.copied),
            ("copies not made", stats.copy_failed),
            ("transfers resumed", u64::from(stats.resumed_bytes > 0)),
            ("reads from peers", stats.read_hits),
            ("next holders asked", stats.failovers),
            ("surplus copies dropped", stats.trimmed),
            ("blocks let go", stats.let_go),
            ("wrong bytes from peers refused", stats.corrupt),
            ("removals told late", stats.removals_told_late),
        ];
        for (what, count) in all {
            *self.more.entry(what).or_default() += count;
        }
    }
}

/// Names of blocks that each client has.
pub(crate) const NAMES: u32 = 40;
/// Those for whom clients act, in turns.
pub(crate) const TENANTS: [u16; 2] = [1, 2];

/// Whose block it is.
pub(crate) fn tenant(n: u32) -> u16 {
    TENANTS[(n / NAMES) as usize % TENANTS.len()]
}

/// The key under which hosts have a block.
pub(crate) fn key(n: u32) -> BlockKey {
    BlockKey::from_engine_hash("simulation", &n.to_le_bytes()).of_tenant(tenant(n))
}

/// Who computes a block: two that do need not agree to the bit.
#[derive(Clone, Copy)]
pub(crate) enum By {
    First,
    Another,
}

pub(crate) fn size(n: u32) -> usize {
    SIZES[n as usize % SIZES.len()]
}

/// What a block is, as one computes it.
pub(crate) fn content(n: u32, by: By) -> Vec<u8> {
    let which = u64::from(n) << 32 | (by as u64) << 24;
    let word = |i: u64| (i ^ which).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut bytes = vec![0; size(n)];
    for (i, chunk) in (0..).zip(bytes.chunks_exact_mut(8)) {
        chunk.copy_from_slice(&word(i).to_le_bytes());
    }
    bytes
}

/// Whether these are bytes of a block, as anybody computes it; `of` says which of them.
pub(crate) fn is_right<B: PartialEq<[u8]>>(n: u32, of: Range<usize>, bytes: B) -> bool {
    [By::First, By::Another].into_iter().any(|by| bytes == content(n, by)[of.clone()])
}

impl Model {
    /// A host runs on this machine, or its clock was set.
    pub(crate) fn goes_by_clock_of(&mut self, machine: usize) {
        self.clocks_differ |= world::clock_ahead(machine) > Duration::ZERO;
    }

    pub(crate) fn promise(&mut self, n: u32) -> &mut Promise {
        self.promises.entry(n).or_default()
    }

    /// A process has answered that copies of a block will be made. It may have crashed since.
    pub(crate) fn acknowledge(&mut self, n: u32, run: Run) {
        let is_lost = self.ended.contains(&run);
        let promise = self.promise(n);
        promise.acknowledged = Some(run);
        promise.is_lost |= is_lost;
        self.counts.puts += 1;
    }

    /// The process that tells its clients this number.
    pub(crate) fn run(&self, boot: u64) -> Run {
        self.runs.get(&boot).copied().unwrap_or_else(|| violated(&format!("no host is number {boot}")))
    }

    /// Whether a host that has taken a block has it, as long as it does not crash.
    pub(crate) fn promises_blocks(&self) -> bool {
        !self.disks_failed && !self.drops
    }

    /// Blocks that must be there.
    pub(crate) fn kept(&self) -> impl Iterator<Item = u32> {
        self.known().filter(|_| self.promises_blocks())
    }

    /// Blocks that were acknowledged, that some host had after each crash, and that nobody has begun to remove.
    pub(crate) fn known(&self) -> impl Iterator<Item = u32> {
        let known =
            |promise: &Promise| promise.acknowledged.is_some() && !promise.is_lost && !promise.removing;
        self.promises.iter().filter(move |(_, promise)| known(promise)).map(|(n, _)| *n)
    }

    /// Whether somebody has begun to remove it.
    pub(crate) fn is_being_removed(&self, of: BlockKey) -> bool {
        let promise = self.number(of).and_then(|n| self.promises.get(&n));
        self.is_over || promise.is_some_and(|promise| promise.removing)
    }

    /// The block that hosts have under a key, if somebody has begun to put it.
    pub(crate) fn number(&self, of: BlockKey) -> Option<u32> {
        self.promises.keys().copied().find(|&n| key(n) == of)
    }

    /// The host that has answered that a block is removed, if it has not forgotten it since.
    pub(crate) fn removed_by(&self, promise: &Promise) -> Option<usize> {
        let knows = |by: &Run| !self.forgotten.iter().any(|f| f.host == by.host && f.number >= by.number);
        promise.removed.filter(knows).map(|by| by.host)
    }

    /// Blocks whose removal was answered by a host that has not forgotten it.
    pub(crate) fn removed(&self) -> Vec<u32> {
        let is_removed = |promise: &Promise| self.removed_by(promise).is_some();
        self.promises.iter().filter(|(_, promise)| is_removed(promise)).map(|(n, _)| *n).collect()
    }
}
