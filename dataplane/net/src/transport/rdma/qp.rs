//! A reliable connection: its states, and one-sided writes and reads on it.

mod states;

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::ptr::{self, NonNull};
use std::sync::Arc;

pub use super::cq::Served;
use super::cq::{Channel, CompletionQueue};
use super::device::Device;
use super::load::check;
use super::memory::MemoryRegion;
use super::sys;
use super::{Error, Failure};
use crate::transport::node::random;

/// Every 16th work request is signalled, and also the last of each call.
const SIGNAL_EVERY: usize = 16;

/// See [`QueueOptions::retries`].
const RETRIES_MAX: u8 = 6;

/// How a connection is set up; both sides' values are lowered to what their devices can.
#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    /// Work requests outstanding.
    pub depth: u32,
    /// Local pieces of one work request.
    pub pieces: u32,
    /// Writes of up to this many bytes are copied into the work request.
    pub inline_bytes: u32,
    /// Wait for an acknowledgement: 4.096 µs × 2^n, at most 31. 14 is 67 ms. Where the network loses packets, a request whose
    /// last ones are lost stands still for as long.
    pub ack_timeout: u8,
    /// How often a request is repeated after such a wait, at most 6; then it fails with [`Failure::Unreachable`]. (The
    /// number has three bits, but Soft-RoCE takes 7 for "without end".)
    pub retries: u8,
}

impl Default for QueueOptions {
    /// With these values a silent peer is detected within half a second.
    fn default() -> Self {
        Self { depth: 128, pieces: 16, inline_bytes: 128, ack_timeout: 14, retries: RETRIES_MAX }
    }
}

/// How a peer reaches a queue pair; exchanged by [`super::connect`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueAddress {
    /// Queue pair number, 24 bits.
    pub number: u32,
    /// First packet sequence number, 24 bits.
    pub sequence: u32,
    pub gid: [u8; 16],
    /// Local identifier of an InfiniBand port; 0 on Ethernet.
    pub lid: u16,
    /// Path MTU as the verbs code it: 1 is 256 B, 5 is 4096 B.
    pub mtu: u8,
    /// RDMA reads that the side accepts at once.
    pub reads_in: u8,
}

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// From local pieces to the peer.
    Write,
    /// From the peer into local pieces.
    Read,
}

/// A range of a registered region.
#[derive(Clone)]
pub struct Piece {
    pub region: Arc<MemoryRegion>,
    pub offset: u64,
    pub len: u32,
}

/// One work request: several local pieces, one remote range as long as all of them.
#[derive(Clone)]
pub struct Request {
    /// Comes back with the completion.
    pub token: u64,
    pub verb: Verb,
    pub local: Vec<Piece>,
    pub remote_address: u64,
    pub remote_key: u32,
}

/// The end of a request. Only from here on may its local pieces be used for something else.
pub struct Completion {
    pub request: Request,
    pub result: Result<(), Failure>,
}

/// Requests that were not accepted, with the reason.
pub struct Refused {
    pub error: Error,
    pub requests: Vec<Request>,
}

/// A queue pair of the reliable-connection kind, with its completion queue.
///
/// A send queue is worked off in order. So only some requests are signalled: a completion ends every request
/// before it as well. A failed request always completes, and so does everything after it.
pub struct QueuePair {
    // Dropped in this order: nothing may use the queue when it goes.
    queue: Mutex<Queue>,
    cq: CompletionQueue,
    options: QueueOptions,
    number: u32,
    sequence: u32,
}

struct Queue {
    /// `None` once closed.
    qp: Option<NonNull<sys::Qp>>,
    device: Arc<Device>,
    ready: bool,
    /// `wr_id` of the first request in flight.
    first: u64,
    in_flight: VecDeque<Request>,
}

// SAFETY: the pointer is a handle of the thread-safe library, owned by this value.
unsafe impl Send for Queue {}

impl Drop for Queue {
    /// The adapter stops using the pieces in flight before they are released.
    fn drop(&mut self) {
        self.destroy();
    }
}

