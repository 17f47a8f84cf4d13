//! Blocks out of a host into the caller's memory, each in as many runs as the caller has.
//!
//! The bytes are copied once and summed up where they arrived, a piece at a time. Until the sums are compared nobody is told
//! that a block is there; what lies in its runs by then means nothing.

use std::io::{self, BufRead, Read};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use kvasir_memory::runs::{Plan, Scatter};
use kvasir_memory::shared::Place;
use kvasir_protocol::block::BlockKey;

use super::block::{Block, Local};
use super::runs::Runs;
use super::wire::{READ_AHEAD, Reader};
use super::{Client, ClientError, Label};

/// What is received and summed at once: a part of the second-level cache.
const PIECE: usize = 256 << 10;

/// What became of one block.
pub(super) enum Fetched {
    /// All of its bytes arrived, and are those that were stored.
    Here(u32),
    Missing,
    /// It came with another checksum.
    Damaged,
    /// Nothing was written.
    TooLarge(u32),
    /// It was copied while it may no longer have been this client's to read.
    TooLate(ClientError),
}

impl Client {
    /// Reads into the caller's buffers, one per key; returns the size of each block found. Remote bytes go
    /// straight from the socket into the buffers. What a buffer holds whose block was not found means nothing.
    pub fn get_into(
        &self,
        keys: &[BlockKey],
        class: u16,
        buffers: &mut [&mut [u8]],
    ) -> Result<Vec<Option<u32>>, ClientError> {
        let places = buffers.iter_mut().map(|buffer| [Place::from(&mut **buffer)]).collect();
        self.get_all(keys, class, places)
    }

    /// [`get_into`](Self::get_into) for blocks whose bytes belong in many places: the runs of a block are filled one after
    /// the other.
    pub fn get_scattered(
        &self,
        keys: &[BlockKey],
        class: u16,
        blocks: &mut [&mut [&mut [u8]]],
    ) -> Result<Vec<Option<u32>>, ClientError> {
        let places = blocks.iter_mut().map(|runs| runs.iter_mut().map(|run| Place::from(&mut **run)));
        self.get_all(keys, class, places.collect())
    }

    /// Reads blocks into those of an engine that have these numbers in `plan`. Returns whether each is there now, whole. What
    /// lies in a block that is not means nothing.
    ///
    /// What the host lent for this is released before it returns.
    ///
    /// # Errors
    /// Per block: it is stored with another size than the plan's blocks have, or was not read in time. All: there is no such
    /// number, or the host cannot be asked.
    pub fn load(
        &self,
        plan: &Plan,
        blocks: &[(BlockKey, usize)],
        class: u16,
    ) -> Result<Vec<Result<bool, ClientError>>, ClientError> {
        self.load_labelled(plan, blocks, &[], class)
    }

    /// [`load`](Self::load) of blocks that were stored with these labels, one each. A block with another one is an error, and
    /// counted, whatever [`Options::verify`](super::Options::verify) says.
    ///
    /// # Errors
    /// As [`load`](Self::load). Per block also [`ClientError::OtherLabel`].
    pub fn load_labelled(
        &self,
        plan: &Plan,
        blocks: &[(BlockKey, usize)],
        labels: &[Label],
        class: u16,
    ) -> Result<Vec<Result<bool, ClientError>>, ClientError> {
        check_labels(labels, blocks.len())?;
        let mut arrived = vec![Label::BLANK; labels.len()];
        let mut room = arrived.iter_mut();
        let mut places = Runs::with_capacity(blocks.len(), plan.runs() + 1);
        for &(_, block) in blocks {
            let runs = plan.places(block).ok_or(ClientError::NoBlock { block, blocks: plan.blocks() })?;
            places.push(runs.chain(room.next().map(|label| Place::from(label.as_mut_bytes()))));
        }
        let keys: Vec<BlockKey> = blocks.iter().map(|(key, _)| *key).collect();
        let fetched = self.fetch(&keys, class, places)?;
        Ok(self.loaded(blocks, |block| plan.block_bytes(block), (labels, &arrived), fetched))
    }

    /// Gives back what was lent, and says of each block whether it is there: as long as it should be, and with its label.
    /// `labels` are those that it should have, and those that have arrived.
    pub(super) fn loaded(
        &self,
        blocks: &[(BlockKey, usize)],
        block_bytes: impl Fn(usize) -> Option<u32>,
        (labels, arrived): (&[Label], &[Label]),
        fetched: Vec<Fetched>,
    ) -> Vec<Result<bool, ClientError>> {
        // A host that is gone takes nothing back, and what was copied and compared is right all the same.
        let _ = self.release([]);
        let with_label = if labels.is_empty() { 0 } else { Label::BYTES };
        let loaded = |(at, fetched)| {
            let (key, block) = blocks[at];
            let expected = block_bytes(block).unwrap_or(0).saturating_add(with_label);
            match fetched {
                Fetched::Here(size) if size == expected => {
                    self.compare(key, labels.get(at).zip(arrived.get(at))).map(|()| true)
                }
                Fetched::Here(size) | Fetched::TooLarge(size) => {
                    Err(ClientError::OtherSize { key, size, expected })
                }
                Fetched::Missing | Fetched::Damaged => Ok(false),
                Fetched::TooLate(error) => Err(error),
            }
        };
        fetched.into_iter().enumerate().map(loaded).collect()
    }

