//! How to connect.

use std::io;
use std::net::TcpStream;
use std::time::Duration;

use kvasir_protocol::stream::Stream;

/// How to connect.
#[derive(Clone, Debug)]
pub struct Options {
    /// Ask to store and remove blocks. Default true.
    pub write: bool,
    /// Compare every block read with its checksum; one that differs is reported to the host and is a miss.
    /// Default true.
    pub verify: bool,
    /// What engine hashes do not cover (model, dtype, layout, block size). Default empty.
    pub namespace: String,
    /// The tenant on whose account blocks are stored and pinned; 0 = none in particular. Default 0.
    pub tenant: u16,
    /// Who this client is, where it comes over TCP (`kvasir token new`). Default none.
    pub token: String,
    /// How long the host may take to answer. Default 10 s.
    pub timeout: Duration,
    /// TLS, for connections over TCP. Default none.
    #[cfg(feature = "tls")]
    pub tls: Option<kvasir_tls::ClientTls>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            write: true,
            verify: true,
            namespace: String::new(),
            tenant: 0,
            token: String::new(),
            timeout: Duration::from_secs(10),
            #[cfg(feature = "tls")]
            tls: None,
        }
    }
}

impl Options {
    /// A connection over TCP, encrypted if TLS is asked for.
    pub(super) fn dress(&self, stream: TcpStream) -> io::Result<Stream> {
        #[cfg(feature = "tls")]
        if let Some(tls) = &self.tls {
            return tls.stream(stream);
        }
        Ok(Stream::Tcp(stream))
    }
}
