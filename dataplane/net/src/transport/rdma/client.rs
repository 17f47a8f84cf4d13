//! The side that reads and writes: operations become work requests, completions of those become completions of these.
//!
//! Requests wait in one list and are posted when the send queue has room, so they complete in the order in which
//! operations were submitted. Lock order: `state`, then the queue pair's own lock. Sinks are called with none held.

use kvasir_os::time::Instant;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::io::{self, Write};
use std::sync::{Arc, Weak};

use super::plan::{self, Bounds};
use super::progress::Waiting;
use super::qp::{self, QueuePair, Request, Served};
use super::wire::{self, Frame, Inbox, Kind};
use super::{Failure, Shared, within};
use crate::transport::node::NOTICE_MAX;
use crate::transport::tcp::socket::Socket;
use crate::transport::{Completion, Denied, Endpoint, Error, Grant, Op, OpError, Sink};

/// The most bytes of one request. A request cannot be cancelled once posted, and valid bytes are counted by requests.
const REQUEST_BYTES_MAX: u64 = 4 << 20;

/// One peer over one queue pair.
pub(super) struct Link {
    shared: Arc<Shared>,
    peer: String,
    id: u64,
    queue: QueuePair,
    control: Socket,
    /// Held while a frame is written, so that frames stay whole.
    writing: Mutex<()>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    down: Option<String>,
    next: u64,
    ops: HashMap<u64, Active>,
    /// Not posted yet.
    waiting: VecDeque<Request>,
    opening: VecDeque<Opening>,
}

/// An operation in flight.
struct Active {
    op: Op,
    sink: Arc<dyn Sink>,
    /// Requests that have not ended yet.
    left: usize,
    valid_bytes: u64,
    failed: Option<OpError>,
}

struct Opening {
    segment: String,
    asked: Instant,
    reply: oneshot::Sender<Result<Arc<Grant>, Denied>>,
}

/// Completions to report once no lock is held.
type Told = Vec<(Arc<dyn Sink>, Completion)>;

fn tell(told: Told) {
    told.into_iter().for_each(|(sink, completion)| sink.complete(completion));
}

impl Link {
    pub(super) fn new(
        shared: Arc<Shared>,
        peer: String,
        id: u64,
        queue: QueuePair,
        control: Socket,
    ) -> Arc<Self> {
        let (writing, state) = (Mutex::default(), Mutex::default());
        let link = Arc::new(Self { shared, peer, id, queue, control, writing, state });
        let waiting: Weak<Self> = Arc::downgrade(&link);
        if !link.shared.progress.attend(id, waiting) {
            link.go_down("the transport is closed");
        }
        link
    }

    /// Takes one answer of the peer, or finds that the peer is silent. `heard` is when it last said something.
    pub(super) fn listen(&self, inbox: &mut Inbox, heard: &mut Instant) -> io::Result<()> {
        match inbox.next(&mut within(&self.control, self.shared.config.heartbeat))? {
            None if heard.elapsed() > self.shared.config.peer_timeout => {
                Err(io::Error::new(io::ErrorKind::TimedOut, "nothing was heard from it"))
            }
            None => self.say(&Frame::new(Kind::Ping, b"")),
            Some(frame) => {
                *heard = Instant::now();
                match frame.kind {
                    Kind::Pong => Ok(()),
                    Kind::Grant => self.opened(&frame),
                    kind => Err(io::Error::other(format!("it sent {kind:?} unasked"))),
                }
            }
        }
    }

    /// Ends the link; everything in flight completes now. Only the first reason counts.
    pub(super) fn go_down(&self, reason: &str) {
        let mut state = self.state();
        if state.down.is_some() {
            return;
        }
        state.down = Some(reason.to_owned());
        // From here on the adapter touches no memory of ours.
        let ended = self.queue.close();
        let waiting = std::mem::take(&mut state.waiting);
        state.opening.clear();
        let mut told = Told::new();
        let lost = |request| qp::Completion { request, result: Err(Failure::Flushed) };
        for completion in ended.into_iter().chain(waiting.into_iter().map(lost)) {
            self.end_request(&mut state, completion, &mut told);
        }
        drop(state);
        self.shared.progress.forget(self.id);
        self.control.shut_down();
        tell(told);
    }

