//! A wrapper that makes any transport fail on demand.
//!
//! A script looks at each operation (counted over all endpoints of the wrapper, in order of submission) and says what
//! becomes of it. The rest of the wrapped transport stays as it is, so a test of failure runs against the real thing.

use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{
    Cancel, Capabilities, Completion, Endpoint, Error, Grant, Mapped, Op, OpError, RemoteRange, Sink,
    Transport,
};
use kvasir_memory::region::Region;

/// What becomes of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing: it is carried out.
    None,
    /// It fails and moves nothing.
    Fail,
    /// Only its first bytes are moved, at most this many and never all, then it fails.
    Partial(u64),
    /// It gets stuck until [`Faults::release`] (then it is carried out), its cancellation, or the endpoint's end.
    Delay,
    /// It is lost: as `Delay`, but `release` does not bring it back.
    Drop,
    /// The endpoint breaks: this operation and all later ones find the peer down.
    Break,
}

type Script = Box<dyn FnMut(u64, &Op) -> Fault + Send>;

/// The script, shared by a wrapper and the test that drives it.
pub struct Faults {
    script: Mutex<Script>,
    seen: AtomicU64,
    endpoints: Mutex<Vec<std::sync::Weak<FaultyEndpoint>>>,
}

impl Faults {
    /// `script(n, op)` decides about the `n`-th operation, from 0.
    pub fn new(script: impl FnMut(u64, &Op) -> Fault + Send + 'static) -> Arc<Self> {
        Arc::new(Self {
            script: Mutex::new(Box::new(script)),
            seen: AtomicU64::new(0),
            endpoints: Mutex::default(),
        })
    }

    /// Operations submitted so far.
    pub fn seen(&self) -> u64 {
        self.seen.load(Ordering::Acquire)
    }

    /// Carries out what [`Fault::Delay`] held back.
    pub fn release(&self) {
        let endpoints = self.endpoints.lock().clone();
        endpoints.iter().filter_map(std::sync::Weak::upgrade).for_each(|endpoint| endpoint.release());
    }

    fn decide(&self, op: &Op) -> Fault {
        let mut script = self.script.lock();
        script(self.seen.fetch_add(1, Ordering::AcqRel), op)
    }
}

pub struct FaultyTransport {
    inner: Arc<dyn Transport>,
    faults: Arc<Faults>,
}

impl FaultyTransport {
    pub fn new(inner: Arc<dyn Transport>, faults: Arc<Faults>) -> Self {
        Self { inner, faults }
    }
}

impl Transport for FaultyTransport {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn register(&self, region: &Region) -> Result<(), Error> {
        self.inner.register(region)
    }

    fn unregister(&self, region: &Region) {
        self.inner.unregister(region);
    }

    fn address(&self) -> Option<String> {
        self.inner.address()
    }

    fn connect(&self, address: &str) -> Result<Arc<dyn Endpoint>, Error> {
        let endpoint = Arc::new(FaultyEndpoint {
            inner: self.inner.connect(address)?,
            faults: self.faults.clone(),
            stuck: Mutex::default(),
            broken: AtomicBool::new(false),
        });
        let mut endpoints = self.faults.endpoints.lock();
        endpoints.retain(|endpoint| endpoint.strong_count() > 0);
        endpoints.push(Arc::downgrade(&endpoint));
        Ok(endpoint)
    }

    fn revoked(&self) {
        self.inner.revoked();
    }
}

struct FaultyEndpoint {
    inner: Arc<dyn Endpoint>,
    faults: Arc<Faults>,
    stuck: Mutex<Vec<Stuck>>,
    broken: AtomicBool,
}

struct Stuck {
    op: Op,
    sink: Arc<dyn Sink>,
    lost: bool,
}

impl FaultyEndpoint {
    fn apply(&self, fault: Fault, op: Op, sink: &Arc<dyn Sink>) {
        match fault {
            _ if self.down().is_some() => sink.complete(Completion::failed(op.id, 0, self.peer_down())),
            Fault::None => self.inner.submit(vec![op], sink),
            Fault::Fail => sink.complete(Completion::failed(op.id, 0, OpError::Injected)),
            Fault::Partial(bytes) => self.partly(&op, bytes, sink),
            Fault::Delay | Fault::Drop => self.hold(op, sink, fault == Fault::Drop),
            Fault::Break => {
                self.end();
                sink.complete(Completion::failed(op.id, 0, self.peer_down()));
            }
        }
    }

    fn partly(&self, op: &Op, bytes: u64, sink: &Arc<dyn Sink>) {
        let bytes = bytes.min(op.len().saturating_sub(1));
        if bytes == 0 {
            return sink.complete(Completion::failed(op.id, 0, OpError::Injected));
        }
        let outer = sink.clone();
        let fail = move |inner: Completion| {
            let error = inner.result.err().unwrap_or(OpError::Injected);
            outer.complete(Completion::failed(inner.id, inner.valid_bytes, error));
        };
        self.inner.submit(vec![op.part(0, bytes)], &(Arc::new(fail) as Arc<dyn Sink>));
    }

