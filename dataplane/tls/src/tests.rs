use super::*;
use std::fs::Permissions;
use std::io::Read;
use std::net::TcpListener;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

struct Authority(CertifiedIssuer<'static, KeyPair>, tempfile::TempDir);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("ca.pem"), issuer.pem()).unwrap();
        Self(issuer, dir)
    }

    fn path(&self, file: &str) -> PathBuf {
        self.1.path().join(file)
    }

    /// Certificate and key for `name`, in files called `file`.
    fn issue(&self, file: &str, name: &str) -> (PathBuf, PathBuf) {
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        let paths = (self.path(&format!("{file}.pem")), self.path(&format!("{file}.key")));
        fs::write(&paths.0, params.signed_by(&key, &self.0).unwrap().pem()).unwrap();
        fs::write(&paths.1, key.serialize_pem()).unwrap();
        fs::set_permissions(&paths.1, Permissions::from_mode(0o600)).unwrap();
        paths
    }

    fn host(&self, file: &str) -> HostFiles {
        let (certificate, key) = self.issue(file, "127.0.0.1");
        HostFiles { certificate, key, client_authority: Some(self.path("ca.pem")) }
    }

    fn client(&self, identity: Option<(PathBuf, PathBuf)>, name: &str) -> ClientTls {
        ClientTls::read(&ClientFiles { authority: self.path("ca.pem"), identity }, name).unwrap()
    }
}

/// Both ends of a connection; nothing is exchanged yet.
fn pair(host: &HostTls, client: &ClientTls) -> (Stream, Stream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    let config = host.config(|error| panic!("{error}"));
    let ends = (host_stream(config, far).unwrap(), client.stream(near).unwrap());
    for end in [&ends.0, &ends.1] {
        end.set_timeouts(Duration::from_secs(60)).unwrap();
    }
    ends
}

/// The client sends, the host answers with the same. What the client got, and the certificate that the host saw.
fn echo(host: &HostTls, client: &ClientTls, bytes: &[u8]) -> io::Result<(Vec<u8>, Option<Vec<u8>>)> {
    let (mut far, mut near) = pair(host, client);
    std::thread::scope(|scope| {
        let answered = scope.spawn(move || {
            let mut got = vec![0; bytes.len()];
            far.read_exact(&mut got)?;
            far.write_all(&got)?;
            let Stream::Sealed(sealed) = &far else { panic!("not encrypted") };
            io::Result::Ok(sealed.certificate())
        });
        let mut got = vec![0; bytes.len()];
        let asked = near.write_parts(&[&[], bytes]).and_then(|()| near.read_exact(&mut got));
        near.shutdown();
        let certificate = answered.join().unwrap();
        asked?;
        Ok((got, certificate?))
    })
}

#[test]
fn bytes_pass_and_certificates_are_seen() {
    let authority = Authority::new();
    let host = HostTls::open(authority.host("host")).unwrap();
    let bytes: Vec<u8> = (0..1 << 20).map(|i: u32| (i * 7) as u8).collect();
    let (got, shown) = echo(&host, &authority.client(None, "127.0.0.1"), &bytes).unwrap();
    assert!(got == bytes && shown.is_none());
    let own = authority.issue("router", "router.example");
    let (_, shown) = echo(&host, &authority.client(Some(own), "127.0.0.1"), b"x").unwrap();
    let shown = shown.unwrap();
    assert!(is_for(&shown, "router.example") && !is_for(&shown, "other.example") && !is_for(b"x", "x"));
}

#[test]
fn strangers_are_refused_on_both_sides() {
    let (authority, other) = (Authority::new(), Authority::new());
    let host = HostTls::open(authority.host("host")).unwrap();
    let refused = |client: &ClientTls| echo(&host, client, b"x").unwrap_err().to_string();
    assert!(refused(&other.client(None, "127.0.0.1")).contains("invalid peer certificate"));
    assert!(refused(&authority.client(None, "other.example")).contains("invalid peer certificate"));
    let files =
        ClientFiles { authority: authority.path("ca.pem"), identity: Some(other.issue("x", "x.example")) };
    let stranger = ClientTls::read(&files, "127.0.0.1").unwrap();
    assert!(echo(&host, &stranger, b"x").is_err());
}

#[test]
fn files_are_read_again_when_they_change() {
    let authority = Authority::new();
    let host = HostTls::open(authority.host("host")).unwrap();
    let first = host.config(|error| panic!("{error}"));
    assert!(Arc::ptr_eq(&first, &host.config(|error| panic!("{error}"))));
    fs::write(authority.path("host.pem"), "nothing of use").unwrap();
    let mut complaint = None;
    assert!(Arc::ptr_eq(&first, &host.config(|error| complaint = Some(error.to_string()))));
    assert!(complaint.unwrap().contains("has no certificate in it"));
    authority.host("host");
    assert!(!Arc::ptr_eq(&first, &host.config(|error| panic!("{error}"))));
    let (got, _) = echo(&host, &authority.client(None, "127.0.0.1"), b"new").unwrap();
    assert_eq!(got, b"new");
}

#[test]
fn keys_that_others_may_read_are_refused() {
    let authority = Authority::new();
    let files = authority.host("host");
    fs::set_permissions(&files.key, Permissions::from_mode(0o644)).unwrap();
    assert!(matches!(HostTls::open(files), Err(TlsError::Mode { mode: 0o644, .. })));
}