    fn say(&self, frame: &Frame) -> io::Result<()> {
        let _writing = self.writing.lock();
        within(&self.control, self.shared.config.peer_timeout).write_all(&frame.encode())
    }

    fn opened(&self, frame: &Frame) -> io::Result<()> {
        let unasked = || io::Error::other("it sent a grant unasked");
        let opening = self.state().opening.pop_front().ok_or_else(unasked)?;
        let answer = match Denied::from_repr(frame.code) {
            Some(denied) => Err(denied),
            None => {
                let grant = wire::decode_grant(&opening.segment, opening.asked, &frame.body);
                Ok(Arc::new(grant.ok_or_else(|| io::Error::other("it sent a grant that makes no sense"))?))
            }
        };
        // If nobody waits any more, nobody uses the grant either.
        let _ = opening.reply.send(answer);
        Ok(())
    }

    fn peer_down(&self, reason: &str) -> OpError {
        OpError::PeerDown { peer: self.peer.clone(), reason: reason.to_owned() }
    }

    /// Accepts an operation and adds its requests to those that wait.
    fn accept(&self, state: &mut State, op: Op, sink: &Arc<dyn Sink>) -> Result<(), OpError> {
        if let Some(reason) = &state.down {
            return Err(self.peer_down(reason));
        }
        op.check(&self.shared.capabilities, Instant::now())?;
        let limit = self.shared.capabilities.queue_depth;
        if state.ops.len() >= limit {
            return Err(OpError::QueueFull { limit });
        }
        let (pieces, bytes) = self.queue.request_limits();
        let bounds = Bounds { pieces, bytes: REQUEST_BYTES_MAX.min(bytes.into()) };
        let token = state.next;
        let requests = plan::requests(&op, token, bounds, |range| self.shared.registry.find(range.region()))?;
        state.next += 1;
        let active = Active { op, sink: sink.clone(), left: requests.len(), valid_bytes: 0, failed: None };
        state.ops.insert(token, active);
        state.waiting.extend(requests);
        Ok(())
    }

    /// Posts what there is room for. The error says why the link is down.
    fn post(&self, state: &mut State, told: &mut Told) -> Result<(), super::Error> {
        let room = self.queue.room();
        let mut batch = Vec::new();
        while batch.len() < room {
            let Some(request) = state.waiting.pop_front() else { break };
            let ended = state
                .ops
                .get(&request.token)
                .is_some_and(|active| active.failed.is_some() || active.op.is_cancelled());
            if ended {
                self.skip(state, request, told);
            } else {
                batch.push(request);
            }
        }
        self.queue.post(batch).map_err(|refused| {
            // These requests end with the others, when the link goes down.
            refused.requests.into_iter().rev().for_each(|request| state.waiting.push_front(request));
            refused.error
        })
    }

    /// Ends a request that was not posted because its operation was cancelled or had failed.
    fn skip(&self, state: &mut State, request: Request, told: &mut Told) {
        if let Some(active) = state.ops.get_mut(&request.token) {
            active.failed.get_or_insert(OpError::Cancelled);
            self.end_one(state, request.token, told);
        }
    }

    fn end_request(&self, state: &mut State, completion: qp::Completion, told: &mut Told) {
        let token = completion.request.token;
        let down = state.down.clone();
        let Some(active) = state.ops.get_mut(&token) else { return };
        match completion.result {
            // After a failure, later bytes no longer extend the valid prefix.
            Ok(()) if active.failed.is_some() => {}
            Ok(()) => {
                active.valid_bytes +=
                    completion.request.local.iter().map(|piece| u64::from(piece.len)).sum::<u64>();
            }
            Err(failure) => {
                let cancelled = failure == Failure::Flushed && active.op.is_cancelled();
                let error = match failure {
                    _ if cancelled => OpError::Cancelled,
                    Failure::RemoteAccess => OpError::Denied(Denied::UnknownKey),
                    failure => self.peer_down(&down.unwrap_or_else(|| failure.to_string())),
                };
                active.failed.get_or_insert(error);
            }
        }
        self.end_one(state, token, told);
    }

