//! One connection: reads requests, has the store answer them, and replies.

use std::io::{self, BufRead, BufReader, Read as _};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::access::{Act, Identity, Refused, Role, Shown, required};
use super::handover::HandOvers;
use super::outcome::{describe, ended, evicted, found, outcome, pinned, place, removed, verified};
use super::{Call, Entry, Node, Shared};
use crate::ServerConfig;
use kvasir_memory::host::HostPool;
use kvasir_memory::shared::{self, Place};
use kvasir_os::planted::{self, Bug};
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::{BlockKey, BlockMeta};
use kvasir_protocol::listener::Seat;
use kvasir_protocol::stream::ring::{self, Ring, Side};
use kvasir_protocol::stream::{Eager, Stream, Timed, send_with_fds};
use kvasir_protocol::wire::{
    Found, HEADER_LEN, Header, Op, Outcome, Placed, Reply, Request, VERSIONS, WireError, agree,
};
use kvasir_store::departures;
use kvasir_store::dram::{Held, OwnerId, Reserve};
use kvasir_store::error::StoreError;
use kvasir_store::tiering::Read;

const REVOKED: &str = "the token or certificate of this connection was revoked or has expired; connect again with another (`kvasir token new`)";

const NOT_IN_PLACE: &str = "blocks are filled and read in place over the Unix socket only, by the user of the host and those to whom its operator \
     gave `in_place` under [[access.allow]]";

/// How long to wait for a client to hang up before looking whether the host stops.
const HANG_UP: Duration = Duration::from_millis(200);

/// Why a connection ended, other than by the peer closing it between frames.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Wire(#[from] WireError),
    #[error("{0}")]
    Rule(&'static str),
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Broken {
    /// Whether the peer has closed the connection, in the middle of a frame.
    fn is_end(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        matches!(self, Self::Io(error) if matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof))
    }
}

pub(super) struct Connection<'a> {
    shared: Arc<Shared>,
    reader: BufReader<Timed>,
    writer: Option<Stream>,
    /// From the hello on, one of its caller's.
    owner: OwnerId,
    /// Known before the first request is served: over TCP, once the hello has brought a token.
    identity: Option<Identity>,
    /// `unix`, or the address of the client.
    from: String,
    /// What the rest of the server knows of it.
    entry: Arc<Entry>,
    seat: &'a Seat,
    /// The tenant on whose account it stores.
    tenant: u16,
    /// The peer maps the pool.
    local: bool,
    greeted: bool,
    may_write: bool,
    /// The peer closed the connection: it is gone, or done.
    peer_left: bool,
    /// When the last request was answered, or the connection began.
    silent_since: Instant,
    hand_overs: HandOvers,
    body: Vec<u8>,
    frame: Vec<u8>,
}

impl<'a> Connection<'a> {
    pub(super) fn new(
        shared: Arc<Shared>,
        stream: Stream,
        identity: Option<Identity>,
        entry: Arc<Entry>,
        seat: &'a Seat,
    ) -> Self {
        let in_place = identity.as_ref().is_some_and(|identity| identity.in_place);
        let local = in_place && matches!(stream, Stream::Unix(_));
        Self {
            owner: shared.node.enter(local),
            from: stream.peer_addr().map_or("unix".to_owned(), |addr| addr.to_string()),
            local,
            writer: stream.try_clone().ok(),
            reader: BufReader::with_capacity(16 << 10, Timed { stream: Eager::new(stream), deadline: None }),
            identity,
            entry,
            seat,
            tenant: 0,
            greeted: false,
            may_write: false,
            peer_left: false,
            silent_since: Instant::now(),
            hand_overs: HandOvers::default(),
            body: Vec::new(),
            frame: Vec::new(),
            shared,
        }
    }

    pub(super) fn run(&mut self) {
        let mut request = 0;
        let ended = loop {
            match self.serve_one(&mut request) {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(broken) => break Err(broken),
            }
        };
        self.hand_overs.end();
        if let Err(broken) = &ended {
            if !self.shared.stopping.load(Ordering::SeqCst) {
                self.shared.counts.broken.fetch_add(1, Ordering::Relaxed);
            }
            let error = Reply::Error { retryable: false, message: broken.to_string() };
            // Best effort: the peer may be what is broken. One whose TLS failed has been told so by TLS, and cannot read this.
            if !matches!(&broken, Broken::Io(error) if error.kind() == io::ErrorKind::InvalidData) {
                let _ = self.reply(request, &error);
            }
        }
        let is_gone = self.peer_left || ended.is_err_and(|broken| broken.is_end()) || self.wait_for_hang_up();
        self.shared.node.leave(self.owner, is_gone);
        self.reader.get_ref().stream.stream.shutdown();
    }

