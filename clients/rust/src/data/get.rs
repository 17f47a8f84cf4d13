//! Blocks out of a host: lent in place, or received.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvasir_os::time::Instant;
use kvasir_protocol::block::BlockKey;
use kvasir_protocol::wire::{Found, Op, Reply, Request, WireError};

use super::block::{Block, Bytes, Lent, Local};
use super::error::wrong;
use super::wire::{Fault, Reader};
use super::{Client, ClientError};

impl Client {
    /// The resident ones of `keys`, for a request of workload class `class` (0 = unknown). Local blocks are lent:
    /// read them before their lease runs out.
    pub fn get(&self, keys: &[BlockKey], class: u16) -> Result<Vec<Option<Block>>, ClientError> {
        self.check_batch(keys.len())?;
        let (mut blocks, sums) = match &self.local {
            Some(local) => self.get_lent(local, keys, class)?,
            None => self.get_owned(keys, class)?,
        };
        let mut bad = Vec::new();
        if self.options.verify {
            for (block, sum) in blocks.iter_mut().zip(sums) {
                if block.as_ref().is_some_and(|block| block.raw().checksum() != sum) {
                    bad.extend(block.take().map(|block| block.key));
                }
            }
        }
        self.report(&bad)?;
        Ok(blocks)
    }

    /// Gives lent blocks back now, with all that were dropped before; otherwise that goes to the host with the next
    /// [`get`](Self::get). A block that was received is only dropped.
    pub fn release(&self, blocks: impl IntoIterator<Item = Block>) -> Result<(), ClientError> {
        blocks.into_iter().for_each(drop);
        let Some(local) = &self.local else { return Ok(()) };
        loop {
            let done = local.take_done();
            if done.is_empty() {
                return Ok(());
            }
            // One that has expired is released as well.
            let count = done.len();
            self.outcomes(&Request::Release(done), count)?;
        }
    }

    pub(super) fn get_lent(
        &self,
        local: &Arc<Local>,
        keys: &[BlockKey],
        class: u16,
    ) -> Result<(Vec<Option<Block>>, Vec<u64>), ClientError> {
        let release = local.take_done();
        // The host's lease starts later than this, so ours ends first.
        let until = Instant::now() + local.lease;
        let entries = match self.call(&Request::Get { class, release, keys: keys.to_vec() })? {
            Reply::Get(entries) if entries.len() == keys.len() => entries,
            other => return Err(wrong(&self.endpoint, Op::Get, other)),
        };
        // A place outside the pool is no block at all; a reader must not take it for an empty one.
        let outside = |entry: &Found| match entry {
            Found::Hit { offset, size, .. } => local.mapping.bytes(*offset, (*size).into()).is_none(),
            Found::Not(_) => false,
        };
        if entries.iter().any(outside) {
            return Err(ClientError::WrongReply { endpoint: self.endpoint.clone(), op: Op::Get });
        }
        let lend = |(&key, entry)| match entry {
            Found::Hit { offset, size, checksum, lease } => {
                let lent = Lent { local: Arc::clone(local), offset, size, lease, until };
                (Some(Block { key, bytes: Bytes::Lent(lent) }), checksum)
            }
            Found::Not(_) => (None, 0),
        };
        Ok(keys.iter().zip(entries).map(lend).unzip())
    }

    fn get_owned(
        &self,
        keys: &[BlockKey],
        class: u16,
    ) -> Result<(Vec<Option<Block>>, Vec<u64>), ClientError> {
        let mut received = Vec::new();
        let found = self.get_remote(keys, class, |reader, _, size| {
            let mut bytes = vec![0; size as usize];
            reader.read_exact(&mut bytes)?;
            received.push(bytes);
            Ok(())
        })?;
        let mut received = received.into_iter();
        let own = |(&key, found): (&BlockKey, &Option<(u32, u64)>)| match found {
            Some((_, sum)) => (received.next().map(|bytes| Block { key, bytes: Bytes::Owned(bytes) }), *sum),
            None => (None, 0),
        };
        Ok(keys.iter().zip(&found).map(own).unzip())
    }

    /// Size and checksum of each block found; `receive(reader, index, size)` takes the bytes of each in turn.
    pub(super) fn get_remote(
        &self,
        keys: &[BlockKey],
        class: u16,
        mut receive: impl FnMut(&mut Reader, usize, u32) -> io::Result<()>,
    ) -> Result<Vec<Option<(u32, u64)>>, ClientError> {
        let request = Request::Get { class, release: Vec::new(), keys: keys.to_vec() };
        let max = self.payload_max;
        self.exchange(&request, &[], |reader, reply, payload_len| {
            let entries = match reply {
                Reply::Get(entries) if entries.len() == keys.len() => entries,
                other => return Err(Fault::Reply(other)),
            };
            let found: Vec<Option<(u32, u64)>> = entries
                .into_iter()
                .map(|entry| match entry {
                    Found::Hit { size, checksum, .. } => Some((size, checksum)),
                    Found::Not(_) => None,
                })
                .collect();
            let total: u64 = found.iter().flatten().map(|&(size, _)| u64::from(size)).sum();
            if total != payload_len || total > max {
                return Err(WireError::Value { field: "payload length", value: payload_len }.into());
            }
            for (at, found) in found.iter().enumerate() {
                if let Some((size, _)) = found {
                    receive(reader, at, *size)?;
                }
            }
            Ok(found)
        })
    }

    /// Tells the host about blocks that do not match their checksums, so that it drops the corrupt ones.
    pub(super) fn report(&self, bad: &[BlockKey]) -> Result<(), ClientError> {
        if bad.is_empty() {
            return Ok(());
        }
        self.options.counts.checksum_failures.fetch_add(bad.len() as u64, Ordering::Relaxed);
        match self.verify(bad) {
            // Its own scrubber finds them too.
            Err(ClientError::DeadlinePassed { .. }) => Ok(()),
            told => told.map(drop),
        }
    }
}
