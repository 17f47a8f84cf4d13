//! A host whose clients and peers are faulty: stopped, killed, lying or only noisy.
//!
//! After each attack the same is asked ([`Peace`]): no committed block of others has changed, their leases stand, the host
//! has no more memory, descriptors or threads than before, and the next honest call is served.

mod garbage;
mod leases;
mod slots;
mod slow;
mod stopped;

use crate::process::{Host, Transport, content};
use crate::replicas::until;
use kvasir_client::data::{Block, Client, ClientError};
use kvasir_dataplane::memory::host::Mapping;
use kvasir_dataplane::stream::receive_with_fds;
use kvasir_dataplane::wire::{Found, HEADER_LEN, Header, Outcome, Placed, Reply, Request, VERSIONS};
use kvasir_dataplane::{BlockKey, BlockMeta};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

const BLOCK: u32 = 64 << 10;
/// Blocks of others that lie in the pool during an attack.
const OTHERS: u32 = 8;

fn key(n: u32) -> BlockKey {
    BlockKey::from_engine_hash("harm", &n.to_le_bytes())
}

fn meta(n: u32) -> BlockMeta {
    BlockMeta::single(key(n), BLOCK)
}

/// Puts as often as it takes: where reservations last two seconds, a busy machine may end one that is being filled.
fn in_time(mut put: impl FnMut() -> Result<(), ClientError>) {
    while let Err(error) = put() {
        assert!(matches!(error, ClientError::Block { outcome: Outcome::Aborted, .. }), "{error}");
    }
}

/// What a process takes of the machine.
#[derive(Clone, Copy, Debug)]
struct Vitals {
    resident_kib: u64,
    descriptors: usize,
    threads: u64,
}

impl Vitals {
    /// More than before that is not called a leak: what the allocator keeps, the connection that asks.
    const MARGIN: Self = Self { resident_kib: 24 << 10, descriptors: 6, threads: 6 };

    fn of(pid: u32) -> Self {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
        };
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
        Self { resident_kib: field("VmRSS:"), descriptors, threads: field("Threads:") }
    }

    fn is_back(self, before: Self) -> bool {
        self.resident_kib <= before.resident_kib + Self::MARGIN.resident_kib
            && self.descriptors <= before.descriptors + Self::MARGIN.descriptors
            && self.threads <= before.threads + Self::MARGIN.threads
    }
}

/// A host with blocks of others, half of which somebody reads in place throughout.
struct Peace<'a> {
    host: &'a Host,
    client: Client,
    read: Vec<Option<Block>>,
    before: Vitals,
}

impl<'a> Peace<'a> {
    fn new(host: &'a Host) -> Self {
        // The pool's pages become resident once and stay; that is no leak.
        let client = host.client(Transport::Unix);
        for first in (1_000..1_064).step_by(8) {
            let blocks: Vec<_> = (first..first + 8).map(|n| content(n, BLOCK)).collect();
            let batch: Vec<_> = (first..).map(meta).zip(blocks.iter().map(|block| &block[..])).collect();
            in_time(|| client.put_batch(&batch).unwrap().into_iter().try_for_each(|done| done.map(drop)));
        }
        for n in 0..OTHERS {
            in_time(|| client.put(&meta(n), &content(n, BLOCK)).map(drop));
        }
        let read = client.get(&(0..OTHERS / 2).map(key).collect::<Vec<_>>(), 0).unwrap();
        assert!(read.iter().all(Option::is_some));
        drop(host.page("/metrics"));
        drop(host.client(Transport::Tcp).exists(&[key(0)]).unwrap());
        Self { host, client, read, before: Vitals::of(host.pid()) }
    }

