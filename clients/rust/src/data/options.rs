//! How to connect.

use std::io;
use std::sync::Arc;
#[cfg(feature = "gpu")]
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use kvasir_os::net::TcpStream;
use kvasir_os::time::Duration;
use kvasir_protocol::stream::Stream;

/// What has happened on connections to a host.
#[derive(Debug, Default)]
pub struct Counts {
    /// Connections that the host has let in.
    pub connections: AtomicU64,
    /// [`Client::boot`](super::Client::boot) of the latest of them; 0 before the first.
    pub boot: AtomicU64,
    /// Blocks that came back with bytes that differ from their checksums, and were handed out as misses.
    pub checksum_failures: AtomicU64,
    /// Blocks that came back with the label of another block, which are errors.
    pub label_failures: AtomicU64,
    /// Why a host's pool could not be registered with the driver of a GPU, the first time that happened. From then on blocks
    /// of that GPU go through page-locked memory, which takes a copy more.
    #[cfg(feature = "gpu")]
    pub unregistered: OnceLock<String>,
}

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
    /// The token that tells the host who this client is, over TCP (`kvasir token new`). Default none.
    pub token: String,
    /// How long the host may take to answer. Default 10 s.
    pub timeout: Duration,
    /// Where connections that are made with these options, or with a clone of them, count what happens. Default: counts of
    /// their own.
    pub counts: Arc<Counts>,
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
            counts: Arc::default(),
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
