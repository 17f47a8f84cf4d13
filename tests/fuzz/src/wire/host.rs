//! A host with a small pool, and one client on its socket.

use crate::input::Input;
use crate::threads::calm;
use kvasir_dataplane::server::access::{Gate, Identity, Refused, Role};
use kvasir_dataplane::server::node::Node;
use kvasir_dataplane::server::{Listen, Server};
use kvasir_dataplane::wire::{HEADER_LEN, Header, Op, Reply, Request, VERSION, VERSIONS};
use kvasir_dataplane::{Clock, DramConfig, DramStore, ServerConfig};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tempfile::TempDir;

/// Longer than any answer takes.
const ANSWER: Duration = Duration::from_secs(20);
/// The most frames of one input.
const FRAMES_MAX: usize = 16;

/// Lets everybody do what an engine may.
struct Anybody;

impl Gate for Anybody {
    fn local(&self, _uid: u32, _gid: u32) -> Result<Identity, Refused> {
        let roles = [Role::Engine, Role::Operator].into_iter().collect();
        Ok(Identity { name: "it".into(), roles, tenant: None, shared: Vec::new(), in_place: true })
    }

    fn bearer(&self, _token: &str) -> Result<Identity, Refused> {
        self.local(0, 0)
    }
}

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| TempDir::new().expect("a folder"));

/// Sends the bytes, or the frames, and reads all answers: each reads, and the host serves the next client.
pub(super) fn run(data: &[u8], framed: bool) {
    let bytes = if framed { frames(data) } else { data.to_vec() };
    calm(|| {
        let (_server, socket) = serve();
        let mut answers = &talk(&socket, &bytes)[..];
        while !answers.is_empty() {
            answers = answer(answers);
        }
        let last = talk(&socket, &hello());
        assert!(answer(&last).is_empty(), "one answer to one hello");
    });
}

fn serve() -> (Server, PathBuf) {
    let wait = Duration::ZERO;
    let config =
        DramConfig { pool_bytes: 256 << 10, blocks_max: 64, put_wait: wait, ..DramConfig::default() };
    let store = Arc::new(DramStore::open(config).expect("a small pool"));
    let socket = FOLDER.path().join("data.sock");
    let listen = Listen { unix: Some(socket.clone()), ..Listen::default() };
    let node = Node::dram_only(store, Clock::start());
    let server = Server::start(node, &listen, Arc::new(Anybody), ServerConfig::default());
    (server.expect("a socket"), socket)
}

/// All that the host answers to these bytes, until it hangs up.
fn talk(socket: &Path, bytes: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(socket).expect("a host");
    stream.set_read_timeout(Some(ANSWER)).expect("a timeout");
    // It may hang up before it has read all.
    let _ = stream.write_all(bytes).and_then(|()| stream.shutdown(Shutdown::Write));
    let mut answers = Vec::new();
    match stream.read_to_end(&mut answers) {
        Ok(_) => answers,
        // It hung up on bytes that it will not read.
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => answers,
        Err(error) => panic!("the host neither answers nor hangs up: {error}"),
    }
}

/// What is behind the first answer.
fn answer(bytes: &[u8]) -> &[u8] {
    let (header, rest) = bytes.split_first_chunk::<HEADER_LEN>().expect("a whole header");
    let header = Header::decode(header).expect("a header that reads");
    assert!(header.reply);
    let (body, rest) = rest.split_at_checked(header.body_len as usize).expect("a whole body");
    Reply::decode(header.op, body).expect("an answer that reads");
    rest.get(header.payload_len as usize..).expect("a whole payload")
}

fn hello() -> Vec<u8> {
    let mut frame = Vec::new();
    let hello = Request::Hello {
        versions: VERSIONS,
        wants_write: true,
        wants_ring: false,
        tenant: 0,
        namespace: String::new(),
        token: String::new(),
    };
    hello.encode(1, 0, &mut frame);
    frame
}

/// A hello, and then per frame an operation, a body and a payload.
fn frames(data: &[u8]) -> Vec<u8> {
    let (mut bytes, mut input) = (hello(), Input(data));
    for request in 2..2 + FRAMES_MAX as u64 {
        if input.is_empty() {
            break;
        }
        let op = Op::from_repr(input.byte()).unwrap_or(Op::Get);
        let (body, payload) = (input.part(), input.part());
        let (body_len, payload_len) = (body.len() as u32, payload.len() as u64);
        let header = Header { version: VERSION, op, reply: false, request, body_len, payload_len };
        bytes.extend(header.encode());
        bytes.extend(body);
        bytes.extend(payload);
    }
    bytes
}
