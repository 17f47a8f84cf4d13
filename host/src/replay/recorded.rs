//! A trace in memory as caches see it: read once, then replayed by any number of them at the same time.

use super::cache::Prompts;
use super::chains::{Node, TooMany};
use super::trace::{self, Request};

/// The most block references of a trace in memory, which take 4 bytes each.
const REFERENCES_MAX: usize = 1 << 30;

/// Why a trace is not in memory.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Trace(#[from] trace::Error),
    #[error(transparent)]
    TooMany(#[from] TooMany),
    #[error("the trace has more than {max} block references; replay a part of it with --limit")]
    TooLong { max: usize },
}

/// See the module documentation. References are numbered in the order of the trace, first block of a request first.
pub struct Recorded {
    asked: Vec<Asked>,
    references: Vec<Node>,
    /// By node.
    identities: Vec<u64>,
    block_size_tokens: u32,
}

struct Asked {
    /// The first reference behind the request.
    end: u32,
    class: u16,
    tenant: u16,
    time_ms: u64,
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// The number of its first reference.
    pub first: u32,
    /// Its blocks, first block first.
    pub nodes: &'a [Node],
    pub class: u16,
    pub tenant: u16,
    pub time_ms: u64,
}

impl Recorded {
    /// Reads a trace with blocks of `block_size_tokens` to its end.
    ///
    /// # Errors
    /// The trace cannot be read, or is too long.
    pub fn read(
        trace: impl IntoIterator<Item = Result<Request, trace::Error>>,
        block_size_tokens: u32,
    ) -> Result<Self, Error> {
        let mut prompts = Prompts::of_blocks(block_size_tokens);
        let (mut asked, mut references) = (Vec::new(), Vec::new());
        for request in trace {
            let request = request?;
            let (path, class) = prompts.path(&request)?;
            if references.len() + path.len() > REFERENCES_MAX {
                return Err(Error::TooLong { max: REFERENCES_MAX });
            }
            references.extend_from_slice(path);
            let end = references.len() as u32;
            asked.push(Asked { end, class, tenant: request.tenant, time_ms: request.time_ms() });
        }
        Ok(Self { asked, references, identities: prompts.into_identities(), block_size_tokens })
    }

    /// Requests.
    pub fn len(&self) -> usize {
        self.asked.len()
    }

    pub fn is_empty(&self) -> bool {
        self.asked.is_empty()
    }

    pub fn block_size_tokens(&self) -> u32 {
        self.block_size_tokens
    }

    /// Hash of the whole prefix that a node stands for.
    pub fn identity(&self, node: Node) -> u64 {
        self.identities[node as usize]
    }

    /// The requests in order.
    pub fn prompts(&self) -> impl Iterator<Item = Prompt<'_>> {
        let mut first = 0;
        self.asked.iter().map(move |&Asked { end, class, tenant, time_ms }| {
            let nodes = &self.references[first as usize..end as usize];
            Prompt { first: std::mem::replace(&mut first, end), nodes, class, tenant, time_ms }
        })
    }

    /// For each reference, the next one to the same node, or `None` if there is no other.
    pub fn next_uses(&self) -> Vec<Option<std::num::NonZeroU32>> {
        let mut next_of_node = vec![None; self.identities.len()];
        let mut next = vec![None; self.references.len()];
        for (at, &node) in self.references.iter().enumerate().rev() {
            // Nothing refers back to reference 0, so it is no next use.
            next[at] =
                std::mem::replace(&mut next_of_node[node as usize], std::num::NonZeroU32::new(at as u32));
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(time_us: u64, tenant: u16, blocks: &[u64]) -> Result<Request, trace::Error> {
        let input_tokens = blocks.len() as u32 * 16;
        Ok(Request { time_us, input_tokens, tenant, blocks: blocks.to_vec(), ..Request::default() })
    }

    #[test]
    fn what_was_read_comes_again_with_its_next_uses() {
        let trace = [request(1_500, 0, &[1, 2]), request(2_000, 0, &[1, 3]), request(9_000, 0, &[1, 2])];
        let recorded = Recorded::read(trace, 16).unwrap();
        let told: Vec<_> = recorded.prompts().map(|p| (p.first, p.nodes.to_vec(), p.time_ms)).collect();
        assert_eq!(told, [(0, vec![0, 1], 1), (2, vec![0, 2], 2), (4, vec![0, 1], 9)]);
        let next: Vec<_> =
            recorded.next_uses().into_iter().map(|next| next.map_or(0, |next| next.get())).collect();
        assert_eq!(next, [2, 5, 4, 0, 0, 0]);
    }

    #[test]
    fn tenants_share_no_blocks_and_a_named_class_is_taken() {
        let of_class = Request { class: Some(40_000), ..request(0, 7, &[1, 2]).unwrap() };
        let trace = [request(0, 0, &[1, 2]), Ok(of_class), request(0, 7, &[1, 2])];
        let recorded = Recorded::read(trace, 16).unwrap();
        let nodes: Vec<_> = recorded.prompts().map(|p| (p.tenant, p.class, p.nodes.to_vec())).collect();
        assert_eq!(nodes, [(0, 1, vec![0, 1]), (7, 40_000, vec![2, 3]), (7, 5, vec![2, 3])]);
        assert_ne!(recorded.identity(0), recorded.identity(2));
    }

    #[test]
    fn a_trace_that_ends_in_an_error_is_no_trace() {
        let bad = trace::Error::Line { path: "t".into(), line: 2, reason: "bad".into() };
        let read = Recorded::read([request(0, 0, &[1]), Err(bad)], 16);
        assert!(read.is_err_and(|error| error.to_string() == "t:2: bad"));
        assert!(Recorded::read([], 16).unwrap().is_empty());
    }
}
