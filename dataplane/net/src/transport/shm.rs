//! Nodes of one host that share memory: bytes do not travel at all.
//!
//! Opening a segment maps the peer's memory here. [`Endpoint::map`] then lends the peer's bytes in place; an operation
//! is one copy. Only regions with a descriptor (pools) can be opened; the link itself is that of `local`. A read-only
//! grant comes as a descriptor that cannot be mapped for writing.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::grant::RemoteRegion;
pub use super::local::LocalConfig as ShmConfig;
use super::local::{Local, Reach, Taken, descriptor};
use super::{Access, Capabilities, Direction, Endpoint, Error, Node, OpError, Transport};
use kvasir_memory::region::{LocalRange, Region, copy_ranges};

const NAME: &str = "shm";
/// Bytes copied between two checks whether to go on.
const CHUNK: u64 = 1 << 20;

/// The transport between nodes of one host, by shared memory.
pub struct Shm(Local);

impl Shm {
    /// Starts to listen, if the configuration says so.
    pub fn new(node: Arc<Node>, config: ShmConfig) -> io::Result<Self> {
        Local::new(node, Arc::new(Mapped), config).map(Self)
    }

    /// Stops listening and ends accepted connections: peers then find this node down.
    pub fn shut_down(&self) {
        self.0.shut_down();
    }
}

impl Transport for Shm {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
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
        self.0.connect(address)
    }
}

/// Memory of the host, mapped by both sides.
struct Mapped;

impl Reach for Mapped {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: NAME,
            one_sided: true,
            zero_copy: true,
            message_bytes_max: u64::MAX,
            ranges_max: usize::MAX,
            queue_depth: usize::MAX,
            needs_registration: false,
            host_memory: true,
            cuda_memory: false,
        }
    }

    fn register(&self, region: &Region) -> Result<(), Error> {
        if region.location().is_host() {
            return Ok(());
        }
        let reason = "only memory of the host can be mapped and copied".to_owned();
        Err(Error::Register { transport: NAME, region: format!("{region:?}"), reason })
    }

    fn unregister(&self, _region: &Region) {}

    fn give(&self, region: &Region, access: Access) -> Option<OwnedFd> {
        descriptor(region, access)
    }

    fn take(&self, fd: OwnedFd, region: &RemoteRegion, writable: bool) -> io::Result<Taken> {
        Taken::mapped(&fd, region, writable)
    }

    fn copy(
        &self,
        _direction: Direction,
        from: &[LocalRange],
        to: &[LocalRange],
        go_on: &mut dyn FnMut() -> Result<(), OpError>,
    ) -> (u64, Result<(), OpError>) {
        copy_ranges(from, to, CHUNK, go_on)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::*;
    use crate::transport::Denied;
    use crate::transport::conformance::{self, Pair};
    use crate::transport::local::SLOTS;
    use crate::transport::node::Secret;
    use kvasir_memory::buffer::Buffer;
    use kvasir_memory::host::HostPool;

    const HOUR: Duration = Duration::from_secs(3600);

    fn node(name: &str) -> Arc<Node> {
        Arc::new(Node::new(name, Secret::new(b"secret"), 1))
    }

    fn server(dir: &Path) -> (Arc<Node>, Arc<Shm>) {
        let node = node("server");
        let listen = Some(dir.join("shm.sock"));
        let config = ShmConfig { listen, timeout: Duration::from_secs(120) };
        (node.clone(), Arc::new(Shm::new(node, config).unwrap()))
    }

    fn client() -> Arc<Shm> {
        let config = ShmConfig { timeout: Duration::from_secs(120), ..ShmConfig::default() };
        Arc::new(Shm::new(node("client"), config).unwrap())
    }

    #[test]
    fn keeps_the_rules() {
        let dir = tempfile::tempdir().unwrap();
        conformance::run(&|| {
            let (server_node, server) = server(dir.path());
            let (client, vanishing) = (client(), server.clone());
            let kill = Arc::new(move || vanishing.shut_down());
            Pair { client_node: client.0.node.clone(), server_node, client, server, kill }
        });
    }

    #[test]
    fn who_is_no_member_is_turned_away() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name: &str, cluster: &str| {
            Arc::new(Node::new(name, Secret::new(b"secret"), 1).of_cluster(cluster, ["client".to_owned()]))
        };
        let config = |listen| ShmConfig { listen, timeout: Duration::from_secs(120) };
        let server_node = of("server", "one");
        let pool = Region::of_pool(Arc::new(HostPool::new(4096, false).unwrap()));
        server_node.exports.export("kv", vec![pool], Access::Read, HOUR).unwrap();
        let server = Shm::new(server_node, config(Some(dir.path().join("shm.sock")))).unwrap();
        let open = |node| {
            let client = Shm::new(node, config(None)).unwrap();
            client.connect(&server.address().unwrap()).and_then(|endpoint| endpoint.open("kv"))
        };
        assert!(open(of("client", "one")).is_ok());
        assert!(open(of("removed", "one")).is_err());
        assert!(matches!(open(of("client", "two")), Err(Error::Authentication { .. })));
    }

    #[test]
    fn mapped_bytes_are_the_peers_own() {
        let dir = tempfile::tempdir().unwrap();
        let (node, server) = server(dir.path());
        let pool = Arc::new(HostPool::new(1 << 20, false).unwrap());
        node.exports.export("kv", vec![Region::of_pool(pool.clone())], Access::Read, HOUR).unwrap();
        node.exports.export("heap", vec![Region::of_buffer(Buffer::zeroed(64))], Access::Read, HOUR).unwrap();
        let endpoint = client().connect(&server.address().unwrap()).unwrap();
        let grant = endpoint.open("kv").unwrap();
        let mapped = endpoint.map(&grant, grant.range(4096, 5)).unwrap();
        assert_eq!(mapped.bytes(), vec![0; 5]);
        pool.mapping().write(4096, b"later");
        assert_eq!(mapped.bytes(), &b"later"[..], "no copy was made");
        assert!(endpoint.map(&grant, grant.range(1 << 20, 1)).is_err());
        let heap = endpoint.open("heap").err();
        assert!(matches!(heap, Some(Error::Denied { denied: Denied::Unreachable, .. })), "{heap:?}");

        node.exports.revoke("kv");
        assert!(endpoint.map(&grant, grant.range(4096, 5)).is_err(), "nothing new after revocation");
        drop((server, pool));
        assert_eq!(mapped.bytes(), &b"later"[..], "what is mapped stays");
    }

    #[test]
    fn slots_of_dead_grants_are_used_again() {
        let dir = tempfile::tempdir().unwrap();
        let (node, server) = server(dir.path());
        let pool = Region::of_pool(Arc::new(HostPool::new(4096, false).unwrap()));
        node.exports.export("kv", vec![pool], Access::Read, HOUR).unwrap();
        let endpoint = client().connect(&server.address().unwrap()).unwrap();
        let first = endpoint.open("kv").unwrap();
        for _ in 1..SLOTS {
            endpoint.open("kv").unwrap();
        }
        assert!(matches!(endpoint.open("kv"), Err(Error::Denied { denied: Denied::Full, .. })));
        node.exports.fence();
        let again = endpoint.open("kv").unwrap();
        assert!(endpoint.map(&again, again.range(0, 1)).is_ok());
        assert!(endpoint.map(&first, first.range(0, 1)).is_err(), "its word says another grant");
    }
}