    fn hold(&self, op: Op, sink: &Arc<dyn Sink>, lost: bool) {
        let mut stuck = self.stuck.lock();
        // Checked under the lock that `end` takes, so that nothing gets stuck after the end.
        if self.broken.load(Ordering::Acquire) {
            drop(stuck);
            return sink.complete(Completion::failed(op.id, 0, self.peer_down()));
        }
        stuck.push(Stuck { op, sink: sink.clone(), lost });
    }

    fn take(&self, wanted: impl Fn(&Stuck) -> bool) -> Vec<Stuck> {
        self.stuck.lock().extract_if(.., |stuck| wanted(stuck)).collect()
    }

    fn release(&self) {
        for Stuck { op, sink, .. } in self.take(|stuck| !stuck.lost) {
            self.inner.submit(vec![op], &sink);
        }
    }

    fn end(&self) {
        self.broken.store(true, Ordering::Release);
        self.inner.close();
        for Stuck { op, sink, .. } in self.take(|_| true) {
            let id = op.id;
            drop(op);
            sink.complete(Completion::failed(id, 0, self.peer_down()));
        }
    }

    fn peer_down(&self) -> OpError {
        let reason = self.down().unwrap_or_default();
        OpError::PeerDown { peer: self.peer().to_owned(), reason }
    }
}

impl Endpoint for FaultyEndpoint {
    fn peer(&self) -> &str {
        self.inner.peer()
    }

    fn open(&self, segment: &str) -> Result<Arc<Grant>, Error> {
        self.inner.open(segment)
    }

    fn submit(&self, ops: Vec<Op>, sink: &Arc<dyn Sink>) {
        for op in ops {
            self.apply(self.faults.decide(&op), op, sink);
        }
    }

    fn cancel(&self, cancel: &Cancel) {
        cancel.set();
        let ours = |stuck: &Stuck| stuck.op.cancel.as_ref().is_some_and(|token| token.is(cancel));
        for Stuck { op, sink, .. } in self.take(ours) {
            sink.complete(Completion::failed(op.id, 0, OpError::Cancelled));
        }
        self.inner.cancel(cancel);
    }

    fn notify(&self, message: &[u8]) -> Result<(), Error> {
        self.inner.notify(message)
    }

    fn map(&self, grant: &Grant, range: RemoteRange) -> Result<Mapped, Error> {
        self.inner.map(grant, range)
    }

    fn down(&self) -> Option<String> {
        let broken = self.broken.load(Ordering::Acquire).then(|| "broken on purpose".to_owned());
        broken.or_else(|| self.inner.down())
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.stuck.lock().len()
    }

    fn close(&self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::transport::loopback::{Loopback, LoopbackNet};
    use crate::transport::node::{Node, Secret};
    use crate::transport::{Access, CompletionQueue, Direction};
    use kvasir_memory::buffer::Buffer;

    #[test]
    fn operations_meet_their_faults() {
        let net = Arc::new(LoopbackNet::default());
        let node = |name: &str| Arc::new(Node::new(name, Secret::new(b"secret"), 1));
        let server_node = node("server");
        let theirs = Region::of_buffer(Buffer::copy_of(&[7; 64]));
        server_node.exports.export("kv", vec![theirs], Access::Read, Duration::from_secs(3600)).unwrap();
        let _server = Loopback::new(net.clone(), server_node);
        let script = [
            Fault::Fail,
            Fault::Partial(20),
            Fault::Delay,
            Fault::Drop,
            Fault::None,
            Fault::Drop,
            Fault::Break,
            Fault::None,
        ];
        let faults = Faults::new(move |n, _| script[n as usize]);
        let client = FaultyTransport::new(Arc::new(Loopback::new(net, node("client"))), faults.clone());
        let endpoint = client.connect("server").unwrap();
        let grant = endpoint.open("kv").unwrap();
        let ours = Region::of_buffer(Buffer::zeroed(64));
        let queue = CompletionQueue::new();
        let cancels: Vec<Cancel> = (0..8).map(|_| Cancel::default()).collect();
        let submit = |ids: std::ops::Range<u64>| {
            let ops = ids.map(|id| Op {
                id,
                direction: Direction::Read,
                grant: grant.clone(),
                local: vec![ours.whole().unwrap()],
                remote: vec![grant.range(0, 64)],
                cancel: Some(cancels[id as usize].clone()),
            });
            endpoint.submit(ops.collect(), &queue.sink());
        };
        let ended = || -> Vec<(u64, u64, Option<OpError>)> {
            let all = queue.wait_many(9, Instant::now());
            all.into_iter().map(|c| (c.id, c.valid_bytes, c.result.err())).collect()
        };
        submit(0..5);
        assert_eq!(
            ended(),
            [(0, 0, Some(OpError::Injected)), (1, 20, Some(OpError::Injected)), (4, 64, None)]
        );
        assert_eq!(endpoint.in_flight(), 2);
        faults.release();
        assert_eq!(ended(), [(2, 64, None)]);
        endpoint.cancel(&cancels[3]);
        assert_eq!(ended(), [(3, 0, Some(OpError::Cancelled))]);
        submit(5..8);
        let broken = Some(OpError::PeerDown { peer: "server".into(), reason: "broken on purpose".into() });
        assert_eq!(ended(), [(5, 0, broken.clone()), (6, 0, broken.clone()), (7, 0, broken)]);
        assert_eq!((faults.seen(), endpoint.in_flight()), (8, 0));
    }
}
