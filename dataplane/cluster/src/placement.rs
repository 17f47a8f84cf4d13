//! Where copies of a block go, and which host takes a put. Pure functions: their arguments decide, and nothing else.
//!
//! One host at a time: a rack that has no copy yet before one that has, then the host with the most free space, then
//! the least loaded. Free space counts in sixteenths of a pool, so that load decides between hosts that are about
//! equally full; whatever is equal after that is settled by free bytes and then by name.

use std::cmp::Reverse;

use super::table::NodeId;

/// A host that could take a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate<'a> {
    pub node: NodeId,
    /// Its failure domain. Hosts that name none share one.
    pub rack: &'a str,
    pub free_bytes: u64,
    pub pool_bytes: u64,
    /// Work under way there, in any unit that all candidates share.
    pub load: u64,
}

impl Candidate<'_> {
    /// The order of candidates: the least is the best.
    fn rank(&self) -> impl Ord + use<> {
        let sixteenths = u128::from(self.free_bytes) * 16 / u128::from(self.pool_bytes.max(1));
        (Reverse(sixteenths), self.load, Reverse(self.free_bytes), self.node)
    }
}

/// A host is short of space when a put would leave it less free than this part of its pool; another one takes the put only
/// if that would leave it twice as much. The first is above the share at which eviction stops (`store.high_free`, 10 %), so
/// that a cluster whose pools are all full, as those of caches are, leaves puts where they come in.
const SHORT: u128 = 8;
/// A host is clearly busier with more than twice the work of another and this much more.
const BUSIER: u64 = 64;

/// The peer that should take a put of `bytes` instead of `own`. Returns `None` if it should stay. See the constants for when.
pub fn primary(bytes: u64, own: &Candidate<'_>, peers: &[Candidate<'_>]) -> Option<NodeId> {
    // Whether this many parts of its pool, of `SHORT` in total, are free after the put.
    let leaves = |host: &Candidate<'_>, parts: u128| {
        let left = host.free_bytes.checked_sub(bytes);
        left.is_some_and(|left| u128::from(left) * SHORT >= u128::from(host.pool_bytes) * parts)
    };
    let short = !leaves(own, 1);
    let busier = |peer: &Candidate<'_>| own.load > peer.load.saturating_mul(2).saturating_add(BUSIER);
    let suits = |peer: &&Candidate<'_>| leaves(peer, 2) && (short || busier(peer));
    peers.iter().filter(suits).min_by_key(|peer| peer.rank()).map(|peer| peer.node)
}