    /// A client that this host has done with may be in the middle of a write, and not know it yet: its places go to nobody
    /// before it hangs up. Returns whether it did.
    fn wait_for_hang_up(&self) -> bool {
        let stream = &self.reader.get_ref().stream.stream;
        let stopping = || self.shared.stopping.load(Ordering::SeqCst);
        while self.local && self.shared.node.store().is_filling(self.owner) && !stopping() {
            if stream.waits_for_hang_up(HANG_UP) {
                return true;
            }
        }
        false
    }

    /// Serves one frame. Returns false when the peer closed the connection or was silent for too long, and when the host stops.
    fn serve_one(&mut self, request: &mut u64) -> Result<bool, Broken> {
        let more = self.wait_for_frame();
        if self.entry.ended.load(Ordering::Relaxed) {
            return Err(Refused(REVOKED.to_owned()).into());
        }
        // A client that never pauses is never waited for, so the end of its socket alone might not be seen.
        if !more? || self.shared.stopping.load(Ordering::SeqCst) {
            return Ok(false);
        }
        let began = Instant::now();
        self.reader.get_mut().deadline = Some(began + self.shared.config.stall_timeout);
        let mut header = [0; HEADER_LEN];
        self.reader.read_exact(&mut header)?;
        let header = Header::decode(&header)?;
        *request = header.request;
        if header.reply {
            return Err(Broken::Rule("a client sends requests, not replies"));
        }
        self.body.resize(header.body_len as usize, 0);
        self.reader.read_exact(&mut self.body)?;
        let mut call = Request::decode(header.op, &self.body)?;
        if !planted::is(Bug::TakesTenantsAtTheirWord) {
            call.belong_to(self.tenant);
        }
        self.shared.counts.requests.fetch_add(1, Ordering::Relaxed);
        self.check(&call, header.payload_len)?;
        let served = Call::of(call.op());
        self.serve(header, call)?;
        self.silent_since = Instant::now();
        self.shared.counts.times[served as usize].record(self.silent_since.duration_since(began));
        Ok(true)
    }

