//! Bytes without a meaning, on every port, in the ring, and from a peer that knows the secret.

use super::{Peace, Raw, hello, key, meta};
use crate::process::{Host, Transport};
use crate::replicas::{Plan, metric};
use kvasir_dataplane::cluster::message::VERSION;
use kvasir_dataplane::memory::host::Mapping;
use kvasir_dataplane::transport::Node;
use kvasir_dataplane::transport::node::Secret;
use kvasir_dataplane::transport::tcp::greet;
use kvasir_dataplane::transport::tcp::socket::Deadlined;
use kvasir_dataplane::wire::Request;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// What comes next of a seed: xorshift.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

trait Line: Read + Write {}
impl<T: Read + Write> Line for T {}

/// The doors of a host, and something that each would understand.
struct Doors<'a> {
    host: &'a Host,
    transfer: String,
    token: String,
}

const PATIENCE: Duration = Duration::from_secs(60);

impl Doors<'_> {
    fn all(&self) -> Vec<(Box<dyn Line>, Vec<u8>)> {
        let tcp = |addr: &str| -> Box<dyn Line> {
            let stream = TcpStream::connect(addr).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.set_write_timeout(Some(PATIENCE)).unwrap();
            Box::new(stream)
        };
        let unix = |path: &str| -> Box<dyn Line> {
            let stream = UnixStream::connect(path).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.set_write_timeout(Some(PATIENCE)).unwrap();
            Box::new(stream)
        };
        let host = self.host;
        let get = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".to_vec();
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
        vec![
            (unix(host.addr("socket")), self.talk("")),
            (tcp(host.addr("data")), self.talk(&self.token)),
            (unix(host.addr("control")), preface.clone()),
            (tcp(host.addr("grpc")), preface),
            (tcp(host.addr("http")), get),
            (tcp(host.addr("cluster")), b"KVAU\x01\0\0\0".to_vec()),
            (tcp(&self.transfer), b"KVAU\x01\0\0\0".to_vec()),
        ]
    }

    /// A hello and calls after it.
    fn talk(&self, token: &str) -> Vec<u8> {
        let keys: Vec<_> = (0..8).map(key).collect();
        let calls = [
            hello(false, token),
            Request::Exists(keys.clone()),
            Request::Reserve((4_000..4_004).map(meta).collect()),
            Request::Get { class: 1, release: vec![1, 2, 3], keys },
            Request::Release(vec![4; 64]),
        ];
        let mut all = Vec::new();
        for (n, call) in (0..).zip(calls) {
            let mut frame = Vec::new();
            call.encode(n, 0, &mut frame);
            all.extend(frame);
        }
        all
    }
}

fn doors<'a>(host: &'a Host, transfer: String) -> Doors<'a> {
    Doors { host, transfer, token: host.token_for(&["--role", "engine"]) }
}

/// A host of two, the other one of which is never started.
fn host_with_every_door(plan: &Plan, more: &[&str]) -> (Host, String) {
    let transfer = format!("127.0.0.1:{}", crate::process::quiet_port());
    let mut set = vec!["listen.grpc=127.0.0.1:0".to_owned(), format!("cluster.transfer=[\"{transfer}\"]")];
    set.push("store.pool_bytes=4MiB".to_owned());
    set.extend(more.iter().map(|&set| set.to_owned()));
    (plan.start(0, &set), transfer)
}

/// Reads until the host closes, or has nothing to say for a moment.
fn drain(line: &mut dyn Line) {
    let mut bytes = [0; 4096];
    while line.read(&mut bytes).is_ok_and(|count| count > 0) {}
}

#[test]
fn garbage_on_every_door_is_turned_away() {
    let plan = Plan::new(2);
    let (host, transfer) = host_with_every_door(&plan, &["store.stall_timeout=500ms"]);
    let doors = doors(&host, transfer);
    let peace = Peace::new(&host);
    for seed in 1..=24u64 {
        let mut chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        for (mut line, mut bytes) in doors.all() {
            match seed % 4 {
                0 => bytes = chance.bytes(1 + seed * 97),
                // Well-formed up to some place.
                1 => {
                    bytes.truncate(1 + chance.next() as usize % bytes.len());
                    bytes.extend(chance.bytes(300));
                }
                2 => {
                    for _ in 0..3 {
                        let at = chance.next() as usize % bytes.len();
                        bytes[at] ^= 1 << (chance.next() % 8);
                    }
                }
                // Cut off amid a frame.
                _ => bytes.truncate(1 + chance.next() as usize % bytes.len()),
            }
            // It may be turned away before all is written.
            let _ = line.write_all(&bytes);
        }
    }
    peace.holds("garbage on every door");
}