/// At most `copies` of `candidates` for a block of `size` bytes, best first, none twice. `racks` have a copy already.
/// A host without room for the block is not chosen.
pub fn place(copies: usize, size: u32, racks: &[&str], candidates: &[Candidate<'_>]) -> Vec<NodeId> {
    let mut open: Vec<&Candidate<'_>> =
        candidates.iter().filter(|candidate| candidate.free_bytes >= size.into()).collect();
    open.sort_by_cached_key(|candidate| candidate.rank());
    open.dedup_by_key(|candidate| candidate.node);
    let mut racks = racks.to_vec();
    let mut chosen = Vec::new();
    while chosen.len() < copies && !open.is_empty() {
        let fresh = open.iter().position(|candidate| !racks.contains(&candidate.rack));
        let next = open.remove(fresh.unwrap_or(0));
        racks.push(next.rack);
        chosen.push(next.node);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    const RACKS: [&str; 4] = ["", "a", "b", "c"];

    fn candidates() -> impl Strategy<Value = Vec<Candidate<'static>>> {
        let one = (0usize..4, 0u64..200, 0u64..4);
        prop::collection::vec(one, 0..12).prop_map(|list| {
            let candidate = |(n, (rack, free_bytes, load))| Candidate {
                node: NodeId(n as u64),
                rack: RACKS[rack],
                free_bytes,
                pool_bytes: 160,
                load,
            };
            list.into_iter().enumerate().map(candidate).collect()
        })
    }

    /// The rule, word by word: for each copy look at every host and keep the one that no other beats.
    fn slow<'a>(copies: usize, size: u32, racks: &[&'a str], all: &[Candidate<'a>]) -> Vec<NodeId> {
        let (mut racks, mut chosen) = (racks.to_vec(), Vec::new());
        for _ in 0..copies {
            let mut best: Option<&Candidate<'a>> = None;
            for host in all {
                if host.free_bytes < size.into() || chosen.contains(&host.node) {
                    continue;
                }
                let beats = |other: &Candidate<'a>| {
                    let fresh = |host: &Candidate<'a>| !racks.contains(&host.rack);
                    let share = |host: &Candidate<'a>| host.free_bytes / (host.pool_bytes / 16);
                    if fresh(host) != fresh(other) {
                        return fresh(host);
                    }
                    if share(host) != share(other) {
                        return share(host) > share(other);
                    }
                    if host.load != other.load {
                        return host.load < other.load;
                    }
                    if host.free_bytes != other.free_bytes {
                        return host.free_bytes > other.free_bytes;
                    }
                    host.node < other.node
                };
                if best.is_none_or(beats) {
                    best = Some(host);
                }
            }
            let Some(best) = best else { break };
            racks.push(best.rack);
            chosen.push(best.node);
        }
        chosen
    }

    proptest! {
        #[test]
        fn the_rule_is_kept(
            all in candidates(), copies in 0usize..5, size in 0u32..150, taken in 0usize..3,
        ) {
            let racks = &RACKS[..taken];
            let chosen = place(copies, size, racks, &all);
            prop_assert_eq!(&chosen, &slow(copies, size, racks, &all));

            let mut reversed = all.clone();
            reversed.reverse();
            prop_assert_eq!(&chosen, &place(copies, size, racks, &reversed), "the order of the question does not matter");

            let fitting: Vec<_> = all.iter().filter(|host| host.free_bytes >= size.into()).collect();
            prop_assert_eq!(chosen.len(), copies.min(fitting.len()));
            let fresh: HashSet<_> = fitting.iter().map(|host| host.rack).filter(|rack| !racks.contains(rack)).collect();
            let used: HashSet<_> = chosen.iter().map(|node| all[node.0 as usize].rack).filter(|rack| !racks.contains(rack)).collect();
            prop_assert_eq!(used.len(), fresh.len().min(copies), "as many other racks as there can be");
        }
    }

    #[test]
    fn a_put_stays_unless_its_host_is_short_or_clearly_busier() {
        let host =
            |n, free_bytes, load| Candidate { node: NodeId(n), rack: "", free_bytes, pool_bytes: 800, load };
        let check = |own: (u64, u64), peers: &[(u64, u64)], expected: Option<u64>| {
            let peers: Vec<_> = (1..).zip(peers).map(|(n, &(free, load))| host(n, free, load)).collect();
            let chosen = primary(100, &host(0, own.0, own.1), &peers);
            assert_eq!(chosen.map(|node| node.0), expected, "{own:?} {peers:?}");
        };
        check((200, 0), &[(800, 0)], None);
        check((199, 0), &[(800, 0)], Some(1));
        check((199, 0), &[(299, 0)], None);
        check((199, 0), &[(300, 0)], Some(1));
        check((50, 0), &[(250, 0), (199, 0)], None);
        check((50, 0), &[], None);
        check((50, 0), &[(400, 0), (800, 9), (500, 0)], Some(2));
        check((800, 64), &[(800, 0)], None);
        check((800, 65), &[(800, 0)], Some(1));
        check((800, 84), &[(800, 10)], None);
        check((800, 85), &[(800, 10)], Some(1));
        check((800, 500), &[(299, 0)], None);
        check((800, u64::MAX), &[(800, u64::MAX)], None);
    }

    #[test]
    fn space_comes_before_load_and_load_before_a_few_bytes() {
        let host =
            |n, free_bytes, load| Candidate { node: NodeId(n), rack: "", free_bytes, pool_bytes: 1600, load };
        let order =
            |all: &[Candidate<'_>]| place(9, 1, &[], all).iter().map(|node| node.0).collect::<Vec<_>>();
        assert_eq!(order(&[host(1, 800, 0), host(2, 1600, 9)]), [2, 1]);
        assert_eq!(order(&[host(1, 801, 9), host(2, 800, 0)]), [2, 1], "about equally full");
        assert_eq!(order(&[host(2, 800, 0), host(1, 800, 0)]), [1, 2]);
        assert_eq!(place(9, 900, &[], &[host(1, 800, 0)]), [], "no room");
    }
}
