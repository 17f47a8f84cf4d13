//! The peer: a process that exports memory on two rails until it is killed.

use std::io::{BufRead, BufReader, Lines, Read};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvasir_memory::buffer::Buffer;
use kvasir_memory::region::Region;
use kvasir_net::transport::node::{Node, Secret};
use kvasir_net::transport::tcp::{Tcp, TcpConfig};
use kvasir_net::transport::{Access, Transport};
use rustix::process::{Pid, Signal};

/// What the peer exports: bytes to read, then as many to write to.
pub(crate) const READABLE: u64 = 4 << 20;
pub(crate) const WRITABLE: u64 = 4 << 20;

const ADDRESSES: &str = "KVASIR_SOAK_ADDRESSES";
const EPOCH: &str = "KVASIR_SOAK_EPOCH";
const READY: &str = "ready ";

/// Bytes that follow from a seed: `len` from `offset` on.
pub(crate) fn content(seed: u64, offset: u64, len: u64) -> Vec<u8> {
    let mixed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let byte = |at: u64| (at ^ (at >> 8) ^ (at >> 16)) as u8 ^ (mixed >> ((at >> 3) % 56)) as u8;
    (offset..offset + len).map(byte).collect()
}

/// Serves, if this process was started to.
pub(crate) fn serve_if_asked() {
    let (Ok(addresses), Ok(epoch)) = (std::env::var(ADDRESSES), std::env::var(EPOCH)) else { return };
    let epoch: u64 = epoch.parse().unwrap();
    let node = Arc::new(Node::new("mortal", Secret::new(b"soak"), epoch));
    let memory = Region::of_buffer(Buffer::zeroed((READABLE + WRITABLE) as usize));
    memory.range(0, READABLE).unwrap().copy_in(&content(epoch, 0, READABLE));
    node.exports.export("kv", vec![memory], Access::ReadWrite, Duration::from_secs(30)).unwrap();
    let rails: Vec<Tcp> =
        addresses.split(',').map(|address| listen(&node, address.parse().unwrap())).collect();
    let addresses: Vec<String> = rails.iter().filter_map(|rail| rail.address()).collect();
    println!("{READY}{}", addresses.join(","));
    // Ends with the process that started it, if not before.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

fn listen(node: &Arc<Node>, address: SocketAddr) -> Tcp {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let config = TcpConfig { listen: Some(address), ..TcpConfig::default() };
        match Tcp::new(node.clone(), config) {
            Ok(tcp) => return tcp,
            // The previous owner may not be completely gone yet.
            Err(error) => assert!(Instant::now() < deadline, "{address}: {error}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The peer's process, and how it is reached.
pub(crate) struct PeerProcess {
    pub(crate) addresses: Vec<String>,
    pub(crate) epoch: u64,
    life: Life,
}

/// A process, and what it says: if nobody listened any more, the test harness in it would end it.
type Life = (Child, Lines<BufReader<ChildStdout>>);

impl PeerProcess {
    pub(crate) fn start() -> Self {
        // An address that nothing else here connects from, so that its ports stay free while the peer is dead.
        let id = std::process::id().to_le_bytes();
        let listen = format!("127.{}.{}.77:0", 1 + id[1] % 250, id[0]);
        let (life, addresses) = spawn(&format!("{listen},{listen}"), 1);
        Self { addresses, epoch: 1, life }
    }

    /// It does nothing from here on, and its connections stay.
    pub(crate) fn stop(&self) {
        rustix::process::kill_process(Pid::from_child(&self.life.0), Signal::STOP).unwrap();
    }

    pub(crate) fn kill(&mut self) {
        self.life.0.kill().unwrap();
        self.life.0.wait().unwrap();
    }

    /// Starts it again at the same addresses, with other bytes.
    pub(crate) fn restart(&mut self) {
        self.epoch += 1;
        self.life = spawn(&self.addresses.join(","), self.epoch).0;
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        // It may have been killed before.
        let _ = self.life.0.kill();
        let _ = self.life.0.wait();
    }
}

fn spawn(addresses: &str, epoch: u64) -> (Life, Vec<String>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "serve", "--nocapture"])
        .envs([(ADDRESSES, addresses), (EPOCH, &epoch.to_string())])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // The test harness prints, too.
    let ready =
        lines.by_ref().map_while(Result::ok).find_map(|line| Some(line.split_once(READY)?.1.to_owned()));
    let addresses = ready.expect("the peer's process ended early").split(',').map(str::to_owned).collect();
    ((child, lines), addresses)
}
