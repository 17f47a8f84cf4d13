//! TLS under the frames, for networks that are not trusted: both sides show a certificate of the cluster's own authority,
//! and it names the node.
//!
//! TLS 1.3 only. Where the kernel has TLS, it encrypts what a transport carries ([`kernel`]). Elsewhere bytes in memory are encrypted into
//! a buffer and decrypted out of one ([`session`]), which costs the copies that the plain link avoids. No public authority is asked. TLS checks that a certificate is one of the authority's; whether it
//! names the node that it is shown for is checked above ([`greet`](super::greet)), where the node has said its name, on
//! both sides alike. Sessions are not resumed, so each connection checks the certificates again.

mod handshake;
mod kernel;
mod members;
mod session;

use parking_lot::Mutex;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvasir_tls::Renewed;
use rustls::client::Resumption;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, DnsName, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection};

pub(super) use self::handshake::shake_hands;
pub(super) use self::kernel::{Kernel, explain, takes};
use self::members::Members;
pub(super) use self::session::Session;

/// The most bytes of one record (RFC 8446, section 5.1).
pub(super) const RECORD: usize = 16 << 10;

/// Where a node finds its TLS material, all in PEM.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// Certificates of the authorities whose nodes are let in.
    pub authority: PathBuf,
    /// This node's certificate, followed by what links it to the authority. It has the node's name as a DNS name
    /// (subject alternative name), and is for use by clients and servers.
    pub certificate: PathBuf,
    /// The key of that certificate; readable by this user alone.
    pub key: PathBuf,
}

/// Why TLS material was refused.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{what} {path} cannot be read: {source}; it must be PEM", path = path.display())]
    File { what: &'static str, path: PathBuf, source: pem::Error },
    #[error("{what} {path} has no certificate in it; it must be PEM", path = path.display())]
    Empty { what: &'static str, path: PathBuf },
    #[error("others may read the key {path} (mode {mode:03o}); run chmod 600 on it", path = path.display())]
    Mode { path: PathBuf, mode: u32 },
    #[error("key {key} is not that of certificate {certificate}", key = key.display(), certificate = certificate.display())]
    NotItsKey { certificate: PathBuf, key: PathBuf },
    #[error(
        "certificate {path} does not name this node: {reason}; have one issued with the DNS name {node}",
        path = path.display()
    )]
    Name { path: PathBuf, node: String, reason: String },
    #[error(
        "certificate {certificate} does not pass under authority {authority}: {reason}",
        certificate = certificate.display(), authority = authority.display()
    )]
    Untrusted { certificate: PathBuf, authority: PathBuf, reason: String },
}

/// What a node shows and whom it lets in. The files are read again when they change. Clones share it.
#[derive(Clone, Debug)]
pub struct Tls {
    material: Arc<Material>,
    in_kernel: bool,
}

#[derive(Debug)]
struct Material {
    files: TlsFiles,
    node: String,
    configs: Renewed<Configs>,
    /// Why changed files are not in use, until somebody takes it.
    refusal: Mutex<Option<TlsError>>,
}

/// What one reading of the files gives.
#[derive(Clone, Debug)]
struct Configs {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Tls {
    /// Reads the files of the node of this name, and checks what its peers will check: that its certificate is one of
    /// the authority's, valid now, and names it.
    ///
    /// # Errors
    /// An error that names the file and what is wrong with it.
    pub fn read(files: &TlsFiles, node: &str) -> Result<Self, TlsError> {
        let paths = [&files.authority, &files.certificate, &files.key];
        let configs = Renewed::open(paths.map(Clone::clone).into(), || Configs::read(files, node))?;
        let (files, node) = (files.clone(), node.to_owned());
        let material = Material { files, node, configs, refusal: Mutex::default() };
        Ok(Self { material: Arc::new(material), in_kernel: false })
    }

    /// The same for connections that the kernel encrypts, where it can. Its key is not changed, so such a connection ends once as much
    /// went over it as one key may encrypt: 256 GiB, or 8 million small messages.
    #[must_use]
    pub fn in_kernel(&self, wanted: bool) -> Self {
        Self { in_kernel: wanted, ..self.clone() }
    }

    pub(super) fn is_for_kernel(&self) -> bool {
        self.in_kernel
    }

