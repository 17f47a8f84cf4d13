//! Nodes of one host whose memory is on GPUs as well: copies between host and device, and between devices.
//!
//! The link is that of `local`. Memory of the host is mapped and registered with the driver; memory of a GPU is opened
//! by the driver's handle, so that an engine's cache in another process is reached without a copy between. An operation
//! is a list of copies in the stream of its direction, begun and waited for by the endpoint's thread of that direction;
//! what ends it is an event after the last. A GPU's memory has no read-only form: that a grant allows only reading is a
//! rule that both nodes keep, not a wall.
//!
//! Ranges in host memory on both sides are copied by the processor.
#![allow(unsafe_code)]

mod ticket;

use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use self::ticket::Ticket;
use crate::memory::{CudaError, Device, Event, Pinned, Stream};
use kvasir_memory::region::{LocalRange, Region, pairs};
use kvasir_net::transport::grant::RemoteRegion;
pub use kvasir_net::transport::local::LocalConfig as CudaConfig;
use kvasir_net::transport::local::{Local, Reach, Taken, descriptor};
use kvasir_net::transport::queued::Queued;
use kvasir_net::transport::{Access, Capabilities, Direction, Endpoint, Error, Node, OpError, Transport};

const NAME: &str = "cuda";
/// Bytes that are copied between two checks for cancellation. They take about 150 µs on a bus of 50 GB/s, and waiting for them
/// costs about 10 µs.
const CHUNK: u64 = 8 << 20;
/// Operations of one endpoint in flight.
const DEPTH: usize = 4096;
/// Chunks under way at once, so that the bus is busy while one is waited for.
const CHUNKS: usize = 2;

/// Why the transport could not be made.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("the socket of the CUDA transport could not be set up: {0}")]
    Socket(#[from] io::Error),
}

/// The transport between nodes of one host, over one GPU's copy engines.
pub struct Cuda(Local);

impl Cuda {
    /// Starts to listen, if the configuration says so.
    ///
    /// # Errors
    /// What the driver or the socket says.
    pub fn new(node: Arc<Node>, device: &Arc<Device>, config: CudaConfig) -> Result<Self, OpenError> {
        let reach = DeviceReach {
            device: device.clone(),
            reads: Stream::new(device)?,
            writes: Stream::new(device)?,
            pinned: Mutex::default(),
        };
        Ok(Self(Local::new(node, Arc::new(reach), config)?))
    }

    /// Stops listening and ends accepted connections: peers find this node down.
    pub fn shut_down(&self) {
        self.0.shut_down();
    }
}

impl Transport for Cuda {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    /// Page-locks memory of the host, which makes copies of it fast; they also work without.
    fn register(&self, region: &Region) -> Result<(), Error> {
        self.0.register(region)
    }

    fn unregister(&self, region: &Region) {
        self.0.unregister(region);
    }

    fn address(&self) -> Option<String> {
        self.0.address()
    }

    fn connect(&self, address: &str) -> Result<Arc<dyn Endpoint>, Error> {
        let unreachable = |error: io::Error| Error::Unreachable {
            transport: NAME,
            address: address.to_owned(),
            reason: error.to_string(),
        };
        Ok(Arc::new(Queued::new(self.0.connect(address)?, DEPTH).map_err(unreachable)?))
    }
}

/// Memory of the host and of GPUs, copied by one GPU.
struct DeviceReach {
    device: Arc<Device>,
    reads: Stream,
    writes: Stream,
    /// What [`Reach::register`] registered, by region.
    pinned: Mutex<HashMap<u64, Pinned>>,
}

impl DeviceReach {
    /// Begins a copy. If both sides are memory of the host, the copy is made at once.
    fn begin(&self, stream: &Stream, from: &LocalRange, to: &LocalRange) -> Result<(), CudaError> {
        if from.region().location().is_host() && to.region().location().is_host() {
            to.copy_from(from);
            return Ok(());
        }
        // SAFETY: both ranges are equally long and belong to regions, which `copy` holds until it has drained the stream.
        unsafe { stream.copy(to.address() as u64, from.address() as u64, from.len() as usize) }
    }

