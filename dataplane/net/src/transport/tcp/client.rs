//! The side that asks: any thread sends, one thread per connection receives, completes and keeps watch.
//!
//! Answers come in the order of the questions, so the oldest pending one is what the next frame answers; its length is
//! known before its header comes, and large payloads go straight into memory.
//!
//! Lock order: `outbox`, `receiving`, `pending`. Sinks are called with none of them held.

use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::asked::{Asked, Asking, Question, Receiving, Told, outcome};
use super::queue::{Cursor, Inbox, Outbox, crc};
use super::socket::{Socket, Wake};
use super::tls::RECORD;
use super::wire::{self, HEADER_LEN, Header, Kind, WireError};
use crate::transport::grant::Denied;
use crate::transport::{Cancel, Capabilities, Completion, Direction, Grant, Op, OpError, Sink};
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::stream::Habits;

/// From this payload size on, the header is received alone and the rest goes straight into memory.
pub(super) const LARGE: u64 = 16 << 10;
/// A peer that still has this many bytes to send has enough to do.
const BUSY: u64 = 1 << 20;
/// Bytes received at once otherwise.
const READ_AHEAD: usize = 64 << 10;

pub(super) struct Connection {
    pub(super) peer: String,
    socket: Socket,
    wake: Wake,
    checksum: bool,
    heartbeat: Duration,
    peer_timeout: Duration,
    outbox: Mutex<Outbox>,
    receiving: Mutex<Option<Receiving>>,
    pending: Mutex<Pending>,
    in_flight: AtomicUsize,
    next_request: AtomicU64,
    /// Bytes that the system took to send: a sign of life while a long write goes out.
    sent: AtomicU64,
    /// Something is left for the receiving thread to send. It looks here first, because a thread that submits holds the
    /// outbox for as long as a system call takes.
    backlog: AtomicBool,
    /// The receiving thread is at work and will look at `backlog` before it waits.
    active: AtomicBool,
    /// Bytes of reads that were asked for and have not begun to arrive.
    asked: AtomicU64,
    /// The last answer was small.
    little: AtomicBool,
    /// About how many records both sides have encrypted: one for each question and its answer, and the payload.
    records: AtomicU64,
}

#[derive(Default)]
struct Pending {
    queue: VecDeque<Question>,
    down: Option<String>,
}

