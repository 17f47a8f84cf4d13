//! A process that maps the pool of its host: blocks are lent to it, and it reads them where they lie. Another of that kind names its
//! leases, as numbers can be guessed.

use kvasir_os::thread;
use kvasir_os::time::Duration;
use kvasir_os::world::Chance;
use kvasir_store::dram::{Lease, Lookup};

use crate::engines::At;
use crate::model::{is_right, key, size};
use crate::violated;

/// Blocks that are lent to it, one after the other.
const BLOCKS: usize = 6;
const LOOK_MS: u64 = 300;

/// Reads some of the blocks that were acknowledged, as long as it may.
pub(crate) fn read_in_place(at: &At, mut chance: Chance) {
    let Some([owner, other]) = at.ask(|host| [(); 2].map(|()| host.store.new_client())) else { return };
    for n in at.some_known(BLOCKS, &mut chance) {
        let lent = at.ask(|host| host.store.get(owner, &[key(n)], 0, host.clock.now_ms()));
        let Some(Ok(lookups)) = lent else { return };
        let Lookup::Hit(lease) = lookups[0] else { continue };
        let ended = at.ask(|host| host.store.release(other, &[lease.id]));
        if matches!(ended, Some(Ok(ended)) if ended[0].is_ok()) {
            violated(&format!("what was lent of block {n} is ended by another than it was lent to"));
        }
        for _ in 0..=chance.below(3) {
            compare(at, n, &lease);
            thread::sleep(Duration::from_millis(chance.below(LOOK_MS)));
        }
        compare(at, n, &lease);
        let ended = at.ask(|host| host.store.release(owner, &[lease.id]));
        if matches!(ended, Some(Ok(ended)) if ended[0].is_err()) && !is_over(at, &lease) {
            violated(&format!("what was lent of block {n} has ended before its time"));
        }
        at.did("blocks read in place");
    }
}

fn compare(at: &At, n: u32, lease: &Lease) {
    let bytes = at.host.store.pool().mapping().bytes(lease.offset, lease.size.into());
    let is_right = bytes.is_some_and(|bytes| is_right(n, 0..size(n), bytes));
    if !is_right && !is_over(at, lease) {
        violated(&format!("block {n} is read with wrong bytes where it lies"));
    }
}

fn is_over(at: &At, lease: &Lease) -> bool {
    at.host.clock.now_ms() >= lease.expires_ms
}
