//! Transfers between hosts that encrypt, by the kernel where it can, compared with a bare rustls stream in the same round: one thread encrypts, one decrypts, nobody asks.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use kvasir_dataplane::transport::tcp::TlsFiles;
use kvasir_tls::{ClientConfig, ClientFiles, ClientTls, HostFiles, HostTls, ServerConfig};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ServerConnection, StreamOwned};
use tempfile::TempDir;

use super::*;

pub(super) fn rows(round: Duration, rounds: usize) -> io::Result<Vec<Row>> {
    let authority = Authority::new()?;
    let bench = Bench::over_tcp(64 * MIB, Some([authority.tls("server")?, authority.tls("client")?]))?;
    let bare = Bare::new(&authority, bench.ours.len())?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        theirs.push(bare.stream(round)?);
        ours.push(bench.gets(MIB, 16, round));
    }
    bench.check()?;
    Ok(vec![
        Row::new("tls/get/1MiB", rate(&ours), "GB/s").beside(rate(&theirs)),
        Row::new("tls/cpu", cpu(&ours), "CPU-s/GB").beside(cpu(&theirs)),
    ])
}

/// rustls and nothing else, over as much memory as the transfers.
struct Bare {
    plain: Plain,
    client: Arc<ClientConfig>,
    name: ServerName<'static>,
    server: Arc<ServerConfig>,
}

impl Bare {
    fn new(authority: &Authority, memory: u64) -> io::Result<Self> {
        let TlsFiles { authority, certificate, key } = authority.files("server")?;
        let client = ClientTls::read(&ClientFiles { authority, identity: None }, "server")
            .map_err(io::Error::other)?;
        let server = HostTls::open(HostFiles { certificate, key, client_authority: None })
            .map_err(io::Error::other)?;
        Ok(Self {
            plain: Plain::new(MIB, memory)?,
            client: Arc::clone(client.config()),
            name: client.name().clone(),
            // They were read just now.
            server: server.config(|_| ()),
        })
    }

    fn stream(&self, round: Duration) -> io::Result<Round> {
        let (reader, writer) = self.plain.pair()?;
        let client =
            ClientConnection::new(Arc::clone(&self.client), self.name.clone()).map_err(io::Error::other)?;
        let server = ServerConnection::new(Arc::clone(&self.server)).map_err(io::Error::other)?;
        self.plain.measure(StreamOwned::new(client, reader), StreamOwned::new(server, writer), round)
    }
}

/// Who signs the certificates of both sides.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: TempDir,
}

impl Authority {
    fn new() -> io::Result<Self> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().map_err(io::Error::other)?;
        let issuer = CertifiedIssuer::self_signed(params, key).map_err(io::Error::other)?;
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join("ca.pem"), issuer.pem())?;
        Ok(Self { issuer, folder })
    }

    fn files(&self, name: &str) -> io::Result<TlsFiles> {
        let mut params = CertificateParams::new([name.to_owned()]).map_err(io::Error::other)?;
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let own = KeyPair::generate().map_err(io::Error::other)?;
        let signed = params.signed_by(&own, &self.issuer).map_err(io::Error::other)?;
        let path = |kind: &str| self.folder.path().join(format!("{name}.{kind}.pem"));
        let (certificate, key) = (path("certificate"), path("key"));
        fs::write(&certificate, signed.pem())?;
        fs::write(&key, own.serialize_pem())?;
        fs::set_permissions(&key, Permissions::from_mode(0o600))?;
        Ok(TlsFiles { authority: self.folder.path().join("ca.pem"), certificate, key })
    }

    fn tls(&self, name: &str) -> io::Result<Tls> {
        Tls::read(&self.files(name)?, name).map(|tls| tls.in_kernel(true)).map_err(io::Error::other)
    }
}
