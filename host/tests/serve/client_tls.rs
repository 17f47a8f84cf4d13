//! Clients over TLS: by token or by certificate, on the data port and over gRPC.

use crate::process::{Host, Transport, runtime};
use crate::replicas::until;
use crate::tls::Authority;
use kvasir_client::control::Control;
use kvasir_client::data::{Client, ClientError, Options};
use kvasir_client::{ClientFiles, ClientTls};
use kvasir_dataplane::stream::Stream;
use kvasir_dataplane::{BlockKey, BlockMeta};
use kvasir_proto as proto;
use std::io::Read as _;
use std::time::Duration;

const LISTED: &str = r#"access.allow=[{certificate="engine.example", roles=["engine"], tenant=3}]"#;

/// A host that shows a certificate of `authority` and lets its clients in.
fn start(dir: &std::path::Path, authority: &Authority) -> Host {
    let (cert, key) = authority.issue("127.0.0.1");
    let set = [
        format!("listen.tls.cert={}", cert.display()),
        format!("listen.tls.key={}", key.display()),
        format!("listen.tls.client_ca={}", authority.path("ca.pem").display()),
        "listen.grpc=127.0.0.1:0".to_owned(),
        LISTED.to_owned(),
    ];
    Host::start_with(dir, &set.iter().map(String::as_str).collect::<Vec<_>>())
}

/// A client that trusts `authority` and shows a certificate for `own`, if that is a name.
fn tls(authority: &Authority, own: Option<&str>) -> ClientTls {
    let files =
        ClientFiles { authority: authority.path("ca.pem"), identity: own.map(|own| authority.issue(own)) };
    ClientTls::read(&files, "127.0.0.1").unwrap()
}

fn connect(host: &Host, tls: Option<ClientTls>, token: &str) -> Result<Client, ClientError> {
    Client::connect(
        &host.endpoint(Transport::Tcp),
        Options { token: token.into(), tls, ..Options::default() },
    )
}