impl Connection {
    pub(super) fn new(
        peer: String,
        socket: Socket,
        checksum: bool,
        heartbeat: Duration,
        peer_timeout: Duration,
    ) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            peer,
            socket,
            wake: Wake::new()?,
            checksum,
            heartbeat,
            peer_timeout,
            outbox: Mutex::default(),
            receiving: Mutex::default(),
            pending: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            next_request: AtomicU64::new(1),
            sent: AtomicU64::new(0),
            backlog: AtomicBool::new(false),
            active: AtomicBool::new(false),
            asked: AtomicU64::new(0),
            little: AtomicBool::new(false),
            records: AtomicU64::new(0),
        }))
    }

    pub(super) fn down(&self) -> Option<String> {
        self.pending.lock().down.clone()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Acquire)
    }

    /// Whether nothing is asked, and nothing waits to be sent.
    pub(super) fn is_idle(&self) -> bool {
        let sent = !self.backlog.load(Ordering::SeqCst);
        sent && self.in_flight() == 0 && self.pending.lock().queue.is_empty()
    }

    /// Whether its keys have encrypted so many records.
    pub(super) fn is_worn(&self, records: u64) -> bool {
        self.socket.is_encrypted() && self.records.load(Ordering::Relaxed) >= records
    }

    pub(super) fn submit(&self, ops: Vec<Op>, capabilities: &Capabilities, sink: &Arc<dyn Sink>) {
        let now = Instant::now();
        let mut refused = Vec::new();
        let only_reads = ops.iter().all(|op| op.direction == Direction::Read);
        let mut outbox = self.outbox.lock();
        {
            let mut pending = self.pending.lock();
            for op in ops {
                let id = op.id;
                if let Err(error) = self.ask(op, capabilities, now, sink, &mut pending, &mut outbox) {
                    refused.push(Completion::failed(id, 0, error));
                }
            }
        }
        if only_reads && self.leave_to_receiver() {
            drop(outbox);
        } else {
            self.flush(outbox);
        }
        refused.into_iter().for_each(|completion| sink.complete(completion));
    }

    /// Whether the receiving thread will send what is in the outbox, soon and together with what else comes.
    fn leave_to_receiver(&self) -> bool {
        // The receiving thread clears `active` before it checks `backlog`, and here `active` is checked after `backlog`
        // was set: so one of the two sends.
        self.backlog.store(true, Ordering::SeqCst);
        self.active.load(Ordering::SeqCst)
    }

    fn ask(
        &self,
        mut op: Op,
        capabilities: &Capabilities,
        now: Instant,
        sink: &Arc<dyn Sink>,
        pending: &mut Pending,
        outbox: &mut Outbox,
    ) -> Result<(), OpError> {
        if let Some(reason) = &pending.down {
            return Err(OpError::PeerDown { peer: self.peer.clone(), reason: reason.clone() });
        }
        op.check(capabilities, now)?;
        if pending.queue.len() >= capabilities.queue_depth {
            return Err(OpError::QueueFull { limit: capabilities.queue_depth });
        }
        let (request, len) = (self.next_request(), op.len());
        self.records.fetch_add(1 + len / RECORD as u64, Ordering::Relaxed);
        let local = match op.direction {
            Direction::Read => {
                outbox.push(|to| wire::encode_op(to, Header::new(Kind::Read, request), &op));
                self.asked.fetch_add(len, Ordering::Relaxed);
                std::mem::take(&mut op.local)
            }
            Direction::Write => {
                let crc = self.checksum.then(|| crc(&op.local));
                let header = Header { payload_len: len, crc, ..Header::new(Kind::Write, request) };
                let body = Cursor::new(std::mem::take(&mut op.local));
                outbox.push_frame(|to| wire::encode_op(to, header, &op), body, None, request);
                Vec::new()
            }
        };
        let Op { id, direction, cancel, .. } = op;
        let asking = Asking { id, direction, len, cancel, local, sink: Some(sink.clone()) };
        pending.queue.push_back(Question { request, asked: Asked::Op(asking) });
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Asks for a grant. The inner error is the peer's refusal, the outer one says why the peer is down.
    pub(super) fn open(&self, segment: &str) -> Result<Result<Arc<Grant>, Denied>, String> {
        let (reply, answer) = oneshot::channel();
        let mut outbox = self.outbox.lock();
        {
            let mut pending = self.pending.lock();
            if let Some(reason) = &pending.down {
                return Err(reason.clone());
            }
            let request = self.next_request();
            let asked = Asked::Open { segment: segment.to_owned(), at: Instant::now(), reply };
            pending.queue.push_back(Question { request, asked });
            outbox.push(|to| wire::encode_named(to, Kind::Open, request, segment.as_bytes()));
        }
        self.flush(outbox);
        answer.recv().map_err(|_| self.down().unwrap_or_else(|| "it broke the protocol".into()))
    }

    pub(super) fn notify(&self, message: &[u8]) -> Result<(), String> {
        let mut outbox = self.outbox.lock();
        if let Some(reason) = self.down() {
            return Err(reason);
        }
        self.records.fetch_add(1, Ordering::Relaxed);
        outbox.push(|to| wire::encode_named(to, Kind::Notice, 0, message));
        self.flush(outbox);
        Ok(())
    }

    /// Completes what was asked with this token and can still be taken back.
    pub(super) fn cancel(&self, cancel: &Cancel) {
        let ours = |asking: &Asking| asking.cancel.as_ref().is_some_and(|token| token.is(cancel));
        let mut told: Vec<Told> = Vec::new();
        let mut outbox = self.outbox.lock();
        if let Some(receiving) = self.receiving.lock().as_mut().filter(|receiving| ours(&receiving.asking)) {
            told.extend(receiving.abandon());
        }
        let mut pending = self.pending.lock();
        pending.queue.retain_mut(|question| {
            let Asked::Op(asking) = &mut question.asked else { return true };
            if !ours(asking) {
                return true;
            }
            match asking.direction {
                Direction::Read => {
                    asking.local.clear();
                    told.extend(asking.end(0, Err(OpError::Cancelled)));
                    true
                }
                // Once a write has begun to go out it is sent to its end, and its answer is awaited.
                Direction::Write if outbox.take_back(question.request) => {
                    told.extend(asking.end(0, Err(OpError::Cancelled)));
                    false
                }
                Direction::Write => true,
            }
        });
        drop((pending, outbox));
        self.tell(told);
    }

    /// Ends the connection: all that waits completes with `reason`.
    pub(super) fn fail(&self, reason: &str) {
        self.socket.shut_down();
        let mut told: Vec<Told> = Vec::new();
        let peer_down = || OpError::PeerDown { peer: self.peer.clone(), reason: reason.to_owned() };
        {
            // While these three locks are held, no thread reads or writes lent memory, and none can begin to.
            let (mut outbox, mut receiving) = (self.outbox.lock(), self.receiving.lock());
            let mut pending = self.pending.lock();
            pending.down.get_or_insert_with(|| reason.to_owned());
            outbox.clear();
            if let Some(mut receiving) = receiving.take() {
                let valid = receiving.valid();
                told.extend(receiving.asking.end(valid, Err(peer_down())));
            }
            for question in std::mem::take(&mut pending.queue) {
                if let Asked::Op(mut asking) = question.asked {
                    told.extend(asking.end(0, Err(peer_down())));
                }
            }
        }
        self.wake.wake();
        self.tell(told);
    }

    /// The receiving thread: returns when the connection has ended.
    pub(super) fn run(&self) {
        let mut watch = Watch { heard: Instant::now(), sent: 0, pinged: false };
        let (mut inbox, mut habits) = (Inbox::new(), Habits::new(Habits::SOCKET));
        while self.down().is_none() {
            if let Err(ended) = self.step(&mut inbox, &mut watch, &mut habits) {
                self.fail(&ended.to_string());
            }
        }
        // Ends whatever this thread had in hand when another one ended the connection.
        self.fail("the connection ended");
    }

    fn step(&self, inbox: &mut Inbox, watch: &mut Watch, habits: &mut Habits) -> Result<(), Ended> {
        self.active.store(true, Ordering::SeqCst);
        let full = self.backlog.load(Ordering::SeqCst) && !self.flush_some(self.outbox.lock())?;
        if self.receive(inbox)? {
            watch.heard = Instant::now();
            watch.pinged = false;
            return Ok(());
        }
        self.active.store(false, Ordering::SeqCst);
        if !full && self.backlog.load(Ordering::SeqCst) {
            return Ok(());
        }
        let wait = |time| self.socket.wait(full, Some(&self.wake), time);
        let ready = if !full && self.awaits_little() {
            habits.wait(&mut (), |()| self.socket.wait_now(Some(&self.wake)), |()| wait(self.heartbeat))
        } else {
            wait(self.heartbeat)
        };
        if !ready? {
            self.look_after(watch)?;
        }
        Ok(())
    }

    /// Whether the last answer was small and the next one is too. Large answers come in many parts, and a thread that
    /// polled for each of them would use a whole processor.
    fn awaits_little(&self) -> bool {
        let little = |question: &Question| question.asked.bytes() < LARGE;
        self.little.load(Ordering::Relaxed) && self.pending.lock().queue.front().is_none_or(little)
    }

    /// Nothing came for a while: asks whether the peer is there, or concludes that it is not.
    fn look_after(&self, watch: &mut Watch) -> Result<(), Ended> {
        let (now, sent) = (Instant::now(), self.sent.load(Ordering::Acquire));
        let silent = now - watch.heard;
        if watch.pinged && sent != watch.sent {
            (watch.heard, watch.sent) = (now, sent);
            return Ok(());
        }
        if watch.pinged && silent >= self.peer_timeout {
            return Err(Ended::Silent(silent));
        }
        if watch.pinged || silent < self.heartbeat {
            return Ok(());
        }
        let mut outbox = self.outbox.lock();
        let request = self.next_request();
        self.pending.lock().queue.push_back(Question { request, asked: Asked::Ping });
        outbox.push(|to| to.extend(Header::new(Kind::Ping, request).encode()));
        self.flush_some(outbox)?;
        (watch.pinged, watch.sent) = (true, self.sent.load(Ordering::Acquire));
        Ok(())
    }

    /// Receives what is there now. Returns whether there was anything.
    fn receive(&self, inbox: &mut Inbox) -> Result<bool, Ended> {
        let mut progress = false;
        loop {
            // A peer with little left to send is asked for more before the rest is received.
            if self.backlog.load(Ordering::Relaxed) && self.asked.load(Ordering::Relaxed) < BUSY {
                self.flush_some(self.outbox.lock())?;
            }
            let more = if self.receive_payload(inbox, &mut progress)? {
                self.answer_next(inbox)?
            } else {
                return Ok(progress);
            };
            if more {
                continue;
            }
            let wanted = self.wanted(inbox);
            if !inbox.fill(&self.socket, wanted)? {
                return Ok(progress);
            }
            progress = true;
        }
    }

    /// How many bytes to have in the inbox next.
    fn wanted(&self, inbox: &Inbox) -> usize {
        let large = matches!(
            self.pending.lock().queue.front(),
            Some(Question { asked: Asked::Op(asking), .. })
                if asking.direction == Direction::Read && asking.len >= LARGE
        );
        let have = inbox.bytes().len();
        match (large && have < HEADER_LEN, have < READ_AHEAD) {
            (true, _) => HEADER_LEN,
            (false, true) => READ_AHEAD,
            (false, false) => usize::MAX,
        }
    }

    /// Goes on with the payload that is coming in, if any. Returns whether none is left.
    fn receive_payload(&self, inbox: &mut Inbox, progress: &mut bool) -> Result<bool, Ended> {
        loop {
            let mut slot = self.receiving.lock();
            let Some(receiving) = slot.as_mut() else { return Ok(true) };
            if receiving.asking.cancel.as_ref().is_some_and(Cancel::is_set)
                && let Some(told) = receiving.abandon()
            {
                drop(slot);
                self.tell(vec![told]);
                continue;
            }
            if receiving.cursor.left() == 0 {
                let told = receiving.finish();
                *slot = None;
                drop(slot);
                self.tell(told.into_iter().collect());
                return Ok(true);
            }
            let moved = if receiving.asking.sink.is_some() {
                receiving.fill(inbox, &self.socket)?
            } else {
                receiving.skip(inbox, &self.socket)?
            };
            if !moved {
                return Ok(false);
            }
            *progress = true;
        }
    }

    /// Handles the next whole frame in the inbox. Returns whether there was one.
    fn answer_next(&self, inbox: &mut Inbox) -> Result<bool, Ended> {
        let Some((header, body)) = inbox.frame()? else { return Ok(false) };
        let result = outcome(header.code)?;
        match self.answered(&header)? {
            Asked::Op(mut asking) => match (asking.direction, result) {
                (Direction::Read, Ok(())) => self.begin(asking, &header),
                (Direction::Write, Ok(())) => {
                    let len = asking.len;
                    self.tell(asking.end(len, Ok(())).into_iter().collect());
                }
                (_, Err(error)) => self.tell(asking.end(0, Err(error)).into_iter().collect()),
            },
            Asked::Open { segment, at, reply } => {
                let answer = match Denied::from_repr(header.code) {
                    Some(denied) => Err(denied),
                    None => Ok(Arc::new(wire::decode_grant(&segment, at, body)?)),
                };
                // The thread that asked may be gone.
                let _ = reply.send(answer);
            }
            Asked::Ping => {}
        }
        inbox.consume_frame(&header);
        Ok(true)
    }

    /// Takes the question that a frame answers. If it answers none, all questions stay, for `fail` to complete.
    fn answered(&self, header: &Header) -> Result<Asked, WireError> {
        let mut pending = self.pending.lock();
        let fits = |question: &Question| question.request == header.request && question.asked.fits(header);
        let question = if pending.queue.front().is_some_and(fits) { pending.queue.pop_front() } else { None };
        if let Some(Question { asked: Asked::Op(Asking { direction: Direction::Read, len, .. }), .. }) =
            &question
        {
            self.asked.fetch_sub(*len, Ordering::Relaxed);
        }
        let little = question.as_ref().is_some_and(|question| question.asked.bytes() < LARGE);
        self.little.store(little, Ordering::Relaxed);
        question.map(|question| question.asked).ok_or(WireError::Unasked(header.kind))
    }

    /// The answer to a read: its payload comes next.
    fn begin(&self, mut asking: Asking, header: &Header) {
        let local = std::mem::take(&mut asking.local);
        let crc = header.crc.map(|crc| (crc, local.clone()));
        let cursor =
            if asking.sink.is_some() { Cursor::new(local) } else { Cursor::skipping(header.payload_len) };
        *self.receiving.lock() = Some(Receiving { asking, cursor, crc });
    }

    /// Sends what can be sent now; the receiving thread sends the rest.
    fn flush(&self, outbox: MutexGuard<'_, Outbox>) {
        match self.flush_some(outbox) {
            Ok(true) => {}
            Ok(false) => self.wake.wake(),
            Err(error) => self.fail(&error.to_string()),
        }
    }

    fn flush_some(&self, mut outbox: MutexGuard<'_, Outbox>) -> io::Result<bool> {
        let before = outbox.bytes();
        let all = outbox.flush(&self.socket)?;
        self.sent.fetch_add(before - outbox.bytes(), Ordering::AcqRel);
        self.backlog.store(!all, Ordering::Release);
        Ok(all)
    }

    fn next_request(&self) -> u64 {
        self.next_request.fetch_add(1, Ordering::Relaxed)
    }

    fn tell(&self, told: Vec<Told>) {
        for (sink, completion) in told {
            self.in_flight.fetch_sub(1, Ordering::AcqRel);
            sink.complete(completion);
        }
    }
}

/// What the receiving thread knows of the peer's life.
struct Watch {
    heard: Instant,
    sent: u64,
    /// Something was asked since `heard` that a living peer would answer.
    pinged: bool,
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("it broke the protocol: {0}")]
    Wire(#[from] WireError),
    #[error("nothing was heard for {} ms", .0.as_millis())]
    Silent(Duration),
}