    /// Looks whether the files have changed. An error if they have and cannot be used, once; what was in use before stays.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn renew(&self) -> Result<(), TlsError> {
        self.configs();
        self.material.refusal.lock().take().map_or(Ok(()), Err)
    }

    fn configs(&self) -> Arc<Configs> {
        let Material { files, node, configs, refusal } = &*self.material;
        configs.now(|| Configs::read(files, node), |error| *refusal.lock() = Some(error))
    }

    /// The side that connects. It need not know yet whom it will find.
    pub(super) fn client(&self, to: std::net::IpAddr) -> io::Result<rustls::Connection> {
        let connection = ClientConnection::new(self.configs().client.clone(), ServerName::from(to));
        connection.map(Into::into).map_err(io::Error::other)
    }

    pub(super) fn server(&self) -> io::Result<rustls::Connection> {
        ServerConnection::new(self.configs().server.clone()).map(Into::into).map_err(io::Error::other)
    }
}

impl Configs {
    fn read(files: &TlsFiles, node: &str) -> Result<Self, TlsError> {
        let TlsFiles { authority, certificate, key } = files;
        let untrusted = |error: &dyn std::fmt::Display| TlsError::Untrusted {
            certificate: certificate.clone(),
            authority: authority.clone(),
            reason: error.to_string(),
        };
        let provider = Arc::new(ring::default_provider());
        let mut roots = RootCertStore::empty();
        for root in certificates(authority, "the authority")? {
            roots.add(root).map_err(|error| untrusted(&error))?;
        }
        let roots = Arc::new(roots);
        let members = Members::new(roots.clone(), &provider);
        let chain = certificates(certificate, "certificate")?;
        members.check(&chain[0], &chain[1..], UnixTime::now()).map_err(|error| untrusted(&error))?;
        check_name(&chain[0], node).map_err(|reason| TlsError::Name {
            path: certificate.clone(),
            node: node.to_owned(),
            reason,
        })?;
        let private = private_key(key)?;
        let not_its_key = |_| TlsError::NotItsKey { certificate: certificate.clone(), key: key.clone() };
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| untrusted(&error))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(members))
            .with_client_auth_cert(chain.clone(), private.clone_key())
            .map_err(not_its_key)?;
        client.resumption = Resumption::disabled();
        client.enable_secret_extraction = true;
        let clients = WebPkiClientVerifier::builder_with_provider(roots, provider.clone());
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| untrusted(&error))?
            .with_client_cert_verifier(clients.build().map_err(|error| untrusted(&error))?)
            .with_single_cert(chain, private)
            .map_err(not_its_key)?;
        server.send_tls13_tickets = 0;
        server.enable_secret_extraction = true;
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }
}

fn certificates(path: &Path, what: &'static str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let file = |source| TlsError::File { what, path: path.to_owned(), source };
    let found: Vec<_> =
        CertificateDer::pem_file_iter(path).map_err(file)?.collect::<Result<_, _>>().map_err(file)?;
    if found.is_empty() { Err(TlsError::Empty { what, path: path.to_owned() }) } else { Ok(found) }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let file = |source| TlsError::File { what: "key", path: path.to_owned(), source };
    let mode = std::fs::metadata(path).map_err(|error| file(pem::Error::Io(error)))?.permissions().mode();
    if mode & 0o077 != 0 {
        return Err(TlsError::Mode { path: path.to_owned(), mode: mode & 0o777 });
    }
    PrivateKeyDer::from_pem_file(path).map_err(file)
}

/// Checks that a certificate is for the node of this name, or says why not.
pub(super) fn check_name(certificate: &CertificateDer<'_>, node: &str) -> Result<(), String> {
    let name = DnsName::try_from(node).map_err(|_| format!("{node} cannot be a DNS name"))?;
    let parsed = ParsedCertificate::try_from(certificate).map_err(|error| error.to_string())?;
    rustls::client::verify_server_name(&parsed, &ServerName::DnsName(name)).map_err(|error| error.to_string())
}

/// Why TLS itself refused the peer, or the peer refused us; `None` for errors of the network.
pub(super) fn reason(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

#[cfg(any(test, feature = "conformance"))]
pub mod authority;
#[cfg(test)]
mod tests;
