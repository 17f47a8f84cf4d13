//! Classes for traces that name no request type: turn × input length.
//!
//! Turn: take the deepest block of the request seen before, and the last request that used it. If
//! the match covers all but at most one full block of that request, the new request is at least as
//! long, and the block was used by no more than 64 requests (else it is a system prompt), this is
//! that request's next turn; otherwise turn 1. Turns count to 4. Length: below 2k, 8k, 32k tokens,
//! above. Class = 1 + 4 (turn - 1) + length, so 1 to 16; 0 stays "unknown".

use super::chains::Node;
use super::trace::{BLOCK_SIZE_TOKENS, Request};
use hashbrown::HashMap;

const TURNS: u8 = 4;
const LENGTHS_TOKENS: [u32; 3] = [2 << 10, 8 << 10, 32 << 10];
/// Uses beyond which a block is taken for a system prompt.
const SHARED_USES: u32 = 64;

/// What the last request that used a block was.
#[derive(Clone, Copy, Default)]
pub struct LastUse {
    uses: u32,
    input_tokens: u32,
    turn: u8,
}

/// Where the last use of each block is kept.
pub trait LastUses {
    /// What a block is known by.
    type Block: Copy;

    /// `None` means that it was not used, or that is forgotten. Blocks are forgotten no sooner than those behind them.
    fn get(&self, block: Self::Block) -> Option<LastUse>;

    fn set(&mut self, block: Self::Block, last: LastUse);

    /// The next request has this many blocks.
    fn make_room(&mut self, _blocks: usize) {}
}

/// By node, for ever: 12 bytes per prefix.
#[derive(Default)]
pub struct ByNode(Vec<LastUse>);

impl LastUses for ByNode {
    type Block = Node;

    fn get(&self, block: Node) -> Option<LastUse> {
        self.0.get(block as usize).copied().filter(|last| last.uses > 0)
    }

    fn set(&mut self, block: Node, last: LastUse) {
        let index = block as usize;
        if index >= self.0.len() {
            self.0.resize(index + 1, LastUse::default());
        }
        self.0[index] = last;
    }
}

/// The last uses of the blocks used most recently, by the hash of their prefix: for traces without end.
///
/// When the young ones are as many as the limit they become the old ones, and the old ones before them are forgotten.
pub struct Recent {
    limit: usize,
    young: HashMap<u64, LastUse>,
    old: HashMap<u64, LastUse>,
}

impl Recent {
    /// Keeps at least the last `limit` blocks, and at most twice as many.
    pub fn new(limit: usize) -> Self {
        Self { limit: limit.max(1), young: HashMap::new(), old: HashMap::new() }
    }
}

impl LastUses for Recent {
    type Block = u64;

    fn get(&self, block: u64) -> Option<LastUse> {
        self.young.get(&block).or_else(|| self.old.get(&block)).copied()
    }

    fn set(&mut self, block: u64, last: LastUse) {
        self.young.insert(block, last);
    }

    /// Between requests only: a request uses the ancestors of what it uses, so these are never forgotten first.
    fn make_room(&mut self, blocks: usize) {
        if self.young.len() + blocks > self.limit {
            self.old = std::mem::take(&mut self.young);
        }
    }
}

/// Assigns classes to the requests of one trace, in order.
pub struct Classes<L = ByNode> {
    last_use: L,
    block_size_tokens: u32,
}

impl Default for Classes {
    fn default() -> Self {
        Self::new(ByNode::default())
    }
}

impl<L: LastUses> Classes<L> {
    /// The classes of a trace with blocks of [`BLOCK_SIZE_TOKENS`].
    pub fn new(last_use: L) -> Self {
        Self { last_use, block_size_tokens: BLOCK_SIZE_TOKENS }
    }

    /// The same, for a trace with blocks of `block_size_tokens`.
    #[must_use]
    pub fn of_blocks(self, block_size_tokens: u32) -> Self {
        Self { block_size_tokens, ..self }
    }

    /// The class of a request whose blocks are `path`: the one that the trace names, if it does.
    pub fn assign(&mut self, request: &Request, path: &[L::Block]) -> u16 {
        self.assign_with_turn(request, path).0
    }

