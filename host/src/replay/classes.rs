//! Classes for traces that name no request type: turn × input length.
//!
//! Turn: take the deepest block of the request seen before, and the last request that used it. If
//! the match covers all but at most one full block of that request, the new request is at least as
//! long, and the block was used by no more than 64 requests (else it is a system prompt), this is
//! that request's next turn; otherwise turn 1. Turns count to 4. Length: below 2k, 8k, 32k tokens,
//! above. Class = 1 + 4 (turn - 1) + length, so 1 to 16; 0 stays "unknown".

use super::chains::Node;
use super::trace::{BLOCK_SIZE_TOKENS, Request};

const TURNS: u8 = 4;
const LENGTHS_TOKENS: [u32; 3] = [2 << 10, 8 << 10, 32 << 10];
/// Uses beyond which a block is taken for a system prompt.
const SHARED_USES: u32 = 64;

/// What the last request that used a block was.
#[derive(Clone, Copy, Default)]
struct LastUse {
    uses: u32,
    input_tokens: u32,
    turn: u8,
}

/// Assigns classes to the requests of one trace, in order. 12 bytes per prefix.
#[derive(Default)]
pub struct Classes {
    /// By node.
    last_use: Vec<LastUse>,
}

impl Classes {
    /// The class of a request whose blocks are `path`.
    pub fn assign(&mut self, request: &Request, path: &[Node]) -> u16 {
        let turn = self.turn(request.input_tokens, path);
        for &node in path {
            let index = node as usize;
            if index >= self.last_use.len() {
                self.last_use.resize(index + 1, LastUse::default());
            }
            let uses = self.last_use[index].uses.saturating_add(1);
            self.last_use[index] = LastUse { uses, input_tokens: request.input_tokens, turn };
        }
        let length = LENGTHS_TOKENS.iter().filter(|&&limit| request.input_tokens >= limit).count() as u16;
        1 + u16::from(turn - 1) * (LENGTHS_TOKENS.len() as u16 + 1) + length
    }

    fn turn(&self, input_tokens: u32, path: &[Node]) -> u8 {
        let seen = |node: &Node| self.last_use.get(*node as usize).filter(|l| l.uses > 0);
        // Blocks seen before are a prefix of the path: a request that used a block used its ancestors.
        let matched = path.partition_point(|node| seen(node).is_some());
        let Some(last) = matched.checked_sub(1).and_then(|deepest| seen(&path[deepest])) else { return 1 };
        let full_blocks = last.input_tokens / BLOCK_SIZE_TOKENS;
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
        let (mut chains, mut classes, mut path) = (Chains::default(), Classes::default(), Vec::new());
        let mut class = |(input_tokens, blocks): &(u32, Vec<u64>)| {
            let request =
                Request { time_ms: 0, input_tokens: *input_tokens, output_tokens: 1, blocks: blocks.clone() };
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
}
