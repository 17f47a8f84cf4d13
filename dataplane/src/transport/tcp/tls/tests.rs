use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

use super::*;
use crate::transport::conformance::{self, Pair};
use crate::transport::node::Secret;
use crate::transport::tcp::{Tcp, TcpConfig};
use crate::transport::{Error, Node, Transport};

const NAME: &str = "kvasir";
const PATIENCE: Duration = Duration::from_secs(120);

/// An authority, and a folder for what it signs.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: tempfile::TempDir,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, dir }
    }

    /// The files of a node whose certificate says `name`.
    fn files(&self, name: &str) -> TlsFiles {
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let path = |kind: &str| self.dir.path().join(format!("{name}.{kind}.pem"));
        std::fs::write(path("cert"), certificate.pem()).unwrap();
        std::fs::write(path("key"), key.serialize_pem()).unwrap();
        let authority = self.dir.path().join("ca.pem");
        TlsFiles { authority, certificate: path("cert"), key: path("key"), name: NAME.to_owned() }
    }

    fn tls(&self) -> Tls {
        Tls::read(&self.files(NAME)).unwrap()
    }
}

fn tcp(name: &str, listen: bool, tls: Option<Tls>) -> (Arc<Node>, Arc<Tcp>) {
    let node = Arc::new(Node::new(name, Secret::new(b"secret"), 1));
    let config = TcpConfig {
        listen: listen.then_some((Ipv4Addr::LOCALHOST, 0).into()),
        tls,
        connect_timeout: PATIENCE,
        handshake_timeout: PATIENCE,
        peer_timeout: PATIENCE,
        ..TcpConfig::default()
    };
    (node.clone(), Arc::new(Tcp::new(node, config).unwrap()))
}

#[test]
fn keeps_the_rules() {
    let tls = Authority::new().tls();
    conformance::run(&|| {
        let (server_node, server) = tcp("server", true, Some(tls.clone()));
        let (client_node, client) = tcp("client", false, Some(tls.clone()));
        let vanishing = server.clone();
        Pair { client_node, server_node, client, server, kill: Arc::new(move || vanishing.shut_down()) }
    });
}

/// Why a client with `client` does not reach a server with `server`.
fn refusal(client: Option<Tls>, server: Option<Tls>) -> Error {
    let (_, server) = tcp("server", true, server);
    let (_, client) = tcp("client", false, client);
    client.connect(&server.address().unwrap()).err().expect("strangers are refused")
}

#[test]
fn certificates_of_another_authority_are_refused() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let error = refusal(Some(ours.tls()), Some(theirs.tls()));
    assert!(matches!(error, Error::Certificate { .. }), "{error}");

    // A client that trusts the server and shows a certificate that the server does not take.
    let mixed = TlsFiles { authority: ours.files(NAME).authority, ..theirs.files(NAME) };
    let error = refusal(Some(Tls::read(&mixed).unwrap()), Some(ours.tls()));
    assert!(matches!(error, Error::Certificate { .. }), "{error}");
}

#[test]
fn a_certificate_must_have_the_clusters_name() {
    let authority = Authority::new();
    let other = Tls::read(&authority.files("elsewhere")).unwrap();
    let error = refusal(Some(authority.tls()), Some(other));
    assert!(error.to_string().contains("not valid for name"), "{error}");
}

#[test]
fn one_side_without_tls_is_refused() {
    let tls = Authority::new().tls();
    let error = refusal(None, Some(tls.clone()));
    assert!(matches!(error, Error::Authentication { .. } | Error::Unreachable { .. }), "{error}");
    let error = refusal(Some(tls), None);
    assert!(matches!(error, Error::Certificate { .. } | Error::Unreachable { .. }), "{error}");
}

#[test]
fn strangers_and_loiterers_are_turned_away() {
    let node = Arc::new(Node::new("server", Secret::new(b"secret"), 1));
    let config = TcpConfig {
        listen: Some((Ipv4Addr::LOCALHOST, 0).into()),
        tls: Some(Authority::new().tls()),
        handshake_timeout: Duration::from_millis(50),
        ..TcpConfig::default()
    };
    let server = Tcp::new(node, config).unwrap();
    // Says nothing; says something else; announces a record of 16 KiB and stops.
    for greeting in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x40\x00\x01"] {
        let mut stranger = TcpStream::connect(server.address().unwrap()).unwrap();
        stranger.set_read_timeout(Some(PATIENCE)).unwrap();
        stranger.write_all(greeting).unwrap();
        // Perhaps an alert first, and an error if it closed with our bytes unread; in any case an end.
        let ended = stranger.read_to_end(&mut Vec::new());
        assert!(
            !matches!(&ended, Err(error) if error.kind() == io::ErrorKind::WouldBlock),
            "it still listens"
        );
    }
    let deadline = Instant::now() + PATIENCE;
    while server.accepted() != (0, 3) {
        assert!(Instant::now() < deadline, "{:?}", server.accepted());
        std::thread::yield_now();
    }
}

#[test]
fn bad_files_are_named() {
    let authority = Authority::new();
    let good = authority.files(NAME);
    let check = |files: TlsFiles, expected: &str| {
        let error = Tls::read(&files).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let missing = authority.dir.path().join("missing.pem");
    check(TlsFiles { authority: missing.clone(), ..good.clone() }, "missing.pem");
    check(TlsFiles { key: missing, ..good.clone() }, "the key cannot be read");
    check(TlsFiles { certificate: good.key.clone(), ..good.clone() }, "has no certificate");
    check(TlsFiles { key: good.certificate.clone(), ..good.clone() }, "the key cannot be read");
    check(TlsFiles { name: "no name".into(), ..good.clone() }, "is no DNS name");
    // Another node's key: the certificate and it do not belong together.
    check(TlsFiles { key: authority.files("other").key, ..good }, "are refused");
}