#[test]
fn data_over_tls_takes_a_token_or_a_listed_certificate() {
    let (dir, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let host = start(dir.path(), &authority);
    let key = BlockKey::from_name("a");
    let bytes: Vec<u8> = (0..1 << 20).map(|i: u32| (i * 13) as u8).collect();
    let engine = connect(&host, Some(tls(&authority, Some("engine.example"))), "").unwrap();
    assert!(!engine.is_local());
    engine.put(&BlockMeta::single(key, 1 << 20), &bytes).unwrap();
    let got = engine.get(&[key], 0).unwrap().remove(0).unwrap();
    assert!(got.bytes().unwrap() == bytes);
    let refused = engine.remove(&[key]).unwrap_err().to_string();
    assert!(refused.contains("takes role operator, and the caller has: engine"), "{refused}");

    // A token goes before a certificate; here it is of another tenant.
    let token = host.token();
    for own in [None, Some("engine.example")] {
        let client = connect(&host, Some(tls(&authority, own)), &token).unwrap();
        assert_eq!(client.exists(&[key]).unwrap(), [false], "the block is tenant 3's");
    }
    let refused = |tls, token: &str| connect(&host, tls, token).err().unwrap().to_string();
    let unlisted = refused(Some(tls(&authority, Some("other.example"))), "");
    assert!(unlisted.contains("no name in it is listed"), "{unlisted}");
    assert!(refused(Some(tls(&authority, None)), "").contains("a token is needed"));
    assert!(refused(Some(tls(&Authority::new(), None)), &token).contains("invalid peer certificate"));
    // Who speaks in the clear is not understood, and its token is not looked at.
    assert!(connect(&host, None, &token).is_err());
    let engine = connect(&host, Some(tls(&authority, Some("engine.example"))), "").unwrap();
    assert!(engine.exists(&[key]).unwrap()[0], "and others come in as before");
}

#[test]
fn grpc_over_tls_takes_a_token_or_a_listed_certificate() {
    let (dir, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let host = start(dir.path(), &authority);
    let runtime = runtime();
    let to = host.addr("grpc").to_owned();
    // Whether a call of an engine and one of an operator are let through.
    let calls = |tls: &ClientTls, token: &str| {
        runtime.block_on(async {
            let mut control = Control::connect_tls(&to, token, tls).await?;
            let exists = control.store.exists(proto::ExistsRequest { keys: vec![] }).await.is_ok();
            let drain = control.node.drain(proto::DrainRequest { resume: true }).await.is_ok();
            Ok::<_, kvasir_client::control::ControlError>((exists, drain))
        })
    };
    let listed = tls(&authority, Some("engine.example"));
    assert_eq!(calls(&listed, "").unwrap(), (true, false));
    assert_eq!(calls(&listed, &host.token()).unwrap(), (true, true), "a token goes first");
    assert_eq!(calls(&tls(&authority, Some("other.example")), "").unwrap(), (false, false));
    assert_eq!(calls(&tls(&authority, None), "").unwrap(), (false, false));
    assert!(calls(&tls(&Authority::new(), None), &host.token()).is_err());

    let (cert, key) = authority.issue("engine.example");
    let ca = authority.path("ca.pem");
    let args = [
        "--tls-ca",
        ca.to_str().unwrap(),
        "--tls-cert",
        cert.to_str().unwrap(),
        "--tls-key",
        key.to_str().unwrap(),
    ];
    let data = format!("tcp:{}", host.addr("data"));
    host.check(&[&["put", "a", "--host", &data], &args[..]].concat(), b"some bytes", 0, "stored 10 B");
    host.check(&[&["rm", "a", "--host", &data], &args[..]].concat(), b"", 2, "takes role operator");
    host.check(&[&["policy", "list", "--grpc", &to], &args[..]].concat(), b"", 2, "takes role observer");
}

#[test]
fn a_connection_ends_when_its_certificate_expires() {
    let (dir, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let host = start(dir.path(), &authority);
    let runtime = runtime();
    let ca = authority.path("ca.pem");
    // On a busy machine a certificate may expire before all is set up: the next one lives longer.
    let connected = (1..).find_map(|n| {
        let identity = Some(authority.issue_for("engine.example", Duration::from_secs(1 << n)));
        let tls = ClientTls::read(&ClientFiles { authority: ca.clone(), identity }, "127.0.0.1").unwrap();
        let data = connect(&host, Some(tls.clone()), "").ok()?;
        data.exists(&[BlockKey::from_name("a")]).ok()?;
        let mut grpc = runtime.block_on(Control::connect_tls(host.addr("grpc"), "", &tls)).ok()?;
        runtime.block_on(grpc.store.exists(proto::ExistsRequest { keys: vec![] })).ok()?;
        Some((data, grpc))
    });
    let (data, mut grpc) = connected.unwrap();
    let other = connect(&host, Some(tls(&authority, Some("engine.example"))), "").unwrap();
    let ask = |client: &Client| client.exists(&[BlockKey::from_name("a")]);
    until("the data connection ends", || ask(&data).is_err());
    assert!(ask(&data).is_err(), "and stays ended");
    let mut call = || runtime.block_on(grpc.store.exists(proto::ExistsRequest { keys: vec![] }));
    until("gRPC calls are refused", || call().is_err());
    assert!(call().unwrap_err().message().contains("the certificate has expired"));
    assert!(ask(&other).is_ok(), "those of other certificates go on");
}

#[test]
fn pages_are_encrypted_where_calls_are() {
    let (dir, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let host = start(dir.path(), &authority);
    let ask = |mut stream: Stream, path: &str, token: &str| {
        stream.set_timeouts(Duration::from_secs(60)).unwrap();
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = Vec::new();
        // What was said until the connection ended, however it did.
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    };
    let connect = || std::net::TcpStream::connect(host.addr("http")).unwrap();
    let sealed = |own| tls(&authority, own).stream(connect()).unwrap();
    let alive = ask(sealed(None), "/livez", "");
    assert!(alive.starts_with("HTTP/1.1 200") && alive.ends_with("ok\n"), "{alive}");
    let metrics = ask(sealed(None), "/metrics", &host.token());
    assert!(metrics.starts_with("HTTP/1.1 200") && metrics.contains("kvasir_pool_bytes"), "{metrics}");
    let refused = ask(sealed(Some("engine.example")), "/metrics", "");
    assert!(refused.contains("takes role observer, and the caller has: engine"), "{refused}");
    let clear = ask(Stream::Tcp(connect()), "/livez", "");
    assert!(!clear.contains("HTTP/"), "{clear}");
    let (http, ca) = (host.addr("http").to_owned(), authority.path("ca.pem"));
    let doctor = std::process::Command::new(crate::process::KVASIR)
        .args(["doctor", "--verbose", "--clock-of", &http, "--tls-ca"])
        .arg(ca)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(said.contains(&format!("the clock of {http} ")) && !said.contains("is not known"), "{said}");
}

#[test]
fn a_renewed_certificate_counts_without_a_restart() {
    let (dir, old, new) = (tempfile::tempdir().unwrap(), Authority::new(), Authority::new());
    let host = start(dir.path(), &old);
    let token = host.token();
    let comes_in = |authority: &Authority| connect(&host, Some(tls(authority, None)), &token).is_ok();
    assert!(comes_in(&old) && !comes_in(&new));
    let (cert, key) = new.issue("127.0.0.1");
    for (from, to) in [(key, old.path("127.0.0.1.key")), (cert, old.path("127.0.0.1.pem"))] {
        std::fs::rename(from, to).unwrap();
    }
    until("the new certificate is shown", || comes_in(&new));
    assert!(!comes_in(&old));
}
