//! One side of a connection, as small as a test wants it.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvasir_memory::buffer::Buffer;
use kvasir_memory::region::Region;
use kvasir_net::transport::Access;
use kvasir_net::transport::rdma::connect::{Connection, Epochs, connect};
use kvasir_net::transport::rdma::cq::Channel;
use kvasir_net::transport::rdma::qp::{Completion, Piece, QueueOptions, Request, Served, Verb};
use kvasir_net::transport::rdma::{Device, DeviceOptions, Failure, MemoryRegion};

/// Beyond what the slowest emulated machine needs; only a hang takes so long.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

/// An emulated processor may stand still for longer than the half second after which a real adapter is given up: here a silent
/// peer is one that says nothing for seven times a second.
pub(crate) fn patient() -> QueueOptions {
    QueueOptions { ack_timeout: 18, ..QueueOptions::default() }
}

/// A device, memory and a channel for completions. Clones share them.
#[derive(Clone)]
pub(crate) struct Side {
    pub(crate) device: Arc<Device>,
    pub(crate) channel: Arc<Channel>,
    pub(crate) memory: Region,
    pub(crate) region: Arc<MemoryRegion>,
}

impl Side {
    /// On the `n`-th device of `RDMA_DEVICES`, with memory of its own.
    pub(crate) fn new(n: usize, bytes: usize, access: Option<Access>) -> Self {
        let names = std::env::var("RDMA_DEVICES").expect("RDMA_DEVICES names two devices");
        let name = names.split_whitespace().nth(n).expect("RDMA_DEVICES names two devices");
        let device = Device::open(name, DeviceOptions::default()).unwrap();
        let channel = Channel::new(&device).unwrap();
        let memory = Region::of_buffer(Buffer::zeroed(bytes));
        let region = MemoryRegion::new(&device, &memory, access).unwrap();
        Self { device, channel, memory, region }
    }

    pub(crate) fn fill(&self, offset: u64, bytes: &[u8]) {
        let range = self.memory.range(offset, bytes.len() as u64).unwrap();
        assert_eq!(range.copy_in(bytes), bytes.len());
    }

    pub(crate) fn bytes(&self, offset: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.memory.range(offset, len).unwrap().copy_out(&mut bytes);
        bytes
    }

    pub(crate) fn piece(&self, offset: u64, len: u32) -> Piece {
        Piece { region: Arc::clone(&self.region), offset, len }
    }

    /// A request between pieces of ours and `peer`'s region from `at` on.
    pub(crate) fn request(&self, verb: Verb, local: Vec<Piece>, peer: &MemoryRegion, at: u64) -> Request {
        let (remote_address, remote_key) = (peer.address() + at, peer.remote_key());
        Request { token: 0, verb, local, remote_address, remote_key }
    }

    pub(crate) fn connect(&self, control: &mut (impl Read + Write)) -> Connection {
        let epochs = Epochs { ours: 1, fence: 1 };
        connect(&self.device, &self.channel, 1, patient(), epochs, control).unwrap()
    }

    /// Waits, asleep, until `count` requests are done.
    pub(crate) fn finish(&self, connection: &Connection, count: usize) -> Vec<Completion> {
        let (mut done, start) = (Vec::new(), Instant::now());
        loop {
            while connection.queue.serve(&mut done).unwrap() == Served::Busy {}
            if done.len() >= count {
                return done;
            }
            assert!(start.elapsed() < DEADLINE, "{} of {count} completions after {DEADLINE:?}", done.len());
            self.channel.wait(None, Duration::from_secs(1)).unwrap();
        }
    }

    /// Posts and waits for the end of one request.
    pub(crate) fn run(&self, connection: &Connection, request: Request) -> Result<(), Failure> {
        connection.queue.post(vec![request]).map_err(|refused| refused.error).unwrap();
        self.finish(connection, 1).remove(0).result
    }
}

/// Two sides, connected to each other.
pub(crate) fn pair(bytes: usize, access: Option<Access>) -> [(Side, Connection); 2] {
    let (a, b) = (Side::new(0, bytes, access), Side::new(1, bytes, access));
    let (to_a, to_b) = join(&a, &b);
    [(a, to_b), (b, to_a)]
}

/// Connects two sides of one process: (b's connection to a, a's connection to b).
pub(crate) fn join(a: &Side, b: &Side) -> (Connection, Connection) {
    let (mut left, mut right) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| b.connect(&mut right));
        let to_b = a.connect(&mut left);
        (other.join().unwrap(), to_b)
    })
}

/// Bytes that differ from their neighbours and between seeds.
pub(crate) fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|n| ((n * 31) ^ (n >> 8) ^ (seed * 97)) as u8).collect()
}