    /// Begins all copies, with a check of `go_on` before each chunk and at most [`CHUNKS`] under way. Adds what was
    /// begun to `begun`, and what is complete to `complete`.
    fn begin_all(
        &self,
        stream: &Stream,
        pairs: impl Iterator<Item = (LocalRange, LocalRange)>,
        go_on: &mut dyn FnMut() -> Result<(), OpError>,
        (begun, complete): (&mut u64, &mut u64),
    ) -> Result<(), OpError> {
        let mut chunks: VecDeque<(u64, Event)> = VecDeque::new();
        let mut unmarked = 0;
        for (from, to) in pairs {
            if unmarked == 0 {
                go_on()?;
            }
            self.begin(stream, &from, &to).map_err(failed)?;
            *begun += from.len();
            unmarked += from.len();
            if unmarked < CHUNK {
                continue;
            }
            unmarked = 0;
            chunks.push_back((*begun, stream.mark().map_err(failed)?));
            if chunks.len() == CHUNKS
                && let Some((bytes, event)) = chunks.pop_front()
            {
                event.wait().map_err(failed)?;
                *complete = bytes;
            }
        }
        Ok(())
    }
}

fn failed(error: CudaError) -> OpError {
    OpError::Device { reason: error.to_string() }
}

impl Reach for DeviceReach {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: NAME,
            one_sided: true,
            zero_copy: false,
            message_bytes_max: u64::MAX,
            ranges_max: usize::MAX,
            queue_depth: DEPTH,
            needs_registration: false,
            host_memory: true,
            cuda_memory: true,
        }
    }

    fn register(&self, region: &Region) -> Result<(), Error> {
        let known = self.device.is_pinned(region.base().as_ptr(), region.len() as usize);
        if !region.location().is_host() || known {
            return Ok(());
        }
        let pinned = Pinned::new(&self.device, region).map_err(|error| Error::Register {
            transport: NAME,
            region: format!("{region:?}"),
            reason: error.to_string(),
        })?;
        self.pinned.lock().insert(region.id(), pinned);
        Ok(())
    }

    fn unregister(&self, region: &Region) {
        let gone = self.pinned.lock().remove(&region.id());
        // Dropped after the lock is released, because it waits for copies.
        drop(gone);
    }

    fn give(&self, region: &Region, access: Access) -> Option<OwnedFd> {
        if region.location().is_host() { descriptor(region, access) } else { Ticket::of(region).send().ok() }
    }

    fn take(&self, fd: OwnedFd, region: &RemoteRegion, writable: bool) -> io::Result<Taken> {
        if !region.location.is_host() {
            let region = Ticket::receive(fd)?.open(&self.device, region.len)?;
            return Ok(Taken { region, mapping: None });
        }
        let mut taken = Taken::mapped(&fd, region, writable)?;
        if let Ok(pinned) = Pinned::new(&self.device, &taken.region) {
            taken.region = pinned.into_region();
        }
        // Otherwise it is read-only, or larger than may be locked: copies go through a buffer of the driver.
        Ok(taken)
    }

    fn copy(
        &self,
        direction: Direction,
        from: &[LocalRange],
        to: &[LocalRange],
        go_on: &mut dyn FnMut() -> Result<(), OpError>,
    ) -> (u64, Result<(), OpError>) {
        let stream = match direction {
            Direction::Read => &self.reads,
            Direction::Write => &self.writes,
        };
        let (mut begun, mut complete) = (0, 0);
        let result = self.begin_all(stream, pairs(from, to, CHUNK), go_on, (&mut begun, &mut complete));
        match stream.drain() {
            // Everything that was begun, in order, is in place.
            Ok(()) => (begun, result),
            Err(error) => (complete, result.and(Err(failed(error)))),
        }
    }
}