#[test]
fn a_ring_full_of_garbage_ends_its_connection_alone() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_with(dir.path(), &["store.stall_timeout=500ms"]);
    let peace = Peace::new(&host);
    for seed in 1..=16u64 {
        let mut chance = Chance(seed);
        let mut raw = Raw::connect(host.addr("socket"), true);
        let ring = raw.ring.take().expect("the host offers a ring");
        let len = rustix::fs::fstat(&ring).unwrap().st_size as u64;
        let memory = Mapping::new(ring.as_fd(), len, true).unwrap();
        match seed % 3 {
            // Words and all.
            0 => assert!(memory.write(0, &chance.bytes(len))),
            // A position that makes sense, before a frame that makes none.
            1 => {
                memory.write(4096, &chance.bytes(64 << 10));
                memory.store_word(0, 1 + chance.next() as u32 % (64 << 10));
            }
            _ => drop((0..512).map(|word| memory.store_word(word, chance.next() as u32)).count()),
        }
        let _ = raw.stream.write_all(&[1; 64]);
        // It hears why, or nothing more, but it is let go.
        drain(&mut raw.stream);
    }
    peace.holds("garbage in the ring");
}

#[test]
fn who_dribbles_a_byte_at_a_time_keeps_nobody_waiting() {
    let plan = Plan::new(2);
    let (host, transfer) = host_with_every_door(&plan, &["store.stall_timeout=500ms"]);
    let doors = doors(&host, transfer);
    let peace = Peace::new(&host);
    let mut lines: Vec<_> = (0..4).flat_map(|_| doors.all()).collect();
    for turn in 0..40 {
        lines.retain_mut(|(line, bytes)| {
            let next = bytes.get(turn).copied().unwrap_or(0);
            line.write_all(&[next]).is_ok()
        });
        // In between, others are served as ever.
        if turn % 10 == 0 {
            assert!(host.client(Transport::Unix).exists(&[key(0)]).unwrap()[0]);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(lines);
    peace.holds("a dribble on every door");
}

/// The hello of a peer, and bodies after it that mean nothing: counts, discriminants and lengths at will.
#[test]
fn a_peer_with_the_secret_that_talks_nonsense_harms_nobody() {
    let plan = Plan::new(2);
    let (host, _) = host_with_every_door(&plan, &[]);
    let peace = Peace::new(&host);
    for seed in 1..=24u64 {
        let mut chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let node = Node::new("host-1", Secret::new(b"what all hosts of this test know"), seed);
        let until = Instant::now() + PATIENCE;
        let stream = TcpStream::connect(host.addr("cluster")).unwrap();
        let (socket, name) = greet::connect(stream, None, &node, "", until).unwrap();
        assert_eq!(name, "host-0");
        let mut line = Deadlined { socket: &socket, deadline: until };
        // Variant 0 of a request, and the cluster's name.
        line.write_all(&frame(&[&[0u8, 6][..], b"kvasir"].concat())).unwrap();
        let mut header = [0; 12];
        line.read_exact(&mut header).unwrap();
        let len = u32::from_le_bytes(header[8..].try_into().unwrap());
        let mut welcome = vec![0; len as usize];
        line.read_exact(&mut welcome).unwrap();
        // Each kind of request, then bytes that its decoder has to make sense of.
        let len = chance.next() % 400;
        let body = [vec![(seed % 13) as u8], chance.bytes(len)].concat();
        let mut bytes = frame(&body);
        if seed % 4 == 0 {
            bytes[8..12].copy_from_slice(&(chance.next() as u32).to_le_bytes());
        }
        let _ = line.write_all(&bytes);
    }
    assert_eq!(metric(&host, "kvasir_peer_up", ""), 0);
    peace.holds("a peer that talks nonsense");
}

fn frame(body: &[u8]) -> Vec<u8> {
    let len = (body.len() as u32).to_le_bytes();
    [&b"KVCL"[..], &[VERSION, 0, 0, 0], &len, body].concat()
}
