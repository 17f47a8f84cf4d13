//! The side that is asked: one thread per connection of a peer.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Shared;
use super::copies::FACTS_MAX;
use super::counts::add;
use super::link::Link;
use super::message::{self, FrameError, Loan, Reply, Request, Since, Welcome};
use super::rails::Rail;
use super::table::Fact;
use kvasir_net::transport::tcp::greet;
use kvasir_net::transport::tcp::socket::{Deadlined, Socket};
use kvasir_os::net::{TcpListener, TcpStream};
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::{BlockKey, BlockMeta};
use kvasir_protocol::listener::{Limits, Listener, Seat};
use kvasir_store::dram::{self, Lookup, OwnerId};

/// How long a peer that listens waits for news before it is told that there are none.
pub(super) const HOLD: Duration = Duration::from_millis(150);
/// How long a handshake, and the rest of a frame that has begun, may take.
const STALL: Duration = Duration::from_secs(2);
/// A connection on which nothing is asked for this long is closed; the peer connects again when it needs one.
const IDLE: Duration = Duration::from_secs(120);
/// Handshakes included. Each peer has about ten.
const CONNECTIONS_MAX: usize = 1024;

impl Shared {
    /// Answers peers that connect to `door`.
    pub(super) fn answer_peers(self: &Arc<Self>, door: TcpListener) -> io::Result<Listener> {
        let (serving, refusing) = (Arc::clone(self), Arc::clone(self));
        let serve = move |stream, seat: &Seat| {
            if serving.serve(stream, seat).is_none() {
                add(&serving.counts.strangers, 1);
            }
        };
        let refuse = move |_| add(&refusing.counts.strangers, 1);
        Listener::start(door, "kvasir-peer", Limits::of(CONNECTIONS_MAX), serve, refuse)
    }

    /// Answers until the connection ends. Returns `None` if it was not a peer's.
    fn serve(&self, stream: TcpStream, seat: &Seat) -> Option<()> {
        let soon = || Instant::now() + STALL;
        let (socket, name) =
            greet::accept(stream, self.config.tls.as_ref(), &self.ways.node, "", soon()).ok()?;
        let mut stream = Deadlined { socket: &socket, deadline: soon() };
        let hello = message::read(&mut stream).ok()?;
        let link = self.links.iter().find(|link| link.config.name == name);
        let link = match (link, hello) {
            (Some(link), Request::Hello { cluster }) if cluster == self.config.cluster => link,
            (None, _) => {
                let reason = format!("host {name} is not in its cluster.peers");
                let _ = message::write(&mut stream, &Reply::Refused { reason });
                return None;
            }
            _ => {
                let reason = format!("it belongs to cluster {}", self.config.cluster);
                let _ = message::write(&mut stream, &Reply::Refused { reason });
                return None;
            }
        };
        seat.greeted();
        message::write(&mut stream, &Reply::Welcome(self.welcome())).ok()?;
        let mut answering = Answering { shared: self, link, rest: VecDeque::new(), after: 0 };
        while !self.is_stopping() {
            if answering.serve_one(&socket).is_err() {
                break;
            }
        }
        Some(())
    }

    fn welcome(&self) -> Welcome {
        let found = self.ways.whereabouts.now();
        let rail = |rail: &Rail| (rail.kind.name().to_owned(), rail.address());
        Welcome {
            rails: self.ways.rails.iter().map(rail).collect(),
            matrix: found.json.clone(),
            nics: found.nics.clone(),
            machine: found.machine.clone(),
            revision: found.revision,
            data: self.data.get().map(ToString::to_string).unwrap_or_default(),
        }
    }

    /// Blocks of `keys` that this host holds, in place for `owner` until their leases end or are given back.
    pub(super) fn lend(&self, owner: OwnerId, keys: &[BlockKey]) -> Vec<Option<Loan>> {
        let Some(tiering) = self.tiering() else { return vec![None; keys.len()] };
        let lookups = tiering.get_here(owner, keys, self.clock.now_ms()).unwrap_or_default();
        let stats = self.store.stat(keys).unwrap_or_default();
        let now = self.clock.now_ms();
        let loan = |(lookup, stat): (Lookup, Option<dram::BlockStat>)| {
            let Lookup::Hit(lease) = lookup else { return None };
            let Some(stat) = stat.filter(|stat| stat.slot == lease.slot) else {
                // It was removed between the two looks.
                let _ = self.store.release(owner, &[lease.id]);
                return None;
            };
            let dram::BlockStat { key, parent, depth, class, tenant, .. } = stat;
            let (size, checksum, offset) = (lease.size, lease.checksum, lease.offset);
            // At least one: 0 would mean for ever.
            let left = |at: u64| u32::try_from(at.saturating_sub(now)).unwrap_or(u32::MAX).max(1);
            let ttl_ms = stat.expires_ms.map_or(0, left);
            let meta = BlockMeta { key, parent, depth, class, tenant, ttl_ms, size };
            Some(Loan { meta, checksum, offset, lease: lease.id })
        };
        let mut loans: Vec<_> = lookups.into_iter().zip(stats).map(loan).collect();
        loans.resize(keys.len(), None);
        loans
    }

