//! TLS between clients and a host. TLS 1.3 only; no public authority is asked.
//!
//! A host shows its certificate ([`HostTls`]) and may ask clients for theirs. What name a client's certificate has is
//! compared with the settings of the host ([`is_for`]), which say what the bearer may do. A client ([`ClientTls`]) checks
//! that the host's certificate is one of its authority's and names the host. Between hosts, `kvasir-net` has its own: there
//! both sides are of one authority and bytes must never wait. What files say is kept alike ([`Renewed`]).

mod renewed;
mod session;

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvasir_os::net::TcpStream;
use kvasir_protocol::stream::Stream;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, DnsName, PrivateKeyDer, ServerName};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
pub use rustls::{ClientConfig, ServerConfig};
use rustls::{ClientConnection, RootCertStore, ServerConnection};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use x509_parser::prelude::{FromDer, X509Certificate};

pub use self::renewed::Renewed;
use self::session::Session;

/// Why TLS material was refused.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{} cannot be read: {source}; it must be PEM", path.display())]
    File { path: PathBuf, source: pem::Error },
    #[error("{} has no certificate in it; it must be PEM", path.display())]
    Empty { path: PathBuf },
    #[error("others may read the key {} (mode {mode:03o}); run chmod 600 on it", path.display())]
    Mode { path: PathBuf, mode: u32 },
    #[error("{} cannot be used: {reason}", path.display())]
    Unusable { path: PathBuf, reason: String },
    #[error("{name} is neither a DNS name nor an address, so no certificate can be for it")]
    Name { name: String },
}

/// Where a host finds what it shows to clients, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFiles {
    /// Its certificate, followed by what links it to its authority.
    pub certificate: PathBuf,
    /// The key of that certificate; readable by this user alone.
    pub key: PathBuf,
    /// Authorities whose clients may show a certificate. `None` means that clients are not asked for one.
    pub client_authority: Option<PathBuf>,
}

impl HostFiles {
    fn paths(&self) -> Vec<PathBuf> {
        [&self.certificate, &self.key].into_iter().chain(&self.client_authority).cloned().collect()
    }
}

/// What a host shows to clients. The files are read again when they change.
#[derive(Debug)]
pub struct HostTls {
    files: HostFiles,
    config: Renewed<ServerConfig>,
}

impl HostTls {
    /// # Errors
    /// A file cannot be read, or they do not fit together.
    pub fn open(files: HostFiles) -> Result<Self, TlsError> {
        let config = Renewed::open(files.paths(), || read(&files))?;
        Ok(Self { files, config })
    }

    /// What new connections get. Where the files have changed since and cannot be used, `complain` is told once, and what
    /// was in use before stays.
    pub fn config(&self, complain: impl FnOnce(TlsError)) -> Arc<ServerConfig> {
        self.config.now(|| read(&self.files), complain)
    }
}

/// The host's side of a data connection. Nothing is exchanged before the first read or write.
///
/// # Errors
/// The descriptor cannot be copied.
pub fn host_stream(config: Arc<ServerConfig>, stream: TcpStream) -> io::Result<Stream> {
    let connection = ServerConnection::new(config).map_err(io::Error::other)?;
    Ok(Stream::Sealed(Arc::new(Session::new(connection, stream))))
}

/// Where a client finds whom to trust and what to show, in PEM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientFiles {
    /// Certificates of the authorities whose hosts are trusted.
    pub authority: PathBuf,
    /// The client's own certificate and its key, if it shows one.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// Whom a client trusts, what it shows, and the name of the host that it expects.
