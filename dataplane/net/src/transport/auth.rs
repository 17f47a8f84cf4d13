//! The handshake: both sides prove that they know the shared secret before anything else is said.
//!
//! ```text
//! client -> server   magic "KVTX" · version u8 · name length u8 · name · nonce (32 B)
//! server -> client   magic "KVTX" · version u8 · name length u8 · name · nonce (32 B)
//! client -> server   HMAC-SHA-256(secret, "client" · realm · both hellos)
//! server -> client   HMAC-SHA-256(secret, "server" · realm · both hellos)
//! ```
//!
//! Each proof covers both nonces, so a recorded handshake proves nothing to a server (or client) that picked another
//! one, and neither side's proof serves as the other's. The client proves first: a stranger learns a name and a random
//! number. What follows on the connection is not authenticated by this; run it where the network is trusted, or over TLS.
//!
//! Reads stop at fixed sizes. The caller bounds time: it gives a stream that fails once its deadline has passed.

use std::io::{self, Read, Write};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::Node;
use super::node::{Secret, random};

const MAGIC: [u8; 4] = *b"KVTX";
/// Version of the handshake and of what follows it.
pub const VERSION: u8 = 1;
/// The first bytes of every greeting.
pub(super) const PREFIX: [u8; 5] = [MAGIC[0], MAGIC[1], MAGIC[2], MAGIC[3], VERSION];
const NONCE_LEN: usize = 32;
const PROOF_LEN: usize = 32;

/// Why a peer was not believed, or could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    #[error("the connection ended or stalled during the handshake: {0}")]
    Io(#[from] io::Error),
    #[error("it does not speak this protocol: its greeting starts with {0:02x?}")]
    Magic([u8; 4]),
    #[error(
        "it speaks version {0} of the transfer protocol, this side {VERSION}; use the same release on both"
    )]
    Version(u8),
    #[error("its name is empty or not UTF-8")]
    Name,
    #[error("its proof is wrong")]
    Proof,
}

impl AuthError {
    /// Whether the peer answered wrongly, or hung up; otherwise it may just be away.
    pub fn is_refusal(&self) -> bool {
        !matches!(self, Self::Io(error) if !is_hanging_up(error))
    }
}

/// Whether the peer ended the handshake, which is how it refuses a proof.
pub(super) fn is_hanging_up(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::UnexpectedEof
}

/// The connecting side. Returns the peer's name. `realm` must be the same on both sides: the cluster, on a rail.
pub fn connect(stream: &mut (impl Read + Write), node: &Node, realm: &str) -> Result<String, AuthError> {
    let ours = hello(node);
    stream.write_all(&ours)?;
    let (name, theirs) = read_hello(stream)?;
    stream.write_all(&proof(&node.secret, "client", realm, [&ours, &theirs]).finalize().into_bytes())?;
    check(stream, proof(&node.secret, "server", realm, [&ours, &theirs]))?;
    Ok(name)
}

/// The accepting side. Returns the peer's name.
pub fn accept(stream: &mut (impl Read + Write), node: &Node, realm: &str) -> Result<String, AuthError> {
    let (name, theirs) = read_hello(stream)?;
    let ours = hello(node);
    stream.write_all(&ours)?;
    check(stream, proof(&node.secret, "client", realm, [&theirs, &ours]))?;
    stream.write_all(&proof(&node.secret, "server", realm, [&theirs, &ours]).finalize().into_bytes())?;
    Ok(name)
}

fn hello(node: &Node) -> Vec<u8> {
    let name = &node.name.as_bytes()[..node.name.floor_char_boundary(255)];
    let mut bytes = Vec::from(PREFIX);
    bytes.push(name.len() as u8);
    bytes.extend(name);
    bytes.extend(random::<NONCE_LEN>());
    bytes
}

fn read_hello(stream: &mut impl Read) -> Result<(String, Vec<u8>), AuthError> {
    let mut head = [0; 6];
    stream.read_exact(&mut head)?;
    let [a, b, c, d, version, name_len] = head;
    if [a, b, c, d] != MAGIC {
        return Err(AuthError::Magic([a, b, c, d]));
    }
    if version != VERSION {
        return Err(AuthError::Version(version));
    }
    let mut rest = vec![0; usize::from(name_len) + NONCE_LEN];
    stream.read_exact(&mut rest)?;
    let name = String::from_utf8(rest[..usize::from(name_len)].to_vec()).map_err(|_| AuthError::Name)?;
    if name.is_empty() {
        return Err(AuthError::Name);
    }
    Ok((name, [&head[..], &rest].concat()))
}

