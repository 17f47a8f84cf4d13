//! Moves a trace's blocks through a running host, and compares every byte that comes back.
//!
//! A block's key is a hash of everything before it, so equal prefixes are equal keys; its bytes are computed
//! from its key, so that checking them needs no memory of them. Per request the leading blocks are read until
//! the first miss, and the rest is stored, first block to last. The host decides what to keep.

use super::chains::{Chains, TooMany};
use super::classes::Classes;
use super::content;
use super::trace::{self, Request};
use kvasir_client::control::ControlError;
use kvasir_client::data::{Client, ClientError, Put};
use kvasir_dataplane::{BlockKey, BlockMeta};
use serde::Serialize;
use std::ops::AddAssign;
use std::time::{Duration, Instant};

/// Bytes of the largest block: the most that a host takes in one frame by default.
pub const MAX_BLOCK_BYTES: u32 = 256 << 20;
/// The most blocks and bytes of one call: enough to hide the round trip, few enough to stay in a cache.
const BATCH_BLOCKS: usize = 256;
const BATCH_BYTES: usize = 4 << 20;
/// How often one batch is tried again, and the pause before the first retry; each further pause is twice as long.
const RETRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(2);
/// After this many requests in a row of which the host could store nothing, the replay gives up.
const MAX_STARVED_REQUESTS: u32 = 16;

/// Why a replay stops.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("blocks of {0} B are outside 1 to {MAX_BLOCK_BYTES}")]
    BlockBytes(u32),
    #[error(transparent)]
    Trace(#[from] trace::Error),
    #[error(transparent)]
    TooMany(#[from] TooMany),
    #[error("stopped after {done}: {source}")]
    Host { done: Progress, source: ClientError },
    #[error("stopped after {done}: the host's clock: {source}")]
    Clock { done: Progress, source: ControlError },
    #[error(
        "stopped after {done}: the host had no room for any new block of the last {MAX_STARVED_REQUESTS} requests \
         ({source}); is its evictor running, and are its readers done?"
    )]
    Full { done: Progress, source: ClientError },
}

/// # Errors
/// [`Error::BlockBytes`].
pub fn check_block_bytes(bytes: u32) -> Result<(), Error> {
    if (1..=MAX_BLOCK_BYTES).contains(&bytes) { Ok(()) } else { Err(Error::BlockBytes(bytes)) }
}

/// How far a session got, for messages.
#[derive(Debug)]
pub struct Progress {
    requests: u64,
    blocks_put: u64,
    bytes_read: u64,
}

impl std::fmt::Display for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { requests, blocks_put, bytes_read } = self;
        write!(f, "{requests} requests ({blocks_put} blocks put, {bytes_read} B read)")
    }
}

/// What was moved for one request, or for all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RequestReport {
    pub block_references: u64,
    /// Leading blocks that were resident.
    pub prefix_hits: u64,
    /// Blocks that this session stored; those that were resident behind a gap are not counted.
    pub blocks_put: u64,
    pub bytes_put: u64,
    /// Bytes received, including blocks behind a gap.
    pub bytes_read: u64,
    /// Bytes compared with what was stored and found equal.
    pub bytes_verified: u64,
    /// Blocks that did not match their checksums: reported to the host, and counted as misses.
    pub checksum_failures: u64,
    /// Bytes that matched their block's checksum but were not what was stored. This must stay 0.
    pub wrong_bytes: u64,
    /// Batches sent again because the host was full or busy.
    pub retries: u64,
    /// Blocks for which the host had no room, after all retries.
    #[serde(skip_serializing_if = "is_zero")]
    pub blocks_refused: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl AddAssign<&Self> for RequestReport {
    fn add_assign(&mut self, other: &Self) {
        let Self {
            block_references,
            prefix_hits,
            blocks_put,
            bytes_put,
            bytes_read,
            bytes_verified,
            checksum_failures,
            wrong_bytes,
            retries,
            blocks_refused,
        } = other;
        self.block_references += block_references;
        self.prefix_hits += prefix_hits;
        self.blocks_put += blocks_put;
        self.bytes_put += bytes_put;
        self.bytes_read += bytes_read;
        self.bytes_verified += bytes_verified;
        self.checksum_failures += checksum_failures;
        self.wrong_bytes += wrong_bytes;
        self.retries += retries;
        self.blocks_refused += blocks_refused;
    }
}