#[cfg(test)]
mod gpu {
    use std::io::{BufRead, BufReader, Write};
    use std::path::Path;
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::memory::DevicePool;
    use crate::memory::gpu::careless::order;
    use cudarc::driver::sys::CUresult;
    use kvasir_memory::host::HostPool;
    use kvasir_net::transport::conformance::{self, Pair, Place, Side};
    use kvasir_net::transport::node::Secret;
    use kvasir_net::transport::{CompletionQueue, Op};

    const PATIENCE: Duration = Duration::from_secs(120);
    const HOUR: Duration = Duration::from_secs(3600);

    fn node(name: &str) -> Arc<Node> {
        Arc::new(Node::new(name, Secret::new(b"secret"), 1))
    }

    fn transport(node: &Arc<Node>, device: &Arc<Device>, listen: Option<&Path>) -> Arc<Cuda> {
        let config = CudaConfig { listen: listen.map(Into::into), timeout: PATIENCE };
        Arc::new(Cuda::new(node.clone(), device, config).unwrap())
    }

    fn pair([ours, theirs]: [&Arc<Device>; 2], dir: &Path) -> Pair {
        let (client_node, server_node) = (node("client"), node("server"));
        let server = transport(&server_node, theirs, Some(&dir.join("cuda.sock")));
        let client = transport(&client_node, ours, None);
        let vanishing = server.clone();
        Pair { client_node, server_node, client, server, kill: Arc::new(move || vanishing.shut_down()) }
    }