fn proof(secret: &Secret, role: &str, realm: &str, [client, server]: [&[u8]; 2]) -> Hmac<Sha256> {
    // `new_from_slice` accepts a key of any length, so it never fails.
    let mut mac = match Hmac::<Sha256>::new_from_slice(secret.bytes()) {
        Ok(mac) => mac,
        Err(_) => unreachable!("HMAC takes keys of any length"),
    };
    // A hello says how long it is, and both sides have the same ones, so that no two realms give the same bytes.
    [role.as_bytes(), realm.as_bytes(), client, server].into_iter().for_each(|part| mac.update(part));
    mac
}

fn check(stream: &mut impl Read, expected: Hmac<Sha256>) -> Result<(), AuthError> {
    let mut found = [0; PROOF_LEN];
    stream.read_exact(&mut found)?;
    expected.verify_slice(&found).map_err(|_| AuthError::Proof)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    fn node(name: &str, secret: &[u8]) -> Node {
        Node::new(name, Secret::new(secret), 1)
    }

    /// Keeps what it writes.
    struct Recorded(UnixStream, Vec<u8>);

    impl Read for Recorded {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0.read(buffer)
        }
    }

    impl Write for Recorded {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.1.extend(bytes);
            self.0.write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn meet(client: &Node, server: Node) -> (Result<String, AuthError>, Result<String, AuthError>, Vec<u8>) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let accepting = thread::spawn(move || accept(&mut theirs, &server, &server.cluster));
        let mut ours = Recorded(ours, Vec::new());
        let connected = connect(&mut ours, client, &client.cluster);
        let said = std::mem::take(&mut ours.1);
        drop(ours);
        (connected, accepting.join().unwrap(), said)
    }

    #[test]
    fn nodes_of_one_secret_learn_their_names() {
        let (connected, accepted, _) = meet(&node("a", b"secret"), node("b", b"secret"));
        assert_eq!((connected.unwrap(), accepted.unwrap()), ("b".into(), "a".into()));
    }

    #[test]
    fn another_secret_is_refused_and_learns_nothing() {
        let (connected, accepted, _) = meet(&node("a", b"secret"), node("b", b"Secret"));
        assert!(matches!(accepted, Err(AuthError::Proof)));
        assert!(matches!(&connected, Err(AuthError::Io(_))), "no proof of the server's came back");
        assert!(connected.is_err_and(|error| error.is_refusal()), "that is how it is refused");
    }

    #[test]
    fn nodes_of_different_clusters_do_not_come_together() {
        let of = |name: &str, cluster: &str| node(name, b"secret").of_cluster(cluster, []);
        let (connected, accepted, _) = meet(&of("a", "one"), of("b", "two"));
        assert!(matches!(accepted, Err(AuthError::Proof)) && connected.is_err());
        let (connected, accepted, _) = meet(&of("a", "one"), of("b", "one"));
        assert_eq!((connected.unwrap(), accepted.unwrap()), ("b".into(), "a".into()));
    }

    #[test]
    fn a_replayed_handshake_fails() {
        let (_, _, said) = meet(&node("a", b"secret"), node("b", b"secret"));
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        ours.write_all(&said).unwrap();
        assert!(matches!(accept(&mut theirs, &node("b", b"secret"), ""), Err(AuthError::Proof)));
    }

    #[test]
    fn strangers_are_told_apart() {
        let check = |bytes: &[u8], expected: &str| {
            let (mut ours, mut theirs) = UnixStream::pair().unwrap();
            ours.write_all(bytes).unwrap();
            ours.shutdown(std::net::Shutdown::Write).unwrap();
            let error = accept(&mut theirs, &node("b", b"secret"), "").unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(b"GET / HTTP/1.1\r\n", "does not speak");
        check(b"KVTX\x09\x01a", "version 9");
        check(b"KVTX\x01\x01a", "ended or stalled");
        check(&[b"KVTX\x01\x00".as_slice(), &[0; 32]].concat(), "its name");
        check(&[b"KVTX\x01\x01\xff".as_slice(), &[0; 32]].concat(), "its name");
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200), greet: bool) {
            let (mut ours, mut theirs) = UnixStream::pair().unwrap();
            if greet {
                ours.write_all(b"KVTX\x01").unwrap();
            }
            ours.write_all(&bytes).unwrap();
            ours.shutdown(std::net::Shutdown::Write).unwrap();
            prop_assert!(accept(&mut theirs, &node("b", b"secret"), "").is_err());
        }
    }
}
