//! An endpoint whose operations are carried out by its own threads, so that a copy does not hold up the submitter.
//!
//! One thread per direction works its operations off in order. Everything else is done by the endpoint below, whose
//! [`submit`](Endpoint::submit) completes what it is given before it returns.

use kvasir_os::thread;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use super::{Cancel, Completion, Direction, Endpoint, Error, Grant, Mapped, Op, OpError, RemoteRange, Sink};

/// An operation, and the sink that is told of its end.
type Job = (Op, Arc<dyn Sink>);

pub struct Queued {
    below: Arc<dyn Endpoint>,
    reads: Sender<Job>,
    writes: Sender<Job>,
    in_flight: Arc<AtomicUsize>,
    /// The most operations in flight.
    depth: usize,
}

impl Queued {
    pub fn new(below: Arc<dyn Endpoint>, depth: usize) -> io::Result<Self> {
        let (reads, writes) = (worker(&below, "kvasir-reads")?, worker(&below, "kvasir-writes")?);
        Ok(Self { below, reads, writes, in_flight: Arc::default(), depth })
    }

    /// Takes a place in the queue, if there is one.
    fn enter(&self) -> bool {
        let entered = |held: usize| (held < self.depth).then_some(held + 1);
        self.in_flight.fetch_update(Ordering::AcqRel, Ordering::Acquire, entered).is_ok()
    }
}

fn worker(below: &Arc<dyn Endpoint>, name: &str) -> io::Result<Sender<Job>> {
    let (sender, jobs): (_, Receiver<Job>) = channel();
    let below = below.clone();
    let run = move || jobs.into_iter().for_each(|(op, sink)| below.submit(vec![op], &sink));
    thread::Builder::new().name(name.into()).spawn(run)?;
    Ok(sender)
}

/// Leaves the queue before its end is reported, so that a caller that hears of it can submit another.
struct Leaving {
    in_flight: Arc<AtomicUsize>,
    sink: Arc<dyn Sink>,
}

impl Sink for Leaving {
    fn complete(&self, completion: Completion) {
        self.in_flight.fetch_sub(1, Ordering::AcqRel);
        self.sink.complete(completion);
    }
}

impl Endpoint for Queued {
    fn peer(&self) -> &str {
        self.below.peer()
    }

    fn open(&self, segment: &str) -> Result<Arc<Grant>, Error> {
        self.below.open(segment)
    }

    fn submit(&self, ops: Vec<Op>, sink: &Arc<dyn Sink>) {
        for op in ops {
            if !self.enter() {
                let (id, full) = (op.id, OpError::QueueFull { limit: self.depth });
                drop(op);
                sink.complete(Completion::failed(id, 0, full));
                continue;
            }
            let queue = match op.direction {
                Direction::Read => &self.reads,
                Direction::Write => &self.writes,
            };
            let leaving = Leaving { in_flight: self.in_flight.clone(), sink: sink.clone() };
            if let Err(unsent) = queue.send((op, Arc::new(leaving))) {
                // Happens only if the thread is gone, which takes a panic of a sink.
                let (op, leaving) = unsent.0;
                let (peer, reason) = (self.peer().to_owned(), "its thread ended".to_owned());
                leaving.complete(Completion::failed(op.id, 0, OpError::PeerDown { peer, reason }));
            }
        }
    }

    fn cancel(&self, cancel: &Cancel) {
        self.below.cancel(cancel);
    }

    fn notify(&self, message: &[u8]) -> Result<(), Error> {
        self.below.notify(message)
    }

    fn map(&self, grant: &Grant, range: RemoteRange) -> Result<Mapped, Error> {
        self.below.map(grant, range)
    }

    fn down(&self) -> Option<String> {
        self.below.down()
    }

    fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Acquire)
    }

    /// What waits in the queue completes with [`OpError::PeerDown`] when its turn comes, which is at once.
    fn close(&self) {
        self.below.close();
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        // The threads end once the queues are empty. They are not waited for: this may be one of them.
        self.below.close();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::transport::conformance::{self, Pair};
    use crate::transport::node::Secret;
    use crate::transport::shm::{Shm, ShmConfig};
    use crate::transport::{Capabilities, Node, Transport};
    use kvasir_memory::region::Region;

    const DEPTH: usize = 64;

    /// Shared memory, whose copies the submitter makes, with threads that make them instead.
    struct Apart(Shm);

    impl Transport for Apart {
        fn capabilities(&self) -> Capabilities {
            Capabilities { queue_depth: DEPTH, ..self.0.capabilities() }
        }
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
            let queued = Queued::new(self.0.connect(address)?, DEPTH);
            Ok(Arc::new(queued.unwrap()))
        }
    }

    #[test]
    fn keeps_the_rules() {
        let dir = tempfile::tempdir().unwrap();
        conformance::run(&|| {
            let node = |name| Arc::new(Node::new(name, Secret::new(b"secret"), 1));
            let (client_node, server_node) = (node("client"), node("server"));
            let config = ShmConfig { listen: None, timeout: Duration::from_secs(120) };
            let listening = ShmConfig { listen: Some(dir.path().join("queued.sock")), ..config.clone() };
            let server = Arc::new(Shm::new(server_node.clone(), listening).unwrap());
            let client = Arc::new(Apart(Shm::new(client_node.clone(), config).unwrap()));
            let vanishing = server.clone();
            Pair { client_node, server_node, client, server, kill: Arc::new(move || vanishing.shut_down()) }
        });
    }
}
