//! A client that asks for much and reads little of it: what it is sent must not be kept for it for ever.

use std::io::{Read, Write};

use kvasir_os::net::{SocketAddr, TcpStream};
use kvasir_os::thread;
use kvasir_os::time::Duration;
use kvasir_os::world::{self, Chance};
use kvasir_protocol::wire::{Request, VERSIONS};

use crate::model::key;

/// Blocks that it asks for: more bytes than the network and the sockets take in.
const BLOCKS: usize = 160;
const CONNECT: Duration = Duration::from_secs(2);
const READ: usize = 4096;
const READS: u64 = 12;
const PAUSE_MS: u64 = 900;

/// Asks a host for these blocks, again and again, takes the answer slowly, and goes away in the middle of it.
pub(crate) fn read_slowly(at: SocketAddr, token: String, blocks: &[u32], chance: &mut Chance) {
    let Ok(mut stream) = TcpStream::connect_timeout(&at, CONNECT) else { return };
    let hello = Request::Hello {
        versions: VERSIONS,
        wants_write: false,
        wants_ring: false,
        tenant: 0,
        namespace: String::new(),
        token,
    };
    let keys =
        blocks.iter().cycle().take(if blocks.is_empty() { 0 } else { BLOCKS }).map(|&n| key(n)).collect();
    let (mut greeting, mut asking) = (Vec::new(), Vec::new());
    hello.encode(0, 0, &mut greeting);
    Request::Get { class: 0, release: Vec::new(), keys }.encode(1, 0, &mut asking);
    let mut took = 0;
    if stream.write_all(&greeting).and_then(|()| stream.write_all(&asking)).is_ok() {
        let _ = stream.set_read_timeout(Some(CONNECT));
        for _ in 0..chance.below(READS) {
            thread::sleep(Duration::from_millis(chance.below(PAUSE_MS)));
            match stream.read(&mut [0; READ]) {
                Ok(bytes) if bytes > 0 => took += bytes,
                _ => break,
            }
        }
    }
    world::note(&format!("reads slowly, {took} bytes, and goes away"));
}
