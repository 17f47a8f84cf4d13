//! How unevenly requests and hits are spread over tenants or conversations.

use super::spread::{Quantiles, Spread};
use hashbrown::HashMap;
use serde::Serialize;
use std::hash::Hash;

/// The part of the total up to which the greatest are counted.
const PART: f64 = 0.9;

/// The paper's figures 7 and 8.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Skew {
    /// Tenants, or conversations.
    pub of: u64,
    /// The smallest share of them that sends half, and 90 %, of the requests.
    pub share_for_half_of_requests: f64,
    pub share_for_90_percent_of_requests: f64,
    /// The smallest share of them that has 90 % of the hits.
    pub share_for_90_percent_of_hits: f64,
}

/// Requests and hits by tenant or conversation.
pub(super) struct Shares<K> {
    by: HashMap<K, (u64, u64)>,
}

impl<K> Default for Shares<K> {
    fn default() -> Self {
        Self { by: HashMap::new() }
    }
}

impl<K: Eq + Hash> Shares<K> {
    pub(super) fn add(&mut self, whose: K, hits: u64) {
        let (requests, sum) = self.by.entry(whose).or_default();
        *requests += 1;
        *sum += hits;
    }

    /// `None` means that there is one at most.
    pub(super) fn skew(&self) -> Option<Skew> {
        let sorted = |of: fn(&(u64, u64)) -> u64| {
            let mut counts: Vec<u64> = self.by.values().map(of).collect();
            counts.sort_unstable_by_key(|&count| std::cmp::Reverse(count));
            counts
        };
        let (requests, hits) = (sorted(|counts| counts.0), sorted(|counts| counts.1));
        (self.by.len() > 1).then(|| Skew {
            of: self.by.len() as u64,
            share_for_half_of_requests: share_for(&requests, 0.5),
            share_for_90_percent_of_requests: share_for(&requests, PART),
            share_for_90_percent_of_hits: share_for(&hits, PART),
        })
    }

    /// Requests of each. `None` means that there are none.
    pub(super) fn requests(&self) -> Option<Quantiles> {
        let mut spread = Spread::default();
        self.by.values().for_each(|&(requests, _)| spread.add(requests));
        (spread.len() > 0).then(|| spread.quantiles(1.0))
    }
}

/// The share of `counts`, largest first, that has that part of their sum.
fn share_for(counts: &[u64], part: f64) -> f64 {
    let wanted = counts.iter().sum::<u64>() as f64 * part;
    let sums = counts.iter().scan(0, |sum, count| {
        let before = *sum;
        *sum += count;
        Some(before)
    });
    sums.take_while(|&before| (before as f64) < wanted).count() as f64 / counts.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_greatest_are_counted() {
        assert_eq!(share_for(&[90, 5, 5, 0], 0.9), 0.25);
        assert_eq!(share_for(&[90, 5, 5, 0], 0.91), 0.5);
        assert_eq!(share_for(&[1; 10], 0.5), 0.5);
        assert_eq!((share_for(&[0, 0], 0.9), share_for(&[], 0.9)), (0.0, 0.0));
    }

    #[test]
    fn one_tenant_has_no_skew() {
        let mut shares = Shares::default();
        assert_eq!((shares.skew(), shares.requests()), (None, None));
        shares.add(1, 5);
        assert_eq!(shares.skew(), None);
        (0..9).for_each(|_| shares.add(2, 0));
        let skew = shares.skew().unwrap();
        assert_eq!(
            (skew.of, skew.share_for_90_percent_of_requests, skew.share_for_90_percent_of_hits),
            (2, 0.5, 0.5)
        );
        assert_eq!(shares.requests().unwrap().mean, 5.0);
    }
}
