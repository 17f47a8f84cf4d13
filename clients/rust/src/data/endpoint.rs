//! Where a host's data plane listens.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use kvasir_os::net::{SocketAddr, ToSocketAddrs};

use super::ClientError;

/// Where a host's data plane listens. Written `unix:/path`, `host:port`, `tcp:host:port` or
/// `tcp://host:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// Same machine and user: blocks are read and filled in place.
    Unix(PathBuf),
    Tcp(SocketAddr),
}

impl FromStr for Endpoint {
    type Err = ClientError;

    fn from_str(text: &str) -> Result<Self, ClientError> {
        let bad = |why: String| ClientError::Endpoint { text: text.into(), why };
        if let Some(path) = text.strip_prefix("unix:") {
            return Ok(Self::Unix(path.into()));
        }
        let address = ["tcp://", "tcp:"].iter().find_map(|scheme| text.strip_prefix(scheme)).unwrap_or(text);
        let mut addrs = address.to_socket_addrs().map_err(|error| bad(error.to_string()))?;
        addrs.next().map(Self::Tcp).ok_or_else(|| bad("it resolves to no address".into()))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(addr) => write!(f, "{addr}"),
        }
    }
}