impl QueuePair {
    /// A queue pair in state INIT, whose completions are announced on `channel` as `id`.
    ///
    /// # Errors
    /// What the system said, for example that the device has no queue pair left.
    pub fn new(
        device: &Arc<Device>,
        channel: &Arc<Channel>,
        id: u64,
        options: QueueOptions,
    ) -> Result<Self, Error> {
        let limits = device.limits();
        let mut options = QueueOptions {
            depth: options.depth.clamp(1, limits.queue_depth.max(1)),
            pieces: options.pieces.clamp(1, limits.pieces.max(1)),
            ..options
        };
        let cq = CompletionQueue::new(channel, options.depth, id)?;
        let (qp, inline_bytes) = states::create(device, &cq, &options)?;
        options.inline_bytes = inline_bytes;
        // SAFETY: just created; the number never changes.
        let number = unsafe { (*qp.as_ptr()).qp_num };
        let queue = Queue {
            qp: Some(qp),
            device: Arc::clone(device),
            ready: false,
            first: 0,
            in_flight: VecDeque::with_capacity(options.depth as usize),
        };
        queue.to_init()?;
        let sequence = u32::from_le_bytes(random()) & 0xff_ffff;
        Ok(Self { queue: Mutex::new(queue), cq, options, number, sequence })
    }

    /// What the peer needs to connect to this side.
    ///
    /// # Errors
    /// [`Error::PortDown`] or [`Error::NoGid`].
    pub fn address(&self) -> Result<QueueAddress, Error> {
        let device = self.cq.device();
        let port = device.active_port()?;
        Ok(QueueAddress {
            number: self.number,
            sequence: self.sequence,
            gid: device.gid()?.gid,
            lid: port.lid,
            mtu: port.active_mtu as u8,
            reads_in: device.limits().reads_in,
        })
    }

    /// Goes to RTR and RTS: from here on the peer can reach us, and we can reach the peer once it did the same.
    ///
    /// # Errors
    /// [`Error::PortDown`], [`Error::NoGid`], or what the system said to a change of state.
    pub fn connect(&self, peer: &QueueAddress) -> Result<(), Error> {
        let ours = self.address()?;
        let mut queue = self.queue.lock();
        queue.to_receive(&ours, peer)?;
        queue.to_send(&self.options, self.sequence, peer)?;
        queue.ready = true;
        Ok(())
    }

    /// The most local pieces and bytes that one request may have.
    pub fn request_limits(&self) -> (usize, u32) {
        (self.options.pieces as usize, self.cq.device().limits().message_bytes)
    }

    /// Requests that would be accepted now.
    pub fn room(&self) -> usize {
        self.options.depth as usize - self.queue.lock().in_flight.len()
    }

    /// Checks all requests, then hands them to the adapter. If the adapter refuses one, the connection breaks: that
    /// request and those after it come back, and those before it complete as flushed.
    ///
    /// # Errors
    /// The requests come back with [`Error::Broken`], [`Error::QueueFull`], or what is wrong with one of them.
    pub fn post(&self, requests: Vec<Request>) -> Result<(), Refused> {
        let mut queue = self.queue.lock();
        match self.prepare(&queue, &requests) {
            Ok(mut chain) => queue.post(requests, &mut chain),
            Err(error) => Err(Refused { error, requests }),
        }
    }

    /// Takes what is complete. With [`Served::Busy`] there is more: call again.
    ///
    /// # Errors
    /// What the system said; the device is of no use then.
    pub fn serve(&self, done: &mut Vec<Completion>) -> Result<Served, Error> {
        self.cq.serve(|found| self.queue.lock().complete(found, done))
    }

    /// Stops: requests in flight will complete with [`Failure::Flushed`], new ones are refused.
    pub fn break_off(&self) {
        self.queue.lock().break_off();
    }

    /// Ends the connection now. Every request in flight is returned; the adapter no longer touches its memory.
    pub fn close(&self) -> Vec<Completion> {
        let mut done = Vec::new();
        // A device that is gone cannot be polled; what is in flight then ends below.
        while matches!(self.cq.poll(|found| self.queue.lock().complete(found, &mut done)), Ok(1..)) {}
        let mut queue = self.queue.lock();
        queue.destroy();
        let lost = queue.in_flight.drain(..);
        done.extend(lost.map(|request| Completion { request, result: Err(Failure::Flushed) }));
        done
    }

    /// Checks requests and writes them as the adapter reads them.
    fn prepare(&self, queue: &Queue, requests: &[Request]) -> Result<Chain, Error> {
        if !queue.ready {
            return Err(Error::Broken);
        }
        let (depth, outstanding) = (self.options.depth as usize, queue.in_flight.len());
        if outstanding + requests.len() > depth {
            return Err(Error::QueueFull { wanted: requests.len(), outstanding, depth });
        }
        let mut chain = Chain { elements: Vec::new(), requests: Vec::with_capacity(requests.len()) };
        let next = queue.first + outstanding as u64;
        for (n, request) in requests.iter().enumerate() {
            let signalled = n + 1 == requests.len() || n % SIGNAL_EVERY == SIGNAL_EVERY - 1;
            let mut wr = self.describe(request, &mut chain.elements)?;
            wr.wr_id = next + n as u64;
            wr.send_flags |= if signalled { sys::SEND_SIGNALED } else { 0 };
            chain.requests.push(wr);
        }
        Ok(chain)
    }

