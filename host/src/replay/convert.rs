//! Traces in other blocks: larger ones, and numbered in the order of their first use.

use super::chains::{Chains, Node, TooMany};
use super::trace::{MAX_BLOCK_SIZE_TOKENS, Request};

/// Blocks of one size cannot be made of those of another.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error(
    "blocks of {to} tokens cannot be made of blocks of {from}; take a multiple of {from}, at most {MAX_BLOCK_SIZE_TOKENS}"
)]
pub struct BadSize {
    from: u32,
    to: u32,
}

/// Converts the requests of one trace, in order.
pub struct Converter {
    chains: Chains,
    path: Vec<Node>,
    merged: usize,
    /// By node, the number of the block that ends there.
    numbers: Vec<Option<u64>>,
    next: u64,
}

impl Converter {
    /// Converts from blocks of one size in tokens to blocks of another.
    ///
    /// # Errors
    /// [`BadSize`].
    pub fn new(from: u32, to: u32) -> Result<Self, BadSize> {
        if !(1..=MAX_BLOCK_SIZE_TOKENS).contains(&to) || !to.is_multiple_of(from) {
            return Err(BadSize { from, to });
        }
        let merged = (to / from) as usize;
        Ok(Self { chains: Chains::default(), path: Vec::new(), merged, numbers: Vec::new(), next: 0 })
    }

    /// # Errors
    /// The trace holds too many distinct prefixes.
    pub fn convert(&mut self, request: Request) -> Result<Request, TooMany> {
        self.chains.walk_of(request.tenant, &request.blocks, &mut self.path)?;
        self.numbers.resize(self.chains.len(), None);
        // A block stands for its whole prefix, so the last of those that it is made of is its name.
        let ends = self.path.chunks(self.merged).filter_map(|part| part.last().copied());
        let number = |end: Node| {
            *self.numbers[end as usize].get_or_insert_with(|| {
                self.next += 1;
                self.next - 1
            })
        };
        let blocks = ends.map(number).collect();
        Ok(Request { blocks, ..request })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(converter: &mut Converter, tenant: u16, blocks: &[u64]) -> Vec<u64> {
        let request = Request { tenant, blocks: blocks.to_vec(), ..Request::default() };
        converter.convert(request).unwrap().blocks
    }

    #[test]
    fn larger_blocks_are_shared_where_all_of_their_tokens_are() {
        let mut converter = Converter::new(16, 32).unwrap();
        assert_eq!(blocks(&mut converter, 0, &[90, 91, 92, 93, 94]), [0, 1, 2]);
        assert_eq!(blocks(&mut converter, 0, &[90, 91, 92, 93, 94, 95]), [0, 1, 3]);
        assert_eq!(blocks(&mut converter, 0, &[90, 99]), [4]);
        // The same block behind another prefix, and of another tenant.
        assert_eq!(blocks(&mut converter, 0, &[77, 91, 92, 93]), [5, 6]);
        assert_eq!(blocks(&mut converter, 3, &[90, 91]), [7]);
        let mut same = Converter::new(16, 16).unwrap();
        assert_eq!(blocks(&mut same, 0, &[1 << 60, 5]), [0, 1]);
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        for (from, to) in [(16, 24), (512, 16), (16, 0), (16, 16_384)] {
            assert_eq!(Converter::new(from, to).err(), Some(BadSize { from, to }));
        }
    }

    #[test]
    fn hits_of_larger_blocks_are_what_whole_ones_can_have() {
        use crate::replay::generate::{Generator, Plan, Workload};
        use crate::replay::stats::Stats;
        let plan = Plan { workload: Workload::Chat, requests: 500, rate_rps: 5.0, seed: 9 };
        let requests: Vec<_> = Generator::new(&plan).unwrap().collect();
        let [small, same, large] = [None, Some(512), Some(1_024)].map(|to| {
            let mut converter = to.map(|to| Converter::new(512, to).unwrap());
            let mut stats = Stats::default();
            for request in &requests {
                let request = request.clone();
                let converted = match &mut converter {
                    Some(converter) => converter.convert(request).unwrap(),
                    None => request,
                };
                let size = to.unwrap_or(512);
                assert_eq!(converted.blocks.len(), converted.input_tokens.div_ceil(size) as usize);
                stats.add(&converted).unwrap();
            }
            stats.report()
        });
        assert_eq!(small, same);
        assert!(large.best_hit_rate_percent < small.best_hit_rate_percent);
        assert!(large.best_hit_rate_percent > 0.0);
    }
}
