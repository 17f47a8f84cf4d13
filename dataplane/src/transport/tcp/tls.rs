//! TLS under the frames, for networks that are not trusted: both sides show a certificate of the cluster's own authority.
//!
//! TLS 1.3 alone. What is in memory is encrypted into a buffer and decrypted out of one, so it costs the copies that the
//! plain link avoids. No public authority is asked, and no name but the cluster's own: which node a peer is it says in
//! the handshake above, which the shared secret guards.

mod session;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection};

pub(super) use self::session::Session;

/// Where a node finds its TLS material, all in PEM.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// Certificates of the authorities whose nodes are let in.
    pub authority: PathBuf,
    /// This node's certificate, followed by what links it to the authority. It names [`name`](Self::name), and is for
    /// use by clients and servers.
    pub certificate: PathBuf,
    /// The key of that certificate.
    pub key: PathBuf,
    /// The DNS name in every node's certificate, such as `kvasir`.
    pub name: String,
}

/// Why TLS material was refused.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{what} cannot be read from {path}: {source}; it must be PEM")]
    File { what: &'static str, path: PathBuf, source: pem::Error },
    #[error("{path} has no certificate")]
    Empty { path: PathBuf },
    #[error("{name:?} is no DNS name; use one such as kvasir")]
    Name { name: String },
    #[error("certificate {certificate} and key {key} are refused: {reason}")]
    Refused { certificate: PathBuf, key: PathBuf, reason: String },
}

/// What a node shows and whom it lets in. Clones share it.
#[derive(Clone, Debug)]
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    name: ServerName<'static>,
}

impl Tls {
    /// Reads and checks the files.
    ///
    /// # Errors
    /// One that names the file and what is wrong with it.
    pub fn read(files: &TlsFiles) -> Result<Self, TlsError> {
        let TlsFiles { authority, certificate, key, name } = files;
        let refused = |error: &dyn std::fmt::Display| TlsError::Refused {
            certificate: certificate.clone(),
            key: key.clone(),
            reason: error.to_string(),
        };
        let name = ServerName::try_from(name.clone()).map_err(|_| TlsError::Name { name: name.clone() })?;
        let mut roots = RootCertStore::empty();
        for root in certificates(authority, "the authority")? {
            roots.add(root).map_err(|error| refused(&error))?;
        }
        let roots = Arc::new(roots);
        let chain = certificates(certificate, "the certificate")?;
        let file = |source| TlsError::File { what: "the key", path: key.clone(), source };
        let key = PrivateKeyDer::from_pem_file(key).map_err(file)?;
        let provider = Arc::new(ring::default_provider());
        let client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| refused(&error))?
            .with_root_certificates(roots.clone())
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(|error| refused(&error))?;
        let clients = WebPkiClientVerifier::builder_with_provider(roots, provider.clone());
        let server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| refused(&error))?
            .with_client_cert_verifier(clients.build().map_err(|error| refused(&error))?)
            .with_single_cert(chain, key)
            .map_err(|error| refused(&error))?;
        Ok(Self { client: Arc::new(client), server: Arc::new(server), name })
    }

    pub(super) fn client(&self) -> io::Result<rustls::Connection> {
        let connection = ClientConnection::new(self.client.clone(), self.name.clone());
        connection.map(Into::into).map_err(io::Error::other)
    }

    pub(super) fn server(&self) -> io::Result<rustls::Connection> {
        ServerConnection::new(self.server.clone()).map(Into::into).map_err(io::Error::other)
    }
}

fn certificates(path: &Path, what: &'static str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let file = |source| TlsError::File { what, path: path.to_owned(), source };
    let found: Vec<_> =
        CertificateDer::pem_file_iter(path).map_err(file)?.collect::<Result<_, _>>().map_err(file)?;
    if found.is_empty() { Err(TlsError::Empty { path: path.to_owned() }) } else { Ok(found) }
}

/// What TLS itself has against the peer, or the peer against us; none for errors of the network.
pub(super) fn reason(error: &io::Error) -> Option<String> {
    error.get_ref()?.downcast_ref::<rustls::Error>().map(ToString::to_string)
}

#[cfg(test)]
mod tests;