    /// What must hold after every attack.
    fn holds(&self, after: &str) {
        for (n, block) in (0..).zip(&self.read) {
            let bytes = block.as_ref().unwrap().bytes().unwrap_or_else(|error| panic!("{after}: {error}"));
            assert!(bytes == content(n, BLOCK), "block {n}, which is being read, changed: {after}");
        }
        let all: Vec<_> = (0..OTHERS).map(key).collect();
        for (n, block) in (0..OTHERS).zip(self.client.get(&all, 0).unwrap()) {
            // Nobody holds the second half: it may be evicted, but never changed.
            let Some(block) = block else {
                assert!(n >= OTHERS / 2, "block {n} is gone, though it is being read: {after}");
                continue;
            };
            assert!(block.bytes().unwrap() == content(n, BLOCK), "block {n} changed: {after}");
        }
        assert_eq!(self.client.checksum_failures(), 0, "{after}");
        for transport in [Transport::Unix, Transport::Tcp] {
            // The places of those that have just gone are free a moment later.
            let mut honest = None;
            until("an honest client gets in", || {
                honest = self.host.try_client(transport).ok();
                honest.is_some()
            });
            let honest = honest.unwrap();
            // On a busy machine the evictor may take longer to make room than a put waits.
            until("an honest put is taken", || honest.put(&meta(500), &content(500, BLOCK)).is_ok());
            let found = honest.get(&[key(500)], 0).unwrap().remove(0).unwrap();
            assert!(found.bytes().unwrap() == content(500, BLOCK), "{after}");
        }
        until(&format!("no more memory, descriptors, threads than {:?}: {after}", self.before), || {
            Vitals::of(self.host.pid()).is_back(self.before)
        });
    }
}

/// A client that says what it likes: the frames are the real ones, the conduct is not.
struct Raw {
    stream: UnixStream,
    pool: Option<Mapping>,
    ring: Option<OwnedFd>,
    next: u64,
}

impl Raw {
    /// Says hello over the host's socket, and maps the pool.
    fn connect(socket: &str, wants_ring: bool) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut raw = Self { stream, pool: None, ring: None, next: 1 };
        let hello = hello(wants_ring, "");
        let (reply, fds) = raw.call_with_fds(&hello).unwrap();
        let Reply::Hello { pool_bytes, .. } = reply else { panic!("{reply:?}") };
        let mut fds = fds.into_iter();
        raw.pool = fds.next().map(|fd| Mapping::new(fd.as_fd(), pool_bytes, true).unwrap());
        raw.ring = fds.next();
        raw
    }

    fn call(&mut self, request: &Request) -> io::Result<Reply> {
        self.call_with_fds(request).map(|(reply, _)| reply)
    }

    fn call_with_fds(&mut self, request: &Request) -> io::Result<(Reply, Vec<OwnedFd>)> {
        let mut frame = Vec::new();
        request.encode(self.next, 0, &mut frame);
        self.next += 1;
        self.stream.write_all(&frame)?;
        let mut header = [0; HEADER_LEN];
        let fds = receive_with_fds(&mut self.stream, &mut header)?;
        let header = Header::decode(&header).map_err(io::Error::other)?;
        let mut body = vec![0; header.body_len as usize];
        self.stream.read_exact(&mut body)?;
        Ok((Reply::decode(header.op, &body).map_err(io::Error::other)?, fds))
    }

    /// Reservation and offset of a place for the block.
    fn reserve(&mut self, n: u32) -> Option<(u64, u64)> {
        match self.call(&Request::Reserve(vec![meta(n)])).unwrap() {
            Reply::Reserve(placed) => match placed[0] {
                Placed::At { reservation, offset } => Some((reservation, offset)),
                Placed::Not(_) => None,
            },
            other => panic!("{other:?}"),
        }
    }

    fn lease(&mut self, n: u32) -> Option<u64> {
        match self.call(&Request::Get { class: 0, release: vec![], keys: vec![key(n)] }).unwrap() {
            Reply::Get(found) => match found[0] {
                Found::Hit { lease, .. } => Some(lease),
                Found::Not(_) => None,
            },
            other => panic!("{other:?}"),
        }
    }

    fn outcomes(&mut self, request: &Request) -> Vec<Outcome> {
        match self.call(request).unwrap() {
            Reply::Outcomes(_, outcomes) => outcomes,
            other => panic!("{other:?}"),
        }
    }

    fn pool(&self) -> &Mapping {
        self.pool.as_ref().unwrap()
    }
}

fn hello(wants_ring: bool, token: &str) -> Request {
    Request::Hello {
        versions: VERSIONS,
        wants_write: true,
        wants_ring,
        tenant: 0,
        namespace: "harm".to_owned(),
        token: token.to_owned(),
    }
}
