//! Blocks that the last host which claimed them no longer holds, and that are here all the same.
//!
//! What a host reads from a peer it keeps like any other block, and claims nothing: as many hosts as are wanted hold the block
//! already, and one that is much read would be claimed everywhere, only to be trimmed. But if all hosts that claimed it are
//! gone, nobody would make the copies that were promised. So a host that has such a block takes over: it claims it, with
//! the target that was asked for, and the rest follows from that. Several readers may do so at once; the surplus is trimmed.
//!
//! A read that was under way when the last holder was lost brings the block into the pool a little later, so each is looked
//! for twice.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Shared;
use super::table::{Heard, Holding};
use kvasir_os::planted::{self, Bug};
use kvasir_os::time::Instant;
use kvasir_protocol::block::{BATCH_MAX, BlockKey};

/// What was last known of a block that nobody claims any more.
type Orphan = (BlockKey, Holding);

/// The blocks that were not here, and when they are looked for again. At most as many as the table has blocks.
#[derive(Default)]
pub(super) struct Orphans(VecDeque<(Instant, Orphan)>);

impl Shared {
    /// Claims those blocks that nobody else claims any more and that a tier of this host has.
    pub(super) fn take_over(self: &Arc<Self>, orphans: &mut Orphans) {
        let lost = self.table().take_orphans();
        let now = Instant::now();
        let due = orphans.0.partition_point(|(at, _)| *at <= now);
        let due: Vec<Orphan> = orphans.0.drain(..due).map(|(_, orphan)| orphan).collect();
        self.claim(&due);
        let mut not_here = self.claim(&lost);
        not_here.truncate(self.config.blocks_max.saturating_sub(orphans.0.len()));
        // Twice the time that a read of peers may take: it has ended then, and its block is in the pool.
        let again = now + self.config.read_timeout * 2;
        orphans.0.extend(not_here.into_iter().map(|orphan| (again, orphan)));
    }

    /// Returns those that are not here.
    fn claim(&self, orphans: &[Orphan]) -> Vec<Orphan> {
        let mut not_here = Vec::new();
        for orphans in orphans.chunks(BATCH_MAX) {
            let keys: Vec<BlockKey> = orphans.iter().map(|(key, _)| *key).collect();
            let here = self.has_here(&keys);
            let mut claimed = Vec::new();
            let mut table = self.table();
            for (&(key, holding), here) in orphans.iter().zip(here) {
                if !here {
                    not_here.push((key, holding));
                    continue;
                }
                let unclaimed = table.holders(key).is_empty() && !planted::is(Bug::LeavesOrphans);
                if unclaimed && table.holds(0, key, holding) == Heard::New {
                    claimed.push(key);
                }
            }
            drop(table);
            self.copies.changed();
            self.todo.look_at(&claimed);
        }
        not_here
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{Generation, Gone, NodeId};
    use crate::tests::pair_of_hosts;
    use kvasir_protocol::block::BlockMeta;
    use std::time::Duration;

    fn holding() -> Holding {
        Holding { size: 8, target: 2, primary: NodeId::of("host-1"), generation: Generation(1) }
    }

    /// Without its peer saying so, and as if it had read the block.
    fn put(host: &crate::tests::Host, key: BlockKey) {
        host.store.put(host.store.new_owner(), &BlockMeta::single(key, 8), b"a block.", 0).unwrap();
    }

    #[test]
    fn what_was_read_from_a_lost_host_is_claimed_and_copied_again() {
        let (host, peer) = pair_of_hosts();
        let (shared, key) = (&host.cluster.shared, BlockKey(1));
        put(&host, key);
        shared.table().holds(1, key, holding());
        shared.table().lose(1);
        let until = std::time::Instant::now() + Duration::from_secs(60);
        while !peer.store.exists(&[key]).unwrap()[0] && std::time::Instant::now() < until {
            std::thread::yield_now();
        }
        assert!(peer.store.exists(&[key]).unwrap()[0], "a copy was made as was promised");
        assert!(shared.table().holders(key).has(0));
    }

    #[test]
    fn what_arrives_after_its_holder_was_lost_is_found_by_the_second_look() {
        let (host, _peer) = pair_of_hosts();
        let (shared, key, mut orphans) = (&host.cluster.shared, BlockKey(1), Orphans::default());
        orphans
            .0
            .extend(shared.claim(&[(key, holding())]).into_iter().map(|orphan| (Instant::now(), orphan)));
        assert_eq!(orphans.0.len(), 1);
        put(&host, key);
        shared.take_over(&mut orphans);
        assert!(orphans.0.is_empty() && shared.table().holders(key).has(0));
    }

    #[test]
    fn what_was_removed_or_let_go_or_is_claimed_again_is_left_alone() {
        let (host, _peer) = pair_of_hosts();
        let (shared, key) = (&host.cluster.shared, BlockKey(1));
        put(&host, key);
        let mut table = shared.table();
        table.holds(1, key, holding());
        table.gone(1, key, Gone::LetGo);
        assert!(table.take_orphans().is_empty(), "a policy had better use for the space");
        table.holds(1, key, holding());
        table.gone(1, key, Gone::Lost);
        table.holds(1, key, holding());
        assert!(table.take_orphans().is_empty(), "it is back");
        table.lose(1);
        let orphans = table.take_orphans();
        assert_eq!(orphans, [(key, holding())]);
        table.remove(key, Generation(2));
        drop(table);
        assert!(shared.claim(&orphans).is_empty());
        assert!(shared.table().holders(key).is_empty(), "it was removed since it was put");
    }
}