/// The result of a replay; the JSON of `kvasir replay --mode store`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub mode: &'static str,
    pub trace: String,
    pub host: String,
    pub block_bytes: u32,
    pub requests: u64,
    pub hit_rate_percent: f64,
    #[serde(flatten)]
    pub moved: RequestReport,
    pub seconds: f64,
}

/// One client's requests, one after the other.
pub struct Session {
    client: Client,
    block_bytes: u32,
    keys: Vec<BlockKey>,
    /// The bytes that one batch puts.
    buffer: Vec<u8>,
    requests: u64,
    total: RequestReport,
    starved_requests: u32,
}

impl Session {
    /// A session whose blocks have `block_bytes` each.
    ///
    /// # Errors
    /// [`Error::BlockBytes`].
    pub fn new(client: Client, block_bytes: u32) -> Result<Self, Error> {
        check_block_bytes(block_bytes)?;
        Ok(Self {
            client,
            block_bytes,
            keys: Vec::new(),
            buffer: Vec::new(),
            requests: 0,
            total: RequestReport::default(),
            starved_requests: 0,
        })
    }

    /// The keys of a request's blocks, first block first.
    ///
    /// A key covers the ids of all blocks before it, the size and the tenant of the trace, so that sessions of one size
    /// share blocks, and sessions of two sizes, or two tenants of a trace, do not.
    pub fn keys(&self, request: &Request) -> Vec<BlockKey> {
        let mut keys = Vec::with_capacity(request.blocks.len());
        self.fill_keys(request, &mut keys);
        keys
    }

    fn fill_keys(&self, request: &Request, keys: &mut Vec<BlockKey>) {
        let mut parent = BlockKey(u128::from(request.tenant) << 32 | u128::from(self.block_bytes));
        keys.clear();
        for id in &request.blocks {
            let mut hash = [0; 24];
            hash[..16].copy_from_slice(&parent.0.to_le_bytes());
            hash[16..].copy_from_slice(&id.to_le_bytes());
            parent = self.client.key(&hash);
            keys.push(parent);
        }
    }

    /// Requests served so far, and what they moved in total.
    pub fn total(&self) -> (u64, &RequestReport) {
        (self.requests, &self.total)
    }

    /// Reads what the host has of a request, and stores the rest.
    ///
    /// # Errors
    /// The host went away, refused a block for good, or stayed full during many requests.
    pub fn request(&mut self, request: &Request, class: u16) -> Result<RequestReport, Error> {
        let mut keys = std::mem::take(&mut self.keys);
        self.fill_keys(request, &mut keys);
        let mut report = RequestReport { block_references: keys.len() as u64, ..RequestReport::default() };
        let served = self.serve(&keys, class, &mut report);
        self.keys = keys;
        // What was moved counts, even if the rest failed.
        self.total += &report;
        let full = served.map_err(|source| Error::Host { done: self.progress(), source })?;
        self.requests += 1;
        let starved = report.blocks_refused > 0 && report.blocks_put == 0;
        self.starved_requests = if starved { self.starved_requests + 1 } else { 0 };
        match full {
            Some(source) if self.starved_requests >= MAX_STARVED_REQUESTS => {
                Err(Error::Full { done: self.progress(), source })
            }
            _ => Ok(report),
        }
    }

    /// Serves a request. Returns the refusal of a block for which there was no room, if there was one.
    fn serve(
        &mut self,
        keys: &[BlockKey],
        class: u16,
        report: &mut RequestReport,
    ) -> Result<Option<ClientError>, ClientError> {
        let failures = self.client.checksum_failures();
        let read = self.read(keys, class, report);
        report.checksum_failures = self.client.checksum_failures() - failures;
        read?;
        self.write(keys, class, report)
    }