#[derive(Clone, Debug)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl ClientTls {
    /// For a host whose certificate names `name`: a DNS name or an address.
    ///
    /// # Errors
    /// A file cannot be read, or they do not fit together.
    pub fn read(files: &ClientFiles, name: &str) -> Result<Self, TlsError> {
        let roots = roots(&files.authority)?;
        let builder = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(unusable(&files.authority))?
            .with_root_certificates(roots);
        let mut config = match &files.identity {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => builder
                .with_client_auth_cert(certificates(certificate)?, private_key(key)?)
                .map_err(unusable(certificate))?,
        };
        // gRPC speaks HTTP/2; the data protocol asks for nothing.
        config.alpn_protocols = vec![b"h2".to_vec()];
        let name =
            ServerName::try_from(name.to_owned()).map_err(|_| TlsError::Name { name: name.to_owned() })?;
        Ok(Self { config: Arc::new(config), name })
    }

    pub fn config(&self) -> &Arc<ClientConfig> {
        &self.config
    }

    pub fn name(&self) -> &ServerName<'static> {
        &self.name
    }

    /// The client's side of a data connection. Nothing is exchanged before the first read or write.
    ///
    /// # Errors
    /// The descriptor cannot be copied.
    pub fn stream(&self, stream: TcpStream) -> io::Result<Stream> {
        let connection = ClientConnection::new(Arc::clone(&self.config), self.name.clone());
        let connection = connection.map_err(io::Error::other)?;
        Ok(Stream::Sealed(Arc::new(Session::new(connection, stream))))
    }
}

/// Whether a certificate, in DER, is for this DNS name. That it is an authority's was checked when it was shown.
pub fn is_for(certificate: &[u8], name: &str) -> bool {
    let certificate = CertificateDer::from(certificate);
    let Ok(name) = DnsName::try_from(name) else { return false };
    let parsed = ParsedCertificate::try_from(&certificate);
    parsed.is_ok_and(|parsed| rustls::client::verify_server_name(&parsed, &ServerName::DnsName(name)).is_ok())
}

/// When a certificate, in DER, expires. Returns `None` if it cannot be read.
pub fn expires(certificate: &[u8]) -> Option<SystemTime> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let seconds = u64::try_from(certificate.validity().not_after.timestamp()).ok()?;
    UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

fn read(files: &HostFiles) -> Result<ServerConfig, TlsError> {
    let HostFiles { certificate, key, client_authority } = files;
    let builder = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(unusable(certificate))?;
    let builder =
        match client_authority {
            None => builder.with_no_client_auth(),
            Some(authority) => {
                let roots = Arc::new(roots(authority)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
                // A client without one shows a token.
                let verifier = verifier.allow_unauthenticated().build();
                builder.with_client_cert_verifier(verifier.map_err(|error| TlsError::Unusable {
                    path: authority.clone(),
                    reason: error.to_string(),
                })?)
            }
        };
    let mut config = builder
        .with_single_cert(certificates(certificate)?, private_key(key)?)
        .map_err(unusable(certificate))?;
    // For gRPC, and for the pages; the data protocol asks for nothing.
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    // Sessions are not resumed, so each connection checks the certificates again.
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn unusable(path: &Path) -> impl FnOnce(rustls::Error) -> TlsError {
    move |error| TlsError::Unusable { path: path.to_owned(), reason: error.to_string() }
}

fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for root in certificates(path)? {
        roots.add(root).map_err(unusable(path))?;
    }
    Ok(roots)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let file = |source| TlsError::File { path: path.to_owned(), source };
    let found: Vec<_> =
        CertificateDer::pem_file_iter(path).map_err(file)?.collect::<Result<_, _>>().map_err(file)?;
    if found.is_empty() { Err(TlsError::Empty { path: path.to_owned() }) } else { Ok(found) }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let file = |source| TlsError::File { path: path.to_owned(), source };
    let mode = fs::metadata(path).map_err(|error| file(pem::Error::Io(error)))?.permissions().mode();
    if mode & 0o077 != 0 {
        return Err(TlsError::Mode { path: path.to_owned(), mode: mode & 0o777 });
    }
    PrivateKeyDer::from_pem_file(path).map_err(file)
}

#[cfg(test)]
mod tests;
