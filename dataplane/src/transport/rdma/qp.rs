//! A reliable connection: its states, and one-sided writes and reads on it.

use std::collections::VecDeque;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use super::cq::Served;
use super::cq::{Channel, CompletionQueue};
use super::device::Device;
use super::load::check;
use super::memory::MemoryRegion;
use super::sys;
use super::{Error, Failure};
use crate::transport::node::random;

/// Every so many work requests one is signalled, besides the last of each call.
const SIGNAL_EVERY: usize = 16;

/// How a connection is set up; both sides' values are lowered to what their devices can.
#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    /// Work requests outstanding.
    pub depth: u32,
    /// Local pieces of one work request.
    pub pieces: u32,
    /// Writes of up to so many bytes are copied into the work request.
    pub inline_bytes: u32,
    /// Wait for an acknowledgement: 4.096 µs × 2^n, at most 31. 14 is 67 ms.
    pub ack_timeout: u8,
    /// Repetitions after such a wait, at most 7; then the request fails with [`Failure::Unreachable`].
    pub retries: u8,
}

impl Default for QueueOptions {
    /// A silent peer is known after half a second.
    fn default() -> Self {
        Self { depth: 128, pieces: 16, inline_bytes: 128, ack_timeout: 14, retries: 7 }
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

/// Requests that were not accepted, and why.
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
    /// None once closed.
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
        let (qp, inline_bytes) = create(device, &cq, &options)?;
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

    /// Goes to RTR and RTS: from here on the peer can reach us, and we the peer once it did the same.
    ///
    /// # Errors
    /// [`Error::PortDown`], [`Error::NoGid`], or what the system said to a change of state.
    pub fn connect(&self, peer: &QueueAddress) -> Result<(), Error> {
        let ours = self.address()?;
        let mut queue = self.lock();
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
        self.options.depth as usize - self.lock().in_flight.len()
    }

    /// Hands requests to the adapter, all of them or (refused) none.
    ///
    /// # Errors
    /// The requests come back with [`Error::Broken`], [`Error::QueueFull`], or what is wrong with one of them.
    pub fn post(&self, requests: Vec<Request>) -> Result<(), Refused> {
        let mut queue = self.lock();
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
        self.cq.serve(|found| self.lock().complete(found, done))
    }

    /// Stops: requests in flight will complete with [`Failure::Flushed`], new ones are refused.
    pub fn break_off(&self) {
        self.lock().break_off();
    }

    /// Ends the connection now. Every request in flight is returned; the adapter no longer touches its memory.
    pub fn close(&self) -> Vec<Completion> {
        let mut done = Vec::new();
        // A device that is gone cannot be polled; what is in flight then ends below.
        while matches!(self.cq.poll(|found| self.lock().complete(found, &mut done)), Ok(1..)) {}
        let mut queue = self.lock();
        queue.destroy();
        let lost = queue.in_flight.drain(..);
        done.extend(lost.map(|request| Completion { request, result: Err(Failure::Flushed) }));
        done
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // No code that holds the lock leaves the queue half changed when it panics.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
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
        // Those before `bad` were accepted. None of them need be signalled, so end the connection: then all
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
                // The adapter has stopped already; so do we.
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

    fn break_off(&mut self) {
        self.ready = false;
        let attr = sys::QpAttr { qp_state: sys::QPS_ERR, ..Default::default() };
        // If even this fails, the device is gone, and `close` returns what is in flight.
        let _ = self.modify(attr, sys::QP_STATE, "breaking off a connection");
    }

    fn destroy(&mut self) {
        self.ready = false;
        if let Some(qp) = self.qp.take() {
            // SAFETY: open until here, and never used again.
            unsafe { (self.device.verbs.destroy_qp)(qp.as_ptr()) };
        }
    }

    fn to_init(&self) -> Result<(), Error> {
        let attr = sys::QpAttr {
            qp_state: sys::QPS_INIT,
            port_num: self.device.options().port,
            qp_access_flags: (sys::ACCESS_REMOTE_READ | sys::ACCESS_REMOTE_WRITE) as u32,
            ..Default::default()
        };
        let mask = sys::QP_STATE | sys::QP_PKEY_INDEX | sys::QP_PORT | sys::QP_ACCESS_FLAGS;
        self.modify(attr, mask, "preparing a queue pair")
    }

    fn to_receive(&self, ours: &QueueAddress, peer: &QueueAddress) -> Result<(), Error> {
        /// Wait asked of a sender that finds no receive buffer, 0.64 ms; one-sided operations need none.
        const RNR_TIMER: u8 = 12;
        let attr = sys::QpAttr {
            qp_state: sys::QPS_RTR,
            path_mtu: u32::from(ours.mtu.min(peer.mtu)),
            dest_qp_num: peer.number,
            rq_psn: peer.sequence,
            max_dest_rd_atomic: ours.reads_in,
            min_rnr_timer: RNR_TIMER,
            ah_attr: self.route(peer)?,
            ..Default::default()
        };
        let mask = sys::QP_STATE
            | sys::QP_AV
            | sys::QP_PATH_MTU
            | sys::QP_DEST_QPN
            | sys::QP_RQ_PSN
            | sys::QP_MAX_DEST_RD_ATOMIC
            | sys::QP_MIN_RNR_TIMER;
        self.modify(attr, mask, "connecting a queue pair (ready to receive)")
    }

    fn to_send(&self, options: &QueueOptions, sequence: u32, peer: &QueueAddress) -> Result<(), Error> {
        let attr = sys::QpAttr {
            qp_state: sys::QPS_RTS,
            sq_psn: sequence,
            timeout: options.ack_timeout.min(31),
            retry_cnt: options.retries.min(7),
            rnr_retry: options.retries.min(7),
            max_rd_atomic: self.device.limits().reads_out.min(peer.reads_in),
            ..Default::default()
        };
        let mask = sys::QP_STATE
            | sys::QP_SQ_PSN
            | sys::QP_TIMEOUT
            | sys::QP_RETRY_CNT
            | sys::QP_RNR_RETRY
            | sys::QP_MAX_QP_RD_ATOMIC;
        self.modify(attr, mask, "connecting a queue pair (ready to send)")
    }

    /// By GID on Ethernet, where it is the IP address; by LID within an InfiniBand subnet.
    fn route(&self, peer: &QueueAddress) -> Result<sys::AhAttr, Error> {
        /// Hops of the IP header.
        const HOPS: u8 = 64;
        let options = self.device.options();
        let ethernet = self.device.active_port()?.link_layer == sys::LINK_LAYER_ETHERNET;
        let grh = sys::GlobalRoute {
            dgid: peer.gid,
            flow_label: 0,
            // Tables have at most 255 entries that an address handle can name.
            sgid_index: self.device.gid_index()? as u8,
            hop_limit: HOPS,
            traffic_class: options.traffic_class,
        };
        Ok(sys::AhAttr {
            grh,
            dlid: peer.lid,
            sl: options.service_level,
            is_global: u8::from(ethernet),
            port_num: options.port,
            ..Default::default()
        })
    }

    fn modify(&self, mut attr: sys::QpAttr, mask: i32, step: &'static str) -> Result<(), Error> {
        let qp = self.qp.ok_or(Error::Broken)?;
        // SAFETY: the queue pair is open, and the attributes outlive the call.
        check(unsafe { (self.device.verbs.modify_qp)(qp.as_ptr(), &mut attr, mask) })
            .map_err(self.device.failed(step))
    }
}

/// Creates a queue pair, without inline data if the device has none; returns how much it has.
fn create(
    device: &Arc<Device>,
    cq: &CompletionQueue,
    options: &QueueOptions,
) -> Result<(NonNull<sys::Qp>, u32), Error> {
    let mut last = io::Error::from(io::ErrorKind::InvalidInput);
    for inline_bytes in [options.inline_bytes, 0] {
        let mut attr = sys::QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: cq.as_ptr(),
            recv_cq: cq.as_ptr(),
            srq: ptr::null_mut(),
            cap: sys::QpCap {
                max_send_wr: options.depth,
                max_recv_wr: 1,
                max_send_sge: options.pieces,
                max_recv_sge: 1,
                max_inline_data: inline_bytes,
            },
            qp_type: sys::QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: domain and queue are open; the attributes outlive the call.
        let qp = unsafe { (device.verbs.create_qp)(device.pd.as_ptr(), &mut attr) };
        match NonNull::new(qp) {
            Some(qp) => return Ok((qp, inline_bytes)),
            None => last = io::Error::last_os_error(),
        }
    }
    Err(device.failed("creating a queue pair")(last))
}