    fn read(&mut self, keys: &[BlockKey], class: u16, report: &mut RequestReport) -> Result<(), ClientError> {
        for batch in keys.chunks(self.batch_blocks()) {
            let hits = self.read_batch(batch, class, report)?;
            report.prefix_hits += hits as u64;
            if hits < batch.len() {
                break;
            }
        }
        Ok(())
    }

    /// Reads and checks the resident blocks of a batch. Returns how many of its leading blocks are resident.
    fn read_batch(
        &mut self,
        keys: &[BlockKey],
        class: u16,
        report: &mut RequestReport,
    ) -> Result<usize, ClientError> {
        let blocks = self.client.get(keys, class)?;
        let mut leading = None;
        for (at, (&key, block)) in keys.iter().zip(&blocks).enumerate() {
            let Some(block) = block else {
                leading.get_or_insert(at);
                continue;
            };
            // If the lease ran out meanwhile, the comparison is void and the block is a miss.
            let wrong =
                block.bytes().map(|bytes| differing_bytes(key, &bytes.to_vec(), self.block_bytes as usize));
            match wrong.and_then(|wrong| block.bytes().map(|bytes| (wrong, bytes.len() as u64))) {
                Ok((wrong, len)) => {
                    report.bytes_read += len;
                    report.wrong_bytes += wrong;
                    report.bytes_verified += if wrong == 0 { len } else { 0 };
                }
                Err(ClientError::LeaseExpired { .. }) => {
                    leading.get_or_insert(at);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(leading.unwrap_or(keys.len()))
    }

    /// Stores everything behind the prefix hits; a block that is already resident there counts as used.
    fn write(
        &mut self,
        keys: &[BlockKey],
        class: u16,
        report: &mut RequestReport,
    ) -> Result<Option<ClientError>, ClientError> {
        let first = report.prefix_hits as usize;
        let metas: Vec<BlockMeta> = (first..keys.len())
            .map(|at| BlockMeta {
                parent: at.checked_sub(1).map(|before| keys[before]),
                depth: at as u32,
                class,
                ..BlockMeta::single(keys[at], self.block_bytes)
            })
            .collect();
        for (at, batch) in metas.chunks(self.batch_blocks()).enumerate() {
            let (refused, error) = self.write_batch(batch, report)?;
            if error.is_some() {
                // Blocks behind one that is missing would never be found.
                let behind = metas.len() - at * self.batch_blocks() - batch.len();
                report.blocks_refused += (refused + behind) as u64;
                return Ok(error);
            }
        }
        Ok(None)
    }

    /// Stores a batch and tries again what the host had no room for. Returns what is left in the end, and why.
    fn write_batch(
        &mut self,
        metas: &[BlockMeta],
        report: &mut RequestReport,
    ) -> Result<(usize, Option<ClientError>), ClientError> {
        let mut left = metas.to_vec();
        for attempt in 0..=RETRIES {
            let refusal;
            (left, refusal) = self.write_once(&left, report)?;
            if attempt == RETRIES || left.is_empty() {
                return Ok((left.len(), refusal));
            }
            report.retries += 1;
            std::thread::sleep(PAUSE * 2u32.pow(attempt));
        }
        unreachable!("the last attempt returns")
    }

    fn write_once(
        &mut self,
        metas: &[BlockMeta],
        report: &mut RequestReport,
    ) -> Result<(Vec<BlockMeta>, Option<ClientError>), ClientError> {
        let size = self.block_bytes as usize;
        let buffer = sized(&mut self.buffer, size * metas.len());
        let mut blocks = Vec::with_capacity(metas.len());
        for (meta, bytes) in metas.iter().zip(buffer.chunks_exact_mut(size)) {
            content::fill(meta.key, bytes);
            blocks.push((*meta, &*bytes));
        }
        let (mut left, mut refusal) = (Vec::new(), None);
        for (meta, put) in metas.iter().zip(self.client.put_batch(&blocks)?) {
            match put {
                Ok(Put::Stored) => {
                    report.blocks_put += 1;
                    report.bytes_put += u64::from(meta.size);
                }
                Ok(Put::AlreadyStored | Put::InProgress) => {}
                Err(error) if error.retryable() => {
                    left.push(*meta);
                    refusal.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        Ok((left, refusal))
    }

    fn batch_blocks(&self) -> usize {
        (BATCH_BYTES / self.block_bytes as usize).clamp(1, BATCH_BLOCKS)
    }

    fn progress(&self) -> Progress {
        let RequestReport { blocks_put, bytes_read, .. } = self.total;
        Progress { requests: self.requests, blocks_put, bytes_read }
    }
}

/// When requests are sent.
pub enum Pace<'a> {
    /// Each one as soon as the previous one is done.
    Unpaced,
    /// At the times of the trace, this many times as fast; still one after the other, so a host that is too
    /// slow makes them late. Finite and positive.
    Speed(f64),
    /// Each one as soon as the previous one is done, once the host's clock was told how long after the first it came.
    HostClock(&'a mut dyn FnMut(Duration) -> Result<(), ControlError>),
}

impl Pace<'_> {
    /// Returns when a request may be sent that came that long after the first, in a replay that began at `start`.
    ///
    /// # Errors
    /// The host's clock did not move.
    fn wait(&mut self, after_first: Duration, start: Instant) -> Result<(), ControlError> {
        match self {
            Self::Unpaced => Ok(()),
            Self::Speed(speed) => {
                std::thread::sleep(due(after_first, *speed).saturating_sub(start.elapsed()));
                Ok(())
            }
            Self::HostClock(move_to) => move_to(after_first),
        }
    }
}

/// When a request is due that came that long after the first, at that many times the speed.
fn due(after_first: Duration, speed: f64) -> Duration {
    Duration::try_from_secs_f64(after_first.as_secs_f64() / speed).unwrap_or(Duration::MAX)
}

/// Sends the requests of a trace with blocks of `block_size_tokens` in order; the caller fills in the names in the report.
///
/// # Errors
/// The trace cannot be read, the host's clock did not move, or as [`Session::request`].
pub fn replay(
    session: &mut Session,
    requests: impl IntoIterator<Item = Result<Request, trace::Error>>,
    block_size_tokens: u32,
    mut pace: Pace<'_>,
) -> Result<Report, Error> {
    let mut classes = Classes::default().of_blocks(block_size_tokens);
    let (mut chains, mut path) = (Chains::default(), Vec::new());
    let (start, mut first_us) = (Instant::now(), None);
    for request in requests {
        let request = request?;
        let first_us = *first_us.get_or_insert(request.time_us);
        let after_first = Duration::from_micros(request.time_us.saturating_sub(first_us));
        let ready = pace.wait(after_first, start);
        ready.map_err(|source| Error::Clock { done: session.progress(), source })?;
        chains.walk_of(request.tenant, &request.blocks, &mut path)?;
        let class = classes.assign(&request, &path);
        session.request(&request, class)?;
    }
    let (requests, moved) = session.total();
    let percent = 100.0 * moved.prefix_hits as f64 / moved.block_references.max(1) as f64;
    Ok(Report {
        mode: "store",
        trace: String::new(),
        host: String::new(),
        block_bytes: session.block_bytes,
        requests,
        hit_rate_percent: (percent * 1e4).round() / 1e4,
        moved: moved.clone(),
        seconds: start.elapsed().as_secs_f64(),
    })
}

/// The first `len` bytes of a buffer that only grows.
fn sized(buffer: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if buffer.len() < len {
        buffer.resize(len, 0);
    }
    &mut buffer[..len]
}

/// How many bytes of the block named `key` are not as they were stored. In a block of another length, missing and
/// surplus bytes count as well.
fn differing_bytes(key: BlockKey, found: &[u8], expected_len: usize) -> u64 {
    if found.len() == expected_len && content::matches(key, found) {
        return 0;
    }
    let mut expected = vec![0; expected_len];
    content::fill(key, &mut expected);
    let differ = found.iter().zip(&expected).filter(|(found, expected)| found != expected).count();
    (differ + found.len().abs_diff(expected_len)) as u64
}

#[cfg(test)]
mod tests;
