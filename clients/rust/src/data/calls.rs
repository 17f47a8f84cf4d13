//! Calls that carry no bytes of blocks.

use kvasir_os::time::Duration;
use kvasir_protocol::block::{BlockKey, Pin};
use kvasir_protocol::wire::{Op, Outcome, Reply, Request, Stat};

use super::error::wrong;
use super::{Client, ClientError};

impl Client {
    pub fn exists(&self, keys: &[BlockKey]) -> Result<Vec<bool>, ClientError> {
        self.check_batch(keys.len())?;
        match self.call(&Request::Exists(keys.to_vec()))? {
            Reply::Exists(found) if found.len() == keys.len() => Ok(found),
            other => Err(wrong(&self.endpoint, Op::Exists, other)),
        }
    }

    /// What the host knows about each key, and `None` for one that is not resident. Not a use.
    pub fn stat(&self, keys: &[BlockKey]) -> Result<Vec<Option<Stat>>, ClientError> {
        self.check_batch(keys.len())?;
        match self.call(&Request::Stat(keys.to_vec()))? {
            Reply::Stat(stats) if stats.len() == keys.len() => Ok(stats),
            other => Err(wrong(&self.endpoint, Op::Stat, other)),
        }
    }

    /// Removes blocks. Returns whether each was there.
    ///
    /// # Errors
    /// [`ClientError::NotRemoved`]: one is still somewhere. The others are removed.
    pub fn remove(&self, keys: &[BlockKey]) -> Result<Vec<bool>, ClientError> {
        self.check_batch(keys.len())?;
        let outcomes = self.outcomes(&Request::Remove(keys.to_vec()), keys.len())?;
        let removed = |(&key, outcome)| match outcome {
            Outcome::InProgress => Err(ClientError::NotRemoved { key }),
            outcome => found_or_failed((&key, outcome)),
        };
        keys.iter().zip(outcomes).map(removed).collect()
    }

    /// Keeps blocks from being evicted for a while, for this client's tenant. Returns whether each was there.
    pub fn pin(&self, keys: &[BlockKey], pin: Pin) -> Result<Vec<Result<bool, ClientError>>, ClientError> {
        self.check_batch(keys.len())?;
        let outcomes = self.outcomes(&Request::Pin { pin, keys: keys.to_vec() }, keys.len())?;
        Ok(keys.iter().zip(outcomes).map(found_or_failed).collect())
    }

    /// Ends the pins of this client's tenant. Returns whether there was one on each.
    pub fn unpin(&self, keys: &[BlockKey]) -> Result<Vec<bool>, ClientError> {
        self.check_batch(keys.len())?;
        let outcomes = self.outcomes(&Request::Unpin(keys.to_vec()), keys.len())?;
        Ok(outcomes.into_iter().map(|outcome| outcome == Outcome::Done).collect())
    }

    /// Keeps blocks in the host's pool from being evicted, until [`end_hold`](Self::end_hold) was called for them as often as
    /// this, for `time` at most, and no longer than this connection lasts. On the account of this client's tenant, as pins
    /// are; a block that the tenant keeps in several ways counts once.
    ///
    /// Returns whether each block was there. An error for one: the tenant keeps as much as it may, or this connection does.
    pub fn hold(
        &self,
        keys: &[BlockKey],
        time: Duration,
    ) -> Result<Vec<Result<bool, ClientError>>, ClientError> {
        self.check_batch(keys.len())?;
        let ms = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        let outcomes = self.outcomes(&Request::Hold { ms, keys: keys.to_vec() }, keys.len())?;
        Ok(keys.iter().zip(outcomes).map(found_or_failed).collect())
    }

    /// Takes back one [`hold`](Self::hold) of each block. Returns whether there was one: it may have ended by its time.
    pub fn end_hold(&self, keys: &[BlockKey]) -> Result<Vec<bool>, ClientError> {
        self.check_batch(keys.len())?;
        let outcomes = self.outcomes(&Request::EndHold(keys.to_vec()), keys.len())?;
        Ok(outcomes.into_iter().map(|outcome| outcome == Outcome::Done).collect())
    }

    /// Evicts blocks now, even with soft pins. Returns whether each was there. A block that is being read or has a hard pin
    /// stays, with an error.
    pub fn evict(&self, keys: &[BlockKey]) -> Result<Vec<Result<bool, ClientError>>, ClientError> {
        self.check_batch(keys.len())?;
        let outcomes = self.outcomes(&Request::Evict(keys.to_vec()), keys.len())?;
        Ok(keys.iter().zip(outcomes).map(found_or_failed).collect())
    }

    /// Asks for blocks that are stored on this host to be held by `copies` hosts in total. The host answers at once and
    /// makes the copies in the background; it makes them again when it loses a holder. Ask again with a larger number to
    /// have more; a smaller one changes nothing.
    ///
    /// Per block: an error if it is not in the host's pool, or the host cannot promise that many.
    pub fn replicate(
        &self,
        keys: &[BlockKey],
        copies: u8,
    ) -> Result<Vec<Result<(), ClientError>>, ClientError> {
        self.check_batch(keys.len())?;
        let outcomes = self.outcomes(&Request::Replicate { copies, keys: keys.to_vec() }, keys.len())?;
        let result = |(&key, outcome)| match outcome {
            Outcome::Done => Ok(()),
            outcome => Err(ClientError::Block { key, outcome }),
        };
        Ok(keys.iter().zip(outcomes).map(result).collect())
    }

    /// Has the host compare blocks with their checksums. Returns true for each that is resident and intact.
    pub fn verify(&self, keys: &[BlockKey]) -> Result<Vec<bool>, ClientError> {
        self.check_batch(keys.len())?;
        let outcomes = self.outcomes(&Request::Verify(keys.to_vec()), keys.len())?;
        Ok(outcomes.into_iter().map(|outcome| outcome == Outcome::Done).collect())
    }
}

fn found_or_failed((&key, outcome): (&BlockKey, Outcome)) -> Result<bool, ClientError> {
    match outcome {
        Outcome::Done => Ok(true),
        Outcome::Missing => Ok(false),
        outcome => Err(ClientError::Block { key, outcome }),
    }
}