    /// Another block under our key is an error, and stays until it is evicted or an operator removes it. It is not reported as
    /// damaged: its checksum is right, so the host would have nothing but a client's word, on which any engine could delete
    /// what others of its tenant have stored; that takes an operator. What would be safe is a proof: a label names the
    /// namespace and, where it has 32 bytes, the hash, of which the key is made, so a host could see that a label is the one of
    /// a key, and that the block under it has another.
    fn compare(&self, key: BlockKey, labels: Option<(&Label, &Label)>) -> Result<(), ClientError> {
        match labels.and_then(|(expected, arrived)| expected.fault(arrived)) {
            None => Ok(()),
            Some(fault) => {
                self.options.counts.label_failures.fetch_add(1, Ordering::Relaxed);
                Err(ClientError::OtherLabel { key, fault })
            }
        }
    }

    fn get_all(
        &self,
        keys: &[BlockKey],
        class: u16,
        places: Runs<Place<'_>>,
    ) -> Result<Vec<Option<u32>>, ClientError> {
        if places.len() != keys.len() {
            return Err(ClientError::Batch { len: places.len() });
        }
        let rooms: Vec<usize> =
            (0..keys.len()).map(|at| places.of(at).iter().map(Place::left).sum()).collect();
        let fetched = self.fetch(keys, class, places)?;
        let found = |(fetched, len)| match fetched {
            Fetched::Here(size) => Ok(Some(size)),
            Fetched::Missing | Fetched::Damaged => Ok(None),
            Fetched::TooLarge(size) => Err(ClientError::Buffer { size, len }),
            Fetched::TooLate(error) => Err(error),
        };
        fetched.into_iter().zip(rooms).map(found).collect()
    }

    fn fetch(
        &self,
        keys: &[BlockKey],
        class: u16,
        mut places: Runs<Place<'_>>,
    ) -> Result<Vec<Fetched>, ClientError> {
        self.check_batch(keys.len())?;
        let fetched = match &self.local {
            Some(local) => self.copy_lent(local, keys, class, &mut places)?,
            None => self.receive(keys, class, &mut places)?,
        };
        self.report_damaged(keys, &fetched);
        Ok(fetched)
    }

    pub(super) fn report_damaged(&self, keys: &[BlockKey], fetched: &[Fetched]) {
        let damaged = keys.iter().zip(fetched).filter(|(_, fetched)| matches!(fetched, Fetched::Damaged));
        // If the host cannot be told, the next call will find out.
        let _ = self.report(&damaged.map(|(key, _)| *key).collect::<Vec<_>>());
    }

    fn copy_lent(
        &self,
        local: &Arc<Local>,
        keys: &[BlockKey],
        class: u16,
        places: &mut Runs<Place<'_>>,
    ) -> Result<Vec<Fetched>, ClientError> {
        let (blocks, sums) = self.get_lent(local, keys, class)?;
        let copy = |(at, (block, sum)): (usize, (Option<Block>, u64))| match block {
            Some(block) => self.copy_one(&block, sum, Scatter::new(places.of_mut(at), self.options.verify)),
            None => Fetched::Missing,
        };
        Ok(blocks.into_iter().zip(sums).enumerate().map(copy).collect())
    }

    fn copy_one(&self, block: &Block, sum: u64, mut to: Scatter<'_, '_>) -> Fetched {
        let bytes = match block.bytes() {
            Ok(bytes) => bytes,
            Err(error) => return Fetched::TooLate(error),
        };
        if to.left() < u64::from(block.size()) {
            return Fetched::TooLarge(block.size());
        }
        to.copy(bytes);
        // What is asked from here on is asked after the last byte was read.
        fence(Ordering::Acquire);
        match block.bytes() {
            Err(error) => Fetched::TooLate(error),
            Ok(_) if to.checksum().is_none_or(|arrived| arrived == sum) => Fetched::Here(block.size()),
            Ok(_) => Fetched::Damaged,
        }
    }

    fn receive(
        &self,
        keys: &[BlockKey],
        class: u16,
        places: &mut Runs<Place<'_>>,
    ) -> Result<Vec<Fetched>, ClientError> {
        let mut arrived = Vec::with_capacity(keys.len());
        let found = self.get_remote(keys, class, |reader, at, size| {
            let mut to = Scatter::new(places.of_mut(at), self.options.verify);
            if to.left() < u64::from(size) {
                arrived.push(Err(Fetched::TooLarge(size)));
                return io::copy(&mut reader.take(size.into()), &mut io::sink()).map(drop);
            }
            let mut left = size as usize;
            while left > 0 {
                left -= to.piece(left.min(PIECE), |piece| fill(reader, piece))?;
            }
            arrived.push(Ok(to.checksum()));
            Ok(())
        })?;
        let mut arrived = arrived.into_iter();
        let fetched = |found: Option<(u32, u64)>| match (found, found.and_then(|_| arrived.next())) {
            (Some((size, sum)), Some(Ok(got))) if got.is_none_or(|got| got == sum) => Fetched::Here(size),
            (Some(_), Some(Ok(_))) => Fetched::Damaged,
            (Some(_), Some(Err(too_large))) => too_large,
            _ => Fetched::Missing,
        };
        Ok(found.into_iter().map(fetched).collect())
    }
}

pub(super) fn check_labels(labels: &[Label], blocks: usize) -> Result<(), ClientError> {
    let fits = labels.is_empty() || labels.len() == blocks;
    if fits { Ok(()) } else { Err(ClientError::Labels { labels: labels.len(), blocks }) }
}

/// Fills a piece with what comes next: long ones straight from the connection, short ones from what was read ahead.
fn fill(reader: &mut Reader, piece: &mut Place<'_>) -> io::Result<()> {
    while piece.left() > 0 {
        if reader.buffer().is_empty() && piece.left() >= READ_AHEAD {
            return reader.get_mut().fill(piece);
        }
        let ahead = reader.fill_buf()?;
        if ahead.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let count = piece.copy_in(ahead.into());
        reader.consume(count);
    }
    Ok(())
}
