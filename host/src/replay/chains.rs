//! Gives every distinct prefix of a trace a dense number.
//!
//! Ids are re-keyed by (prefix before it, id), so a trace whose ids are not chained replays as
//! honestly as one whose ids are.

use hashbrown::HashMap;
use twox_hash::XxHash3_64;

/// Number of a prefix: a block together with everything before it.
pub type Node = u32;

/// The numbers above stand for what is before the first block, one for each tenant.
const NODE_MAX: Node = Node::MAX - (1 << 16);

/// Distinct prefixes seen so far. Grows with the trace: 32 bytes a prefix.
#[derive(Default)]
pub struct Chains {
    nodes: HashMap<(Node, u64), Node>,
    identities: Vec<u64>,
}

/// More distinct prefixes than 32-bit numbers.
#[derive(Debug, thiserror::Error)]
#[error("the trace has more than {NODE_MAX} distinct prefixes; replay a part of it with --limit")]
pub struct TooMany;

impl Chains {
    /// The nodes of a request's blocks, first block first.
    ///
    /// # Errors
    /// [`TooMany`].
    pub fn walk(&mut self, blocks: &[u64], path: &mut Vec<Node>) -> Result<(), TooMany> {
        self.walk_of(0, blocks, path)
    }

    /// The same for a request of a tenant: tenants share no blocks.
    ///
    /// # Errors
    /// [`TooMany`].
    pub fn walk_of(&mut self, tenant: u16, blocks: &[u64], path: &mut Vec<Node>) -> Result<(), TooMany> {
        path.clear();
        let mut parent = Node::MAX - Node::from(tenant);
        for &id in blocks {
            let next = self.identities.len();
            let identities = &mut self.identities;
            let node = *self.nodes.entry((parent, id)).or_insert_with(|| {
                let seed = identities.get(parent as usize).copied().unwrap_or(tenant.into());
                identities.push(XxHash3_64::oneshot_with_seed(seed, &id.to_le_bytes()));
                next as Node
            });
            if node > NODE_MAX {
                return Err(TooMany);
            }
            path.push(node);
            parent = node;
        }
        Ok(())
    }

    /// Hash of the whole prefix.
    pub fn identity(&self, node: Node) -> u64 {
        self.identities[node as usize]
    }

    /// By node, the hash of the whole prefix.
    pub fn into_identities(self) -> Vec<u64> {
        self.identities
    }

    pub fn len(&self) -> usize {
        self.identities.len()
    }

    pub fn is_empty(&self) -> bool {
        self.identities.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_ids_under_different_parents_are_different_blocks() {
        let (mut chains, mut a, mut b, mut c) = (Chains::default(), vec![], vec![], vec![]);
        chains.walk(&[1, 2, 2], &mut a).unwrap();
        chains.walk(&[2, 2], &mut b).unwrap();
        chains.walk(&[1, 2, 3], &mut c).unwrap();
        assert_eq!((a.clone(), b, c), (vec![0, 1, 2], vec![3, 4], vec![0, 1, 5]));
        let mut identities: Vec<_> = (0..6).map(|n| chains.identity(n)).collect();
        identities.sort_unstable();
        identities.dedup();
        assert_eq!((identities.len(), chains.len()), (6, 6));
    }
}