    /// One request of an operation has ended. The last one ends the operation.
    fn end_one(&self, state: &mut State, token: u64, told: &mut Told) {
        let Some(active) = state.ops.get_mut(&token) else { return };
        active.left -= 1;
        if active.left > 0 {
            return;
        }
        let Some(active) = state.ops.remove(&token) else { return };
        let result = active.failed.map_or(Ok(()), Err);
        told.push((active.sink, Completion { id: active.op.id, valid_bytes: active.valid_bytes, result }));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl Waiting for Link {
    fn serve(&self) -> Served {
        let mut done = Vec::new();
        let served = self.queue.serve(&mut done);
        let mut told = Told::new();
        let mut state = self.state();
        let broken = done.iter().find_map(|done| done.result.err());
        for completion in done {
            self.end_request(&mut state, completion, &mut told);
        }
        let go_on = state.down.is_none() && broken.is_none();
        let posted = if go_on { self.post(&mut state, &mut told) } else { Ok(()) };
        drop(state);
        let failed = served.as_ref().err().or(posted.as_ref().err()).map(ToString::to_string);
        let failed = broken.map(|failure| failure.to_string()).or(failed);
        // Done before the completions are reported, so that a caller that hears of a failure finds the link down.
        if let Some(reason) = failed {
            self.go_down(&reason);
        }
        tell(told);
        served.unwrap_or(Served::Armed)
    }

    fn abandon(&self, reason: &str) {
        self.go_down(reason);
    }
}

impl Endpoint for Link {
    fn peer(&self) -> &str {
        &self.peer
    }

    fn open(&self, segment: &str) -> Result<Arc<Grant>, Error> {
        let down = |reason: String| Error::PeerDown { peer: self.peer.clone(), reason };
        let (reply, answer) = oneshot::channel();
        {
            // Recorded and written under one lock, so that answers come in the order of `opening`.
            let mut state = self.state();
            if let Some(reason) = &state.down {
                return Err(down(reason.clone()));
            }
            let asked = Instant::now();
            state.opening.push_back(Opening { segment: segment.to_owned(), asked, reply });
            self.say(&Frame::new(Kind::Open, segment.as_bytes())).map_err(|error| down(error.to_string()))?;
        }
        let lost = |_| down(self.down().unwrap_or_else(|| "it did not answer".into()));
        let denied = |denied| Error::Denied { peer: self.peer.clone(), segment: segment.to_owned(), denied };
        answer.recv().map_err(lost)?.map_err(denied)
    }

    fn submit(&self, ops: Vec<Op>, sink: &Arc<dyn Sink>) {
        let mut told = Told::new();
        let mut state = self.state();
        for op in ops {
            let id = op.id;
            if let Err(error) = self.accept(&mut state, op, sink) {
                told.push((sink.clone(), Completion::failed(id, 0, error)));
            }
        }
        let posted = if state.down.is_none() { self.post(&mut state, &mut told) } else { Ok(()) };
        drop(state);
        if let Err(error) = posted {
            self.go_down(&error.to_string());
        }
        tell(told);
    }

    fn notify(&self, message: &[u8]) -> Result<(), Error> {
        if message.len() > NOTICE_MAX {
            return Err(Error::NoticeTooLong { len: message.len() });
        }
        let down = |reason: String| Error::PeerDown { peer: self.peer.clone(), reason };
        if let Some(reason) = self.down() {
            return Err(down(reason));
        }
        self.say(&Frame::new(Kind::Notice, message)).map_err(|error| down(error.to_string()))
    }

    fn down(&self) -> Option<String> {
        self.state().down.clone()
    }

    fn in_flight(&self) -> usize {
        self.state().ops.len()
    }

    fn close(&self) {
        self.go_down("the endpoint is closed");
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.go_down("the endpoint is closed");
    }
}
