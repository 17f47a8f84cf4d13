use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use super::authority::Authority;
use super::*;
use crate::transport::conformance::{self, Pair};
use crate::transport::node::Secret;
use crate::transport::tcp::{Tcp, TcpConfig};
use crate::transport::{Error, Node, Transport};

const PATIENCE: Duration = Duration::from_secs(120);

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

fn keeps_the_rules(server_in_kernel: bool, client_in_kernel: bool) {
    let authority = Authority::new();
    let server_tls = authority.tls("server").in_kernel(server_in_kernel);
    let client_tls = authority.tls("client").in_kernel(client_in_kernel);
    conformance::run(&|| {
        let (server_node, server) = tcp("server", true, Some(server_tls.clone()));
        let (client_node, client) = tcp("client", false, Some(client_tls.clone()));
        let vanishing = server.clone();
        Pair { client_node, server_node, client, server, kill: Arc::new(move || vanishing.shut_down()) }
    });
}

#[test]
fn keeps_the_rules_without_the_kernel() {
    keeps_the_rules(false, false);
}

/// Where there is none, connections are encrypted all the same.
#[test]
fn keeps_the_rules_with_whatever_the_kernel_has() {
    keeps_the_rules(true, true);
}

/// Why a client with `client` does not reach a server with `server`.
fn refusal(client: Option<Tls>, server: Option<Tls>) -> Error {
    let (_, server) = tcp("server", true, server);
    let (_, client) = tcp("client", false, client);
    client.connect(&server.address().unwrap()).err().expect("strangers are refused")
}

fn refused_with(client: Option<Tls>, server: Option<Tls>, expected: &str) {
    let error = refusal(client, server);
    assert!(matches!(error, Error::Certificate { .. }), "{error}");
    assert!(error.to_string().contains(expected), "{error}");
}

fn certificates_of_another_authority_are_refused(in_kernel: bool) {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let tls = |authority: &Authority, name| Some(authority.tls(name).in_kernel(in_kernel));
    refused_with(tls(&ours, "client"), tls(&theirs, "server"), "invalid peer certificate");
    // A client that trusts the server and shows a certificate that the server does not take.
    let theirs_alone = theirs.tls("client").material;
    let server = theirs_alone.configs.now(|| Err(()), |()| panic!("nothing has changed")).server.clone();
    let configs = Configs { client: mixed(&ours, &theirs), server };
    let Ok(configs) = Renewed::open(Vec::new(), || Ok::<_, ()>(configs)) else { panic!("it was given") };
    let material = Arc::into_inner(theirs_alone).unwrap();
    let mixed = Tls { material: Arc::new(Material { configs, ..material }), in_kernel };
    refused_with(Some(mixed), tls(&ours, "server"), "alert");
}

#[test]
fn certificates_of_another_authority_are_refused_without_the_kernel() {
    certificates_of_another_authority_are_refused(false);
}

/// Trusts one authority, and shows a certificate of the other one.
fn mixed(trusted: &Authority, shown: &Authority) -> Arc<ClientConfig> {
    let files = shown.files("client");
    let mut roots = RootCertStore::empty();
    roots.add(certificates(&trusted.files("x").authority, "the authority").unwrap().remove(0)).unwrap();
    let provider = Arc::new(ring::default_provider());
    let members = Members::new(Arc::new(roots), &provider);
    let shown = certificates(&files.certificate, "certificate").unwrap();
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(members))
        .with_client_auth_cert(shown, private_key(&files.key).unwrap());
    let mut config = config.unwrap();
    config.enable_secret_extraction = true;
    Arc::new(config)
}

#[test]
fn a_certificate_must_name_its_node() {
    let authority = Authority::new();
    let elsewhere = Some(authority.tls("elsewhere"));
    refused_with(Some(authority.tls("client")), elsewhere.clone(), "shows a certificate for others");
    // The server checks a client's certificate when the client has given its name, and hangs up.
    let (_, server) = tcp("server", true, Some(authority.tls("server")));
    let (_, client) = tcp("client", false, elsewhere);
    if let Ok(endpoint) = client.connect(&server.address().unwrap()) {
        assert!(endpoint.open("anything").is_err());
    }
    let deadline = Instant::now() + PATIENCE;
    while server.accepted() != (0, 1) {
        assert!(Instant::now() < deadline, "{:?}", server.accepted());
        std::thread::yield_now();
    }
}