    /// For how long what is lent stays in place.
    pub(super) fn lease_ms(&self) -> u64 {
        self.store.config().lease_ttl.as_millis() as u64
    }
}

/// One connection of a peer.
struct Answering<'a> {
    shared: &'a Shared,
    link: &'a Link,
    /// The part of all that is known and held here that it has not heard yet, and the number of the news that come after.
    rest: VecDeque<Fact>,
    after: u64,
}

impl Answering<'_> {
    fn serve_one(&mut self, socket: &Socket) -> Result<(), FrameError> {
        // A frame that has begun must not take as long as an idle connection may.
        let mut stream = Deadlined { socket, deadline: Instant::now() + IDLE };
        let mut first = [0];
        stream.read_exact(&mut first)?;
        stream.deadline = Instant::now() + STALL;
        let request: Request = message::read(&mut first.chain(&mut stream))?;
        if !request.is_sane() {
            let reason = "a batch holds at most 4,096 items".to_owned();
            return message::write(&mut stream, &Reply::Refused { reason });
        }
        // A caller that only waits for news does not count as load.
        let work = u64::from(!matches!(request, Request::Watch { .. }));
        self.shared.serving.fetch_add(work, Ordering::Relaxed);
        let reply = self.answer(request);
        self.shared.serving.fetch_sub(work, Ordering::Relaxed);
        stream.deadline = Instant::now() + STALL;
        message::write(&mut stream, &reply)
    }

    fn answer(&mut self, request: Request) -> Reply {
        let shared = self.shared;
        match request {
            Request::Describe => Reply::Welcome(shared.welcome()),
            Request::Hello { .. } => Reply::Refused { reason: "one hello is enough".to_owned() },
            Request::Watch { since } => self.news(since),
            Request::Lend { keys, release } => {
                // A lease that ended on its way back does no harm.
                let _ = shared.store.release(self.link.owner, &release);
                let loans = shared.lend(self.link.owner, &keys);
                add(&shared.counts.lent, loans.iter().flatten().count() as u64);
                Reply::Lent { loans, lease_ms: shared.lease_ms() }
            }
            Request::Copy { items, lease_ms } => {
                let outcomes = shared.take_in(self.link, &items, lease_ms);
                Reply::Copied { outcomes }
            }
            Request::Has { keys } => Reply::Has { held: shared.has_here(&keys) },
            Request::Remove { keys, at } => {
                let (removed, later) = shared.remove_here(&keys, at);
                Reply::Removed { removed, later }
            }
            Request::Open { id, keep, layers, blocks, put_after, now } => {
                // A removal of what comes is later than its put, though this host's clock may be behind.
                shared.heard(now);
                let blocks = blocks.into_iter().zip(put_after).collect();
                shared.receiving.open(self.link, id, keep, layers, blocks)
            }
            Request::Settle { id, checksums } => shared.receiving.settle(self.link, id, &checksums),
            Request::GiveUp { id, reason } => {
                let own = &self.link.config.name;
                shared.receiving.end(&reason, |other, from| other == id && from == own);
                Reply::GivenUp
            }
        }
    }

    fn news(&mut self, since: Since) -> Reply {
        let mut reset = false;
        let (facts, next) = match since {
            Since::Rest => self.some_of_all(),
            Since::At(from) => match self.shared.copies.news(from, HOLD) {
                Some(facts) => {
                    let next = from + facts.len() as u64;
                    (facts, Since::At(next))
                }
                // It fell behind further than the log reaches.
                None => {
                    reset = true;
                    self.all()
                }
            },
            Since::Start => {
                reset = true;
                self.all()
            }
        };
        Reply::News { reset, facts, next, status: self.shared.status() }
    }

    fn all(&mut self) -> (Vec<Fact>, Since) {
        let (facts, after) = self.shared.table().all();
        (self.rest, self.after) = (facts.into(), after);
        self.some_of_all()
    }

    fn some_of_all(&mut self) -> (Vec<Fact>, Since) {
        let count = self.rest.len().min(FACTS_MAX);
        let facts = self.rest.drain(..count).collect();
        (facts, if self.rest.is_empty() { Since::At(self.after) } else { Since::Rest })
    }
}