    fn wait_for_frame(&mut self) -> Result<bool, Broken> {
        self.reader.get_mut().deadline = None;
        loop {
            match self.reader.fill_buf() {
                Ok(bytes) => {
                    self.peer_left = bytes.is_empty();
                    return Ok(!self.peer_left);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_timeout(&error) => {
                    // A client that stopped in the middle of a write is not let go: its places would go to others.
                    let idle = self.silent_since.elapsed() >= self.shared.config.idle_timeout
                        && !self.shared.node.store().is_filling(self.owner);
                    // A caller that never said who it is has no claim to a place.
                    let idle = idle || !self.greeted;
                    if idle || self.shared.stopping.load(Ordering::SeqCst) {
                        return Ok(false);
                    }
                }
                // A client that was killed did not break the protocol.
                Err(error) if is_end(&error) => {
                    self.peer_left = true;
                    return Ok(false);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn check(&self, call: &Request, payload_len: u64) -> Result<(), Broken> {
        let op = call.op();
        if self.greeted == (op == Op::Hello) {
            return Err(Broken::Rule("a connection starts with one hello"));
        }
        // Over TCP, the token in the hello says who calls.
        if let (Some(role), Some(identity)) = (required(op), &self.identity) {
            let allowed = identity.may(role, op.name());
            if let (Role::Operator, Err(refused)) = (role, &allowed) {
                self.note(op, "", &refused.to_string(), true);
            }
            allowed?;
        }
        let writes = matches!(
            op,
            Op::Put
                | Op::Reserve
                | Op::Commit
                | Op::Abort
                | Op::Remove
                | Op::Pin
                | Op::Unpin
                | Op::Evict
                | Op::Replicate
                | Op::HandOver
        );
        if writes && !self.may_write {
            return Err(Broken::Rule("this connection did not ask to write in its hello"));
        }
        let in_place =
            matches!(op, Op::Reserve | Op::Commit | Op::Abort | Op::Release | Op::HandOver | Op::Arrivals);
        if in_place && !self.local {
            return Err(Broken::Rule(NOT_IN_PLACE));
        }
        let expected = match call {
            Request::Put(blocks) => blocks.iter().map(|(meta, _)| u64::from(meta.size)).sum(),
            _ => 0,
        };
        if payload_len != expected {
            return Err(Broken::Rule("the payload is not as long as its blocks"));
        }
        if payload_len > self.shared.config.payload_max {
            return Err(Broken::Rule("the payload is above this host's limit; send smaller batches"));
        }
        Ok(())
    }

    fn serve(&mut self, header: Header, call: Request) -> Result<(), Broken> {
        let (shared, owner) = (Arc::clone(&self.shared), self.owner);
        let node: &Node = &shared.node;
        let op = call.op();
        let outcomes = |list| Reply::Outcomes(op, list);
        let reply = match call {
            Request::Hello { versions, wants_write, wants_ring, tenant, token, .. } => {
                let identity = match self.identity.take() {
                    Some(identity) => identity,
                    None => {
                        let certificate = match &self.writer {
                            Some(Stream::Sealed(sealed)) => sealed.certificate(),
                            _ => None,
                        };
                        let certificate = certificate.filter(|_| token.is_empty());
                        let shown = certificate.map_or(Shown::Token(token), Shown::Certificate);
                        let identity = shared.gate.identify(&shown)?;
                        let _ = self.entry.shown.set((shown, identity.clone()));
                        identity
                    }
                };
                if let Some(role) = required(op) {
                    identity.may(role, op.name())?;
                }
                self.tenant = identity.tenant_for(tenant)?;
                self.owner = owner.of_caller(&identity.name);
                self.identity = Some(identity);
                let version = versions.common(VERSIONS).unwrap_or(VERSIONS.lowest);
                return self.greet((header.request, version), wants_write, wants_ring);
            }
            Request::Get { class, release, keys } if self.local => {
                Reply::Get(node.get(owner, &release, &keys, class)?.iter().map(found).collect())
            }
            Request::Get { class, keys, .. } => return self.send_blocks(header.request, &keys, class),
            Request::Put(blocks) => outcomes(self.receive_blocks(&blocks, header.payload_len)?),
            Request::Exists(keys) => Reply::Exists(node.exists(&keys)?),
            Request::Reserve(blocks) => {
                Reply::Reserve(node.reserve(owner, &blocks)?.iter().map(place).collect())
            }
            Request::Commit(items) => {
                let items: Vec<_> = items.into_iter().map(|(id, checksum)| (id, Some(checksum))).collect();
                outcomes(node.commit(owner, &items)?.iter().map(outcome).collect())
            }
            Request::Abort(ids) => outcomes(node.abort(owner, &ids)?.iter().map(outcome).collect()),
            Request::Release(ids) => outcomes(node.release(owner, &ids)?.iter().map(outcome).collect()),
            Request::Remove(keys) => {
                let removed: Vec<_> = node.remove(&keys)?.into_iter().map(removed).collect();
                self.note_blocks(op, &keys, &removed);
                outcomes(removed)
            }
            Request::Verify(keys) => outcomes(node.verify(&keys)?.into_iter().map(verified).collect()),
            Request::Pin { pin, keys } => {
                outcomes(node.pin(self.tenant, &keys, pin)?.into_iter().map(pinned).collect())
            }
            Request::Unpin(keys) => {
                outcomes(node.unpin(self.tenant, &keys)?.into_iter().map(ended).collect())
            }
            Request::Hold { ms, keys } => {
                let held = node.hold(self.tenant, owner, &keys, ms.into())?;
                outcomes(held.into_iter().map(pinned).collect())
            }
            Request::EndHold(keys) => {
                let outcome = node.end_hold(self.tenant, owner, &keys)?;
                outcomes(outcome.into_iter().map(ended).collect())
            }
            Request::Evict(keys) => {
                let evicted: Vec<_> = node.evict(&keys)?.into_iter().map(evicted).collect();
                self.note_blocks(op, &keys, &evicted);
                outcomes(evicted)
            }
            Request::Replicate { copies, keys } => outcomes(node.replicate(&keys, copies)),
            Request::Place { bytes, copies } => {
                let primary = node.primary(bytes, copies);
                let primary = primary.map(|primary| (primary.name, primary.data.unwrap_or_default()));
                let (node, data) = primary.unwrap_or_default();
                Reply::Place { node, data }
            }
            Request::Removals { since, max } => {
                let departures::Page { next, lost, keys } =
                    node.departed(self.tenant, since, max.max(1) as usize)?;
                let keys = keys.into_iter().map(BlockKey::without_tenant).collect();
                Reply::Removals { next, lost, keys }
            }
            Request::HandOver(call) => self.hand_overs.serve(node, owner, self.tenant, call),
            Request::Stat(keys) => {
                let now = node.now_ms();
                Reply::Stat(node.stat(&keys)?.iter().map(|found| describe(found, now)).collect())
            }
        };
        Ok(self.reply(header.request, &reply)?)
    }

    fn note_blocks(&self, op: Op, keys: &[BlockKey], outcomes: &[Outcome]) {
        let done = outcomes.iter().filter(|&&outcome| outcome == Outcome::Done).count();
        let first = keys.first().map(ToString::to_string).unwrap_or_default();
        let on = match keys.len() {
            0 | 1 => first,
            count => format!("{count} blocks, the first {first}"),
        };
        self.note(op, &on, &format!("done: {done} of {}", keys.len()), false);
    }

    fn note(&self, op: Op, on: &str, outcome: &str, refused: bool) {
        if let Some(Identity { name: who, .. }) = &self.identity {
            self.shared.gate.note(&Act { who, what: op.name(), on, from: &self.from, outcome, refused });
        }
    }

    fn greet(
        &mut self,
        (request, version): (u64, u8),
        wants_write: bool,
        wants_ring: bool,
    ) -> Result<(), Broken> {
        let store = Arc::clone(self.shared.node.store());
        (self.greeted, self.may_write) = (true, wants_write);
        self.seat.greeted();
        // From here on, bytes on the socket are bells. Requests that came too early would be lost among them.
        let early = !self.reader.buffer().is_empty() || self.writer.as_ref().is_some_and(Stream::has_unread);
        if wants_ring && self.local && early {
            return Err(Broken::Rule("a client that wants a ring waits for the answer to its hello"));
        }
        // A host that is short of memory or descriptors goes on without a ring.
        let ring = if wants_ring && self.local { ring::memory().ok() } else { None };
        let reply = Reply::Hello {
            shared: self.local,
            writable: wants_write,
            ring: ring.is_some(),
            boot: self.shared.node.boot(),
            pool_bytes: store.pool().bytes(),
            lease_ms: store.config().lease_ttl.as_millis() as u64,
            reservation_ms: store.config().reservation_ttl.as_millis() as u64,
            payload_max: self.shared.config.payload_max,
        };
        reply.encode(request, 0, &mut self.frame);
        agree(&mut self.frame, version);
        let stream = match &mut self.writer {
            Some(Stream::Unix(stream)) if self.local => stream,
            _ => return Ok(self.send_frame()?),
        };
        let readonly = if wants_write { None } else { Some(store.pool().readonly_fd()?) };
        let pool = readonly.as_ref().map_or_else(|| store.pool().writable_fd(), |fd| fd.as_fd());
        let fds = [Some(pool), ring.as_ref().map(HostPool::writable_fd)];
        send_with_fds(stream, &self.frame, &fds.into_iter().flatten().collect::<Vec<_>>())?;
        if let Some(memory) = ring {
            let ring = Arc::new(Ring::new(memory.writable_fd(), Side::Host, stream.try_clone()?)?);
            self.writer = Some(Stream::Ring(Arc::clone(&ring)));
            self.reader.get_mut().stream = Eager::napping(Stream::Ring(ring));
        }
        Ok(())
    }

    /// Sends what any tier holds of `keys`, as much as one payload holds.
    fn send_blocks(&mut self, request: u64, keys: &[BlockKey], class: u16) -> Result<(), Broken> {
        let shared = Arc::clone(&self.shared);
        let reads = shared.node.read(keys, class, shared.config.payload_max);
        let entries = reads.iter().map(|read| match read {
            Read::Held(Held { size, checksum, .. }) => {
                Found::Hit { offset: 0, size: *size, checksum: *checksum, lease: 0 }
            }
            Read::Onboarded(block) => {
                Found::Hit { offset: 0, size: block.meta.size, checksum: block.checksum, lease: 0 }
            }
            Read::Missing => Found::Not(Outcome::Missing),
            Read::Throttled => Found::Not(Outcome::Throttled),
        });
        let entries = entries.collect();
        let blocks: Vec<shared::Shared<'_>> = reads.iter().filter_map(Read::bytes).collect();
        let total = blocks.iter().map(|bytes| bytes.len() as u64).sum();
        Reply::Get(entries).encode(request, total, &mut self.frame);
        let mut parts: Vec<shared::Shared<'_>> = Vec::with_capacity(blocks.len() + 1);
        parts.push(self.frame[..].into());
        parts.extend(blocks);
        shared.counts.payload_out.fetch_add(total, Ordering::Relaxed);
        let writer = self.writer.as_mut().ok_or(Broken::Rule("connection is closed"))?;
        // The blocks cannot be evicted meanwhile, nor their memory be used for others' loads.
        let deadline = Instant::now() + patience(&shared.config, total);
        writer.write_parts_until(&parts, Some(deadline))?;
        drop(parts);
        // Served first: the reader does not wait for the pool.
        for read in reads {
            if let Read::Onboarded(block) = read {
                shared.node.sent(&block);
            }
        }
        Ok(())
    }

    /// Receives the payload of a put straight into the pool; what finds no place is read and dropped.
    fn receive_blocks(
        &mut self,
        blocks: &[(BlockMeta, u64)],
        payload_len: u64,
    ) -> Result<Vec<Outcome>, Broken> {
        let shared = Arc::clone(&self.shared);
        let (node, patience) = (&shared.node, patience(&shared.config, payload_len));
        let metas: Vec<BlockMeta> = blocks.iter().map(|(meta, _)| *meta).collect();
        let placed = node.reserve(self.owner, &metas)?;
        self.reader.get_mut().deadline = Some(Instant::now() + patience);
        let mut commits = Vec::with_capacity(blocks.len());
        let mut outcomes: Vec<Outcome> = Vec::with_capacity(blocks.len());
        for (at, (outcome, (meta, checksum))) in placed.iter().zip(blocks).enumerate() {
            if let Reserve::Reserved(reservation) = outcome {
                let mut checksum = Some(*checksum);
                match node.receive(self.owner, reservation.id, |place| fill(&mut self.reader, place)) {
                    Ok(Err(_)) if planted::is(Bug::KeepsPutsCutShort) => checksum = None,
                    Ok(received) => received?,
                    // The place was reclaimed before its turn came: the payload is still on the wire.
                    Err(_) => discard(&mut self.reader, meta.size.into())?,
                }
                commits.push((at, (reservation.id, checksum)));
                outcomes.push(Outcome::Done);
            } else {
                discard(&mut self.reader, meta.size.into())?;
                outcomes.push(match place(outcome) {
                    Placed::Not(outcome) => outcome,
                    Placed::At { .. } => Outcome::Internal,
                });
            }
        }
        shared.counts.payload_in.fetch_add(payload_len, Ordering::Relaxed);
        let items: Vec<_> = commits.iter().map(|(_, item)| *item).collect();
        let results = node.commit(self.owner, &items)?;
        for ((at, _), result) in commits.iter().zip(&results) {
            outcomes[*at] = outcome(result);
        }
        Ok(outcomes)
    }

    fn reply(&mut self, request: u64, reply: &Reply) -> io::Result<()> {
        reply.encode(request, 0, &mut self.frame);
        self.send_frame()
    }

    fn send_frame(&mut self) -> io::Result<()> {
        let writer = self.writer.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        writer.write_all(&self.frame)
    }
}

impl Drop for Connection<'_> {
    /// Cleans up what is left if its thread panicked; otherwise nothing is left.
    fn drop(&mut self) {
        self.hand_overs.end();
        self.shared.node.leave(self.owner, false);
    }
}

/// How long a payload may take: a peer must keep up at least 1 MiB/s.
fn patience(config: &ServerConfig, payload_len: u64) -> Duration {
    config.stall_timeout + Duration::from_millis(payload_len >> 10)
}

/// Fills a place, first with what was read ahead.
fn fill(reader: &mut BufReader<Timed>, place: &mut Place<'_>) -> io::Result<()> {
    let ahead = place.copy_in(reader.buffer().into());
    reader.consume(ahead);
    reader.get_mut().fill(place)
}

fn discard(reader: &mut impl io::Read, len: u64) -> io::Result<()> {
    let read = io::copy(&mut reader.take(len), &mut io::sink())?;
    if read == len { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// The other end is gone, in the clear or without a farewell of TLS.
fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof)
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}