    fn keeps_the_rules(on_device: &'static [Side]) {
        let (device, dir) = (Device::open(0).unwrap(), tempfile::tempdir().unwrap());
        let there = device.clone();
        let place: Place = Arc::new(move |side, bytes| {
            if on_device.contains(&side) {
                DevicePool::open(&there, bytes).unwrap().region()
            } else {
                Region::of_pool(Arc::new(HostPool::new(bytes, false).unwrap()))
            }
        });
        conformance::run_in(&|| pair([&device, &device], dir.path()), &place);
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn keeps_the_rules_between_host_and_device() {
        keeps_the_rules(&[Side::Server]);
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn keeps_the_rules_between_device_and_host() {
        keeps_the_rules(&[Side::Client]);
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn keeps_the_rules_between_devices() {
        keeps_the_rules(&[Side::Client, Side::Server]);
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn keeps_the_rules_on_the_host() {
        keeps_the_rules(&[]);
    }

    /// One server per GPU, each with its memory there.
    #[test]
    #[ignore = "needs a CUDA device"]
    fn keeps_the_rules_between_two_gpus() {
        if crate::memory::devices().unwrap().len() < 2 {
            println!("skipped: this machine has one GPU");
            return;
        }
        let (devices, dir) = ([0, 1].map(|n| Device::open(n).unwrap()), tempfile::tempdir().unwrap());
        let [ours, theirs] = devices.clone();
        let place: Place = Arc::new(move |side, bytes| {
            let device = if side == Side::Client { &ours } else { &theirs };
            DevicePool::open(device, bytes).unwrap().region()
        });
        let [ours, theirs] = &devices;
        conformance::run_in(&|| pair([ours, theirs], dir.path()), &place);
    }

    const SOCKET: &str = "KVASIR_GPU_TRANSPORT";
    const BYTES: u64 = 20 << 20;

    fn pattern(seed: u64) -> Vec<u8> {
        (0..BYTES).map(|i| ((i ^ seed << 20).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
    }

    fn other_node(socket: &Path) -> Child {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                &crate::test_named(module_path!(), "the_other_node"),
                "--ignored",
                "--nocapture",
            ])
            .env(SOCKET, socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ready = lines.map_while(Result::ok).any(|line| line.contains("the other node listens"));
        assert!(ready, "the other process ended early");
        child
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn a_copy_that_the_driver_refuses_fails_its_operation_alone() {
        let (device, dir) = (Device::open(0).unwrap(), tempfile::tempdir().unwrap());
        let Pair { server_node, client, server, .. } = pair([&device, &device], dir.path());
        let theirs = DevicePool::open(&device, BYTES).unwrap().region();
        let ours = DevicePool::open(&device, BYTES).unwrap().region();
        theirs.range(0, BYTES).unwrap().copy_in(&pattern(1));
        server_node.exports.export("kv", vec![theirs], Access::ReadWrite, HOUR).unwrap();
        let endpoint = client.connect(&server.address().unwrap()).unwrap();
        let grant = endpoint.open("kv").unwrap();
        let queue = CompletionQueue::new();
        let read = || {
            let (local, remote) = (vec![ours.range(0, BYTES).unwrap()], vec![grant.range(0, BYTES)]);
            let op =
                Op { id: 1, direction: Direction::Read, grant: grant.clone(), local, remote, cancel: None };
            endpoint.submit(vec![op], &queue.sink());
            queue.wait(Instant::now() + PATIENCE).unwrap().result
        };
        for (refused, after) in [("cuMemcpyAsync", 0), ("cuMemcpyAsync", 2), ("cuEventRecord", 1)] {
            if !order(refused, after, CUresult::CUDA_ERROR_OUT_OF_MEMORY) {
                return;
            }
            assert!(matches!(read(), Err(OpError::Device { .. })), "{refused}");
        }
        assert_eq!(read(), Ok(()));
        let mut found = vec![0; BYTES as usize];
        ours.range(0, BYTES).unwrap().copy_out(&mut found);
        assert!(found == pattern(1));
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn another_process_is_reached_until_it_is_killed() {
        let (device, dir) = (Device::open(0).unwrap(), tempfile::tempdir().unwrap());
        let socket = dir.path().join("cuda.sock");
        let mut other = other_node(&socket);
        let endpoint = transport(&node("client"), &device, None).connect(socket.to_str().unwrap()).unwrap();
        let grant = endpoint.open("kv").unwrap();
        let ours = DevicePool::open(&device, BYTES).unwrap().region();
        let queue = CompletionQueue::new();
        let run = |direction| {
            let (local, remote) = (vec![ours.range(0, BYTES).unwrap()], vec![grant.range(0, BYTES)]);
            let op = Op { id: 1, direction, grant: grant.clone(), local, remote, cancel: None };
            endpoint.submit(vec![op], &queue.sink());
            queue.wait(Instant::now() + PATIENCE).unwrap().result
        };
        assert_eq!(run(Direction::Read), Ok(()));
        let mut found = vec![0; BYTES as usize];
        ours.range(0, BYTES).unwrap().copy_out(&mut found);
        assert!(found == pattern(1), "what the other process put on the device");
        ours.range(0, BYTES).unwrap().copy_in(&pattern(2));
        assert_eq!(run(Direction::Write), Ok(()));
        ours.range(0, BYTES).unwrap().copy_in(&pattern(3));
        assert_eq!(run(Direction::Read), Ok(()));
        ours.range(0, BYTES).unwrap().copy_out(&mut found);
        assert!(found == pattern(2), "what was written is there");

        other.kill().unwrap();
        other.wait().unwrap();
        assert!(matches!(run(Direction::Read), Err(OpError::PeerDown { .. })));
    }

    /// The other half of the test above. Does nothing when it is run by itself.
    #[test]
    #[ignore = "needs a CUDA device"]
    fn the_other_node() {
        let Ok(socket) = std::env::var(SOCKET) else { return };
        let (device, node) = (Device::open(0).unwrap(), node("server"));
        let region = DevicePool::open(&device, BYTES).unwrap().region();
        region.range(0, BYTES).unwrap().copy_in(&pattern(1));
        node.exports.export("kv", vec![region], Access::ReadWrite, HOUR).unwrap();
        let _server = transport(&node, &device, Some(Path::new(&socket)));
        println!("the other node listens");
        io::stdout().flush().unwrap();
        // Until the other side kills this process, or is gone itself.
        let _ = io::stdin().read_line(&mut String::new());
    }
}