/// Nodes go over to another authority without being started again.
#[test]
fn renewed_certificates_are_used_from_the_next_connection_on() {
    let (ours, theirs, apart) = (Authority::new(), Authority::new(), tempfile::tempdir().unwrap());
    let (server_tls, client_tls) = (ours.tls("server"), ours.tls("client"));
    // One that keeps what it has.
    let TlsFiles { authority, certificate, key } = ours.files("old");
    let keep = |file: &Path| {
        let to = apart.path().join(file.file_name().unwrap());
        std::fs::copy(file, &to).unwrap();
        to
    };
    let kept = TlsFiles { authority: keep(&authority), certificate: keep(&certificate), key: keep(&key) };
    let (_, server) = tcp("server", true, Some(server_tls.clone()));
    let (_, client) = tcp("client", false, Some(client_tls.clone()));
    let (_, old) = tcp("old", false, Some(Tls::read(&kept, "old").unwrap()));
    let reaches = |client: &Tcp| client.connect(&server.address().unwrap()).is_ok();
    // As a tool does that renews certificates: another file takes the name.
    let replace = |from: &Path| {
        let to = ours.dir.path().join(from.file_name().unwrap());
        std::fs::copy(from, to.with_extension("next")).unwrap();
        std::fs::rename(to.with_extension("next"), to).unwrap();
    };
    assert!(reaches(&client) && reaches(&old));

    // A certificate that its peers would refuse is not shown to them.
    let new = theirs.files("server");
    [&new.certificate, &new.key].into_iter().for_each(|file| replace(file));
    let refused = server_tls.renew().unwrap_err().to_string();
    assert!(refused.contains("does not pass under authority"), "{refused}");
    assert!(server_tls.renew().is_ok(), "it is said once");
    assert!(reaches(&client) && reaches(&old));

    let new = theirs.files("client");
    [&new.certificate, &new.key, &new.authority].into_iter().for_each(|file| replace(file));
    assert!(reaches(&client) && !reaches(&old));
    assert!(server_tls.renew().is_ok() && client_tls.renew().is_ok());
}

#[test]
fn one_side_without_tls_is_refused() {
    let authority = Authority::new();
    refused_with(None, Some(authority.tls("server")), "that one has TLS, this one has not");
    refused_with(Some(authority.tls("client")), None, "that one has no TLS, this one has");
}

