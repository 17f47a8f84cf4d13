//! One operation as work requests: each has one remote range, and as many local pieces as the adapter takes.

use std::sync::Arc;

use super::memory::MemoryRegion;
use super::qp::{Piece, Request, Verb};
use crate::transport::{Direction, Op, OpError};
use kvasir_memory::region::LocalRange;

/// The most that a request may have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) pieces: usize,
    pub(super) bytes: u64,
}

/// The requests of an operation that was [checked](Op::check), in the order of its bytes. `registered` finds the
/// registration of a local range.
pub(super) fn requests(
    op: &Op,
    token: u64,
    bounds: Bounds,
    registered: impl Fn(&LocalRange) -> Option<Arc<MemoryRegion>>,
) -> Result<Vec<Request>, OpError> {
    let find = |range: &LocalRange| {
        let missing = OpError::NotRegistered { region: range.region().id(), transport: super::NAME };
        registered(range).ok_or(missing)
    };
    let regions = op.local.iter().map(find).collect::<Result<Vec<_>, _>>()?;
    let verb = match op.direction {
        Direction::Read => Verb::Read,
        Direction::Write => Verb::Write,
    };
    let local: Vec<u64> = op.local.iter().map(LocalRange::len).collect();
    let remote: Vec<u64> = op.remote.iter().map(|range| range.len).collect();
    let request = |cut: Cut| {
        let range = &op.remote[cut.remote];
        let region = op.grant.regions.get(range.region as usize)?;
        let piece = |part: Part| Piece {
            region: Arc::clone(&regions[part.range]),
            offset: op.local[part.range].offset() + part.skip,
            len: part.len as u32,
        };
        Some(Request {
            token,
            verb,
            local: cut.local.into_iter().map(piece).collect(),
            remote_address: region.address.checked_add(range.offset)?.checked_add(cut.skip)?,
            remote_key: u32::try_from(region.key).ok()?,
        })
    };
    let all: Option<Vec<_>> = cut(&local, &remote, bounds).into_iter().map(request).collect();
    all.ok_or(OpError::Denied(crate::transport::Denied::OutOfRange))
}

/// A part of a local range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    range: usize,
    skip: u64,
    len: u64,
}

/// What one request moves: local parts, and as many bytes of one remote range.
#[derive(Debug, PartialEq, Eq)]
struct Cut {
    remote: usize,
    skip: u64,
    local: Vec<Part>,
}

/// Cuts two lists that have the same sum.
fn cut(local: &[u64], remote: &[u64], bounds: Bounds) -> Vec<Cut> {
    let mut cuts = Vec::new();
    let mut sources = local.iter().copied().enumerate();
    let mut source = Part { range: 0, skip: 0, len: 0 };
    for (n, &len) in remote.iter().enumerate() {
        let mut done = 0;
        while done < len {
            let mut cut = Cut { remote: n, skip: done, local: Vec::new() };
            let mut left = (len - done).min(bounds.bytes);
            while left > 0 && cut.local.len() < bounds.pieces {
                if source.len == 0 {
                    let Some((range, len)) = sources.next() else { return cuts };
                    source = Part { range, skip: 0, len };
                    continue;
                }
                let take = source.len.min(left);
                cut.local.push(Part { len: take, ..source });
                source = Part { range: source.range, skip: source.skip + take, len: source.len - take };
                (left, done) = (left - take, done + take);
            }
            cuts.push(cut);
        }
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranges_meet_where_either_ends() {
        let bounds = Bounds { pieces: 2, bytes: 100 };
        let part = |range, skip, len| Part { range, skip, len };
        let expected = [
            Cut { remote: 0, skip: 0, local: vec![part(0, 0, 10), part(1, 0, 5)] },
            Cut { remote: 1, skip: 0, local: vec![part(1, 5, 100)] },
            Cut { remote: 1, skip: 100, local: vec![part(1, 105, 1), part(2, 0, 1)] },
            Cut { remote: 1, skip: 102, local: vec![part(3, 0, 1)] },
        ];
        assert_eq!(cut(&[10, 106, 1, 1], &[15, 103], bounds), expected);
    }

    proptest! {
        #[test]
        fn every_byte_is_moved_once_and_in_order(
            lens in prop::collection::vec(1u64..300, 1..20),
            splits in prop::collection::vec(1u64..300, 1..20),
            pieces in 1usize..5,
            bytes in 1u64..200,
        ) {
            // Two lists of the same sum.
            let total: u64 = lens.iter().sum();
            let mut left = total;
            let mut remote: Vec<u64> = splits.into_iter().map_while(|len| {
                let len = len.min(left);
                left -= len;
                (len > 0).then_some(len)
            }).collect();
            remote.extend((left > 0).then_some(left));

            let cuts = cut(&lens, &remote, Bounds { pieces, bytes });
            // Where the bytes come from and go to, one by one.
            let from = cuts.iter().flat_map(|cut| &cut.local)
                .flat_map(|part| (part.skip..part.skip + part.len).map(|at| (part.range, at)));
            let to = cuts.iter().flat_map(|cut| {
                let len: u64 = cut.local.iter().map(|part| part.len).sum();
                (cut.skip..cut.skip + len).map(|at| (cut.remote, at))
            });
            let each = |lens: &[u64]| -> Vec<_> {
                lens.iter().enumerate().flat_map(|(n, &len)| (0..len).map(move |at| (n, at))).collect()
            };
            prop_assert_eq!(from.collect::<Vec<_>>(), each(&lens));
            prop_assert_eq!(to.collect::<Vec<_>>(), each(&remote));
            for cut in &cuts {
                let len: u64 = cut.local.iter().map(|part| part.len).sum();
                prop_assert!(cut.local.len() <= pieces && len <= bytes && len > 0);
            }
        }
    }
}