    /// Pointers are set by [`Chain::link`].
    fn describe(&self, request: &Request, elements: &mut Vec<sys::Sge>) -> Result<sys::SendWr, Error> {
        let bad = |problem: String| Error::BadRequest { problem };
        let device = self.cq.device();
        let (pieces_max, bytes_max) = self.request_limits();
        let pieces = &request.local;
        let bytes: u64 = pieces.iter().map(|piece| u64::from(piece.len)).sum();
        if pieces.is_empty() || pieces.len() > pieces_max {
            return Err(bad(format!("has {} pieces; 1 to {pieces_max} are possible", pieces.len())));
        }
        if bytes == 0 || bytes > u64::from(bytes_max) {
            return Err(bad(format!("has {bytes} B; 1 to {bytes_max} are possible")));
        }
        if pieces.iter().any(|piece| !piece.region.belongs_to(device)) {
            return Err(bad(format!("names memory that is not registered with {}", device.name())));
        }
        for piece in pieces {
            elements.push(piece.region.element(piece.offset, piece.len)?);
        }
        let inline = request.verb == Verb::Write
            && bytes <= u64::from(self.options.inline_bytes)
            && pieces.iter().all(|piece| piece.region.is_host());
        Ok(sys::SendWr {
            wr_id: 0,
            next: ptr::null_mut(),
            sg_list: ptr::null_mut(),
            num_sge: pieces.len() as i32,
            opcode: match request.verb {
                Verb::Write => sys::WR_RDMA_WRITE,
                Verb::Read => sys::WR_RDMA_READ,
            },
            send_flags: if inline { sys::SEND_INLINE } else { 0 },
            imm_data: 0,
            remote_addr: request.remote_address,
            rkey: request.remote_key,
            _union: [0; 5],
            _rest: [0; 7],
        })
    }
}

/// Work requests as the adapter reads them.
struct Chain {
    elements: Vec<sys::Sge>,
    requests: Vec<sys::SendWr>,
}

impl Chain {
    /// Links the requests, each to its elements and to the next; they must not move after this.
    fn link(&mut self) -> *mut sys::SendWr {
        let (mut element, mut next) = (self.elements.as_mut_ptr(), self.requests.as_mut_ptr());
        let last = self.requests.len().saturating_sub(1);
        for (n, wr) in self.requests.iter_mut().enumerate() {
            wr.sg_list = element;
            element = element.wrapping_add(wr.num_sge as usize);
            next = next.wrapping_add(1);
            wr.next = if n == last { ptr::null_mut() } else { next };
        }
        if self.requests.is_empty() { ptr::null_mut() } else { self.requests.as_mut_ptr() }
    }
}

impl Queue {
    fn post(&mut self, mut requests: Vec<Request>, chain: &mut Chain) -> Result<(), Refused> {
        let first = chain.link();
        let (Some(qp), false) = (self.qp, first.is_null()) else { return Ok(()) };
        // SAFETY: the context is open; its table was filled when it was opened.
        let Some(post_send) = (unsafe { (*self.device.context.as_ptr()).ops.post_send }) else {
            let error = Error::Unsupported { what: "posting", device: self.device.name().into() };
            return Err(Refused { error, requests });
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is open, the chain is linked and outlives the call (the provider copies it),
        // and the memory it names stays registered because `in_flight` or the caller keeps the pieces.
        let code = unsafe { post_send(qp.as_ptr(), first, &mut bad) };
        let Err(error) = check(code) else {
            self.in_flight.extend(requests);
            return Ok(());
        };
        // The requests before `bad` were accepted. Perhaps none of them is signalled, so end the connection: then all
        // of them complete, as flushed.
        let accepted = chain.requests.iter().position(|wr| ptr::eq(wr, bad)).unwrap_or(0);
        let refused = requests.split_off(accepted);
        self.in_flight.extend(requests);
        self.break_off();
        Err(Refused { error: self.device.failed("posting")(error), requests: refused })
    }

    fn complete(&mut self, found: &[sys::Wc], done: &mut Vec<Completion>) {
        for wc in found {
            let failure = Failure::of(wc);
            if failure.is_some() {
                // The adapter has stopped already, so this side stops too.
                self.ready = false;
            }
            while self.first <= wc.wr_id {
                let Some(request) = self.in_flight.pop_front() else { break };
                let failed = failure.filter(|_| self.first == wc.wr_id);
                self.first += 1;
                done.push(Completion { request, result: failed.map_or(Ok(()), Err) });
            }
        }
    }
}