    /// The same, and its turn: the one that the trace names, or the one found, at most 4.
    pub fn assign_with_turn(&mut self, request: &Request, path: &[L::Block]) -> (u16, u16) {
        self.last_use.make_room(path.len());
        let turn = self.turn(request.input_tokens, path);
        for &block in path {
            let uses = self.last_use.get(block).map_or(0, |last| last.uses).saturating_add(1);
            self.last_use.set(block, LastUse { uses, input_tokens: request.input_tokens, turn });
        }
        let length = LENGTHS_TOKENS.iter().filter(|&&limit| request.input_tokens >= limit).count() as u16;
        let found = 1 + u16::from(turn - 1) * (LENGTHS_TOKENS.len() as u16 + 1) + length;
        (request.class.unwrap_or(found), request.turn.unwrap_or(turn.into()))
    }

    fn turn(&self, input_tokens: u32, path: &[L::Block]) -> u8 {
        let seen = |&block: &L::Block| self.last_use.get(block);
        // Blocks seen before are a prefix of the path: a request that used a block used its ancestors.
        let matched = path.partition_point(|block| seen(block).is_some());
        let Some(last) = matched.checked_sub(1).and_then(|deepest| seen(&path[deepest])) else { return 1 };
        let full_blocks = last.input_tokens / self.block_size_tokens;
        let continues = matched as u32 + 1 >= full_blocks
            && input_tokens >= last.input_tokens
            && last.uses <= SHARED_USES;
        if continues { (last.turn + 1).min(TURNS) } else { 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::super::chains::Chains;
    use super::*;

    fn classes(requests: &[(u32, Vec<u64>)]) -> Vec<u16> {
        let (mut chains, mut classes, mut path) = (Chains::default(), <Classes>::default(), Vec::new());
        let mut class = |(input_tokens, blocks): &(u32, Vec<u64>)| {
            let request = Request {
                input_tokens: *input_tokens,
                output_tokens: 1,
                blocks: blocks.clone(),
                ..Request::default()
            };
            chains.walk(blocks, &mut path).unwrap();
            classes.assign(&request, &path)
        };
        requests.iter().map(&mut class).collect()
    }

    #[test]
    fn turns_and_lengths() {
        let long = |n: u64| (0..n).collect::<Vec<_>>();
        // 2.9 blocks, then the same conversation grown, then beyond 2k tokens, then capped.
        let rows = [(1500, vec![0, 1, 2]), (2000, vec![0, 1, 3, 4]), (2600, vec![0, 1, 3, 5, 6, 7])];
        assert_eq!(classes(&rows), [1, 5, 10]);
        assert_eq!(
            classes(&[(2047, long(4)), (2048, long(4)), (8192, long(16)), (32768, long(64))]),
            [1, 6, 11, 16]
        );
        let same: Vec<_> = (0..6).map(|_| (512, vec![9])).collect();
        assert_eq!(classes(&same), [1, 5, 9, 13, 13, 13]);
    }

    #[test]
    fn what_is_not_a_next_turn() {
        // Shorter than before; leaves more than one full block of the earlier request unmatched.
        assert_eq!(classes(&[(1024, vec![0, 1]), (600, vec![0, 1])]), [1, 1]);
        assert_eq!(classes(&[(2000, vec![0, 1, 2, 3]), (2001, vec![0, 7, 8, 9])]), [1, 1]);
        assert_eq!(classes(&[(2000, vec![0, 1, 2, 3]), (2001, vec![0, 1, 8, 9])]), [1, 5]);
        // A block that everyone uses is a system prompt.
        let mut shared: Vec<_> = (0..65).map(|i| (1000, vec![0, 100 + i])).collect();
        shared.push((1000, vec![0, 500]));
        assert_eq!(classes(&shared)[64..], [13, 1]);
    }
    #[test]
    fn what_is_kept_for_a_while_gives_the_same_classes_and_is_bounded() {
        use super::super::generate::{Generator, Plan, Workload};
        let plan = Plan { workload: Workload::Chat, requests: 2_000, rate_rps: 5.0, seed: 4 };
        let (mut chains, mut classes, mut path) = (Chains::default(), <Classes>::default(), Vec::new());
        let [mut long, mut short] = [1 << 20, 100].map(|limit| Classes::new(Recent::new(limit)));
        let mut forgotten = 0;
        for request in Generator::new(&plan).unwrap() {
            chains.walk(&request.blocks, &mut path).unwrap();
            let chain: Vec<u64> = path.iter().map(|&node| chains.identity(node)).collect();
            let class = classes.assign(&request, &path);
            assert_eq!(class, long.assign(&request, &chain));
            forgotten += usize::from(class != short.assign(&request, &chain));
            assert!(short.last_use.young.len() + short.last_use.old.len() <= 2 * 100 + 2 * chain.len());
        }
        assert!((1..1_000).contains(&forgotten), "{forgotten}");
    }
}
