//! Where a block belongs: to a cell, which is what is learned of, and with the host's class of its last request to a queue.

/// Host classes told apart; higher ones count as the last of these.
pub(crate) const CLASSES: usize = 32;
/// Buckets of blocks: the last block of a request that nobody used again, which is partly filled as a rule; then by uses
/// after the first.
pub(crate) const BUCKETS: usize = 10;
/// Requests are told apart by how many blocks they brought and how many were known: the least of each kind but the first.
const BROUGHT: [u32; 3] = [2, 8, 32];
const KNOWN: [u32; 4] = [1, 4, 16, 64];
const KINDS: usize = (BROUGHT.len() + 1) * (KNOWN.len() + 1);
pub(crate) const CELLS: usize = KINDS * BUCKETS;
pub(crate) const QUEUES: usize = CLASSES * CELLS;

/// The blocks of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// Those that it brought and nobody knew.
    pub(crate) brought: u32,
    /// The others.
    pub(crate) known: u32,
}

impl Request {
    fn kind(self) -> u16 {
        let reached = |blocks: u32, least: &[u32]| least.iter().filter(|&&least| blocks >= least).count();
        (reached(self.known, &KNOWN) * (BROUGHT.len() + 1) + reached(self.brought, &BROUGHT)) as u16
    }
}

/// The queue of a block: the class and the blocks of its last request, how often the block was used after the first time, and
/// whether it was the last of its request.
pub(crate) fn queue_of(class: u16, request: Request, uses: u32, tail: bool) -> u16 {
    let bucket = match uses {
        0 if tail => 0,
        0..=2 => 1 + uses,
        3..=4 => 4,
        5..=8 => 5,
        9..=16 => 6,
        17..=64 => 7,
        65..=256 => 8,
        _ => 9,
    };
    class.min(CLASSES as u16 - 1) * CELLS as u16 + request.kind() * BUCKETS as u16 + bucket as u16
}

pub(crate) fn class_of(queue: u16) -> usize {
    usize::from(queue) / CELLS
}

pub(crate) fn cell_of(queue: u16) -> usize {
    usize::from(queue) % CELLS
}

pub(crate) fn bucket_of(cell: usize) -> usize {
    cell % BUCKETS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_dense_and_what_is_beyond_is_the_last() {
        let uses =
            [(0, true), (0, false), (1, false), (2, false), (3, false), (5, false), (9, false), (17, false)];
        let uses = uses.into_iter().chain([(65, false), (257, false)]);
        let requests = [0, 1, 4, 16, 64]
            .into_iter()
            .flat_map(|known| [0, 2, 8, 32].map(|brought| Request { brought, known }));
        let kinds =
            (0..CLASSES as u16).flat_map(|class| requests.clone().map(move |request| (class, request)));
        let queues: Vec<_> = kinds
            .flat_map(|(class, request)| {
                uses.clone().map(move |(uses, tail)| queue_of(class, request, uses, tail))
            })
            .collect();
        assert_eq!(queues, (0..QUEUES as u16).collect::<Vec<_>>());
        let most = Request { brought: u32::MAX, known: u32::MAX };
        assert_eq!(queue_of(u16::MAX, most, u32::MAX, true), QUEUES as u16 - 1);
        let queue = queue_of(3, Request { brought: 9, known: 1 }, 1, false);
        assert_eq!((class_of(queue), cell_of(queue), bucket_of(cell_of(queue))), (3, 6 * BUCKETS + 2, 2));
    }
}