#[test]
fn strangers_and_loiterers_are_turned_away() {
    let node = Arc::new(Node::new("server", Secret::new(b"secret"), 1));
    let config = TcpConfig {
        listen: Some((Ipv4Addr::LOCALHOST, 0).into()),
        tls: Some(Authority::new().tls("server")),
        handshake_timeout: Duration::from_millis(50),
        ..TcpConfig::default()
    };
    let server = Tcp::new(node, config).unwrap();
    // One says nothing, one says something else, and one announces a record of 16 KiB and stops.
    for greeting in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x40\x00\x01"] {
        let mut stranger = TcpStream::connect(server.address().unwrap()).unwrap();
        stranger.set_read_timeout(Some(PATIENCE)).unwrap();
        stranger.write_all(greeting).unwrap();
        // Perhaps an alert first, or an error because it closed with our bytes unread; in any case an end.
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
    let good = authority.files("good");
    let check = |files: TlsFiles, expected: &str| {
        let error = Tls::read(&files, "good").unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let missing = authority.dir.path().join("missing.pem");
    check(TlsFiles { authority: missing.clone(), ..good.clone() }, "missing.pem");
    check(TlsFiles { key: missing, ..good.clone() }, "key ");
    check(TlsFiles { certificate: good.key.clone(), ..good.clone() }, "has no certificate");
    let public = TlsFiles { key: good.certificate.clone(), ..good.clone() };
    check(public.clone(), "chmod 600");
    std::fs::set_permissions(&public.key, PermissionsExt::from_mode(0o600)).unwrap();
    check(public, "cannot be read");
    let other = authority.files("other");
    check(TlsFiles { key: other.key.clone(), ..good.clone() }, "is not that of certificate");
    check(other, "does not name this node");
    check(TlsFiles { authority: Authority::new().files("x").authority, ..good }, "does not pass under");
    check(Authority::new().files_until("good", Some(2001)), "xpired");
    let error = Tls::read(&authority.files("good"), "no name").unwrap_err().to_string();
    assert!(error.contains("no name cannot be a DNS name"), "{error}");
}

/// With a kernel that has TLS, which `cargo xtask test --rdma` boots.
mod in_the_kernel {
    use super::*;
    use crate::transport::tcp::socket::{Deadlined, Socket};

    /// Both sides after the handshake; the client encrypts by itself, where its state can be looked at and misused.
    fn pair(authority: &Authority) -> (Socket, ClientConnection, TcpStream) {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let config = authority.tls("client").configs().client.clone();
        let mut client =
            ClientConnection::new(config, ServerName::from(std::net::IpAddr::from(Ipv4Addr::LOCALHOST)))
                .unwrap();
        let server_tls = authority.tls("server").in_kernel(true);
        let server = std::thread::spawn(move || {
            let socket = Socket::new(listener.accept().unwrap().0).unwrap();
            socket.encrypt(server_tls.server().unwrap(), true, Instant::now() + PATIENCE).unwrap()
        });
        client.complete_io(&mut stream).unwrap();
        let server = server.join().unwrap();
        assert!(server.is_in_kernel());
        (server, client, stream)
    }

    /// Why the kernel's side reads no further.
    fn end(server: &Socket) -> io::Error {
        let mut deadlined = Deadlined { socket: server, deadline: Instant::now() + PATIENCE };
        deadlined.read_to_end(&mut Vec::new()).unwrap_err()
    }

    #[test]
    #[ignore = "needs TLS in the kernel: cargo xtask test --rdma"]
    fn the_rules_are_kept_on_both_sides_and_on_one() {
        keeps_the_rules(true, true);
        keeps_the_rules(true, false);
    }

    #[test]
    #[ignore = "needs TLS in the kernel: cargo xtask test --rdma"]
    fn why_a_certificate_is_refused_is_told() {
        certificates_of_another_authority_are_refused(true);
    }

    #[test]
    #[ignore = "needs TLS in the kernel: cargo xtask test --rdma"]
    fn bytes_pass_and_what_is_no_data_is_told_apart() {
        let authority = Authority::new();
        let (server, mut client, mut stream) = pair(&authority);
        assert!(server.certified("client").is_ok() && server.certified("other").is_err());
        let mut over = rustls::Stream::new(&mut client, &mut stream);
        over.write_all(b"question").unwrap();
        let mut deadlined = Deadlined { socket: &server, deadline: Instant::now() + PATIENCE };
        let mut got = [0; 8];
        deadlined.read_exact(&mut got).unwrap();
        deadlined.write_all(b"answer").unwrap();
        let mut answer = [0; 6];
        over.read_exact(&mut answer).unwrap();
        assert_eq!((&got, &answer), (b"question", b"answer"));

        client.send_close_notify();
        client.write_tls(&mut stream).unwrap();
        assert_eq!(end(&server).kind(), io::ErrorKind::UnexpectedEof);

        let (server, mut client, mut stream) = pair(&authority);
        client.refresh_traffic_keys().unwrap();
        client.write_tls(&mut stream).unwrap();
        assert!(end(&server).to_string().contains("has changed its keys"));

        let (server, _, mut stream) = pair(&authority);
        stream.write_all(&[23, 3, 3, 0, 40]).unwrap();
        stream.write_all(&[7; 40]).unwrap();
        assert!(end(&server).to_string().contains("encrypted with other keys, or changed"));

        let (server, client, stream) = pair(&authority);
        drop((client, stream));
        assert_eq!(end(&server).kind(), io::ErrorKind::UnexpectedEof);
    }
}
