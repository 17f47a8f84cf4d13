//! A connection on which this host asks another one.

use std::io;
use std::sync::Arc;

use super::message::{self, FrameError, Reply, Request, Welcome};
use kvasir_net::transport::Node;
use kvasir_net::transport::tcp::Tls;
use kvasir_net::transport::tcp::greet::{self, GreetError};
use kvasir_net::transport::tcp::socket::{Deadlined, Socket};
use kvasir_os::net::{TcpStream, ToSocketAddrs};
use kvasir_os::time::{Duration, Instant};

/// Why another host could not be asked.
#[derive(Debug, thiserror::Error)]
pub(super) enum ChannelError {
    #[error("no connection to {address}: {source}; check that the host runs there")]
    Unreachable { address: String, source: io::Error },
    #[error(
        "the host at {address} and this one do not share a secret ({reason}); give both the same cluster.secret_file"
    )]
    Secret { address: String, reason: GreetError },
    #[error(
        "the host at {address} and this one do not agree about TLS ({reason}); give both, or neither, [cluster.tls] with \
         certificates of one authority, each with its node.name"
    )]
    Tls { address: String, reason: GreetError },
    #[error(
        "the host at {address} calls itself {found}, the settings call it {expected}; correct cluster.peers"
    )]
    Name { address: String, found: String, expected: String },
    #[error("the host at {address} refuses: {reason}")]
    Refused { address: String, reason: String },
    #[error("the host at {address} answered something that was not asked")]
    WrongReply { address: String },
    #[error("the host at {address} broke off: {source}")]
    Broken { address: String, source: FrameError },
}

impl ChannelError {
    /// Whether the host answered, and something is wrong that will not go away by itself.
    pub(super) fn is_refusal(&self) -> bool {
        !matches!(self, Self::Unreachable { .. } | Self::Broken { source: FrameError::Io(_), .. })
    }

    /// Whether the process on the other side has ended, and is not merely silent.
    pub(super) fn is_end(&self) -> bool {
        use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, UnexpectedEof};
        let kind = match self {
            Self::Unreachable { source, .. } | Self::Broken { source: FrameError::Io(source), .. } => {
                source.kind()
            }
            _ => return false,
        };
        matches!(kind, UnexpectedEof | ConnectionReset | ConnectionAborted | ConnectionRefused)
    }
}

pub(super) struct Channel {
    address: String,
    socket: Arc<Socket>,
}

impl Channel {
    /// Connects to `address`, where a host of this name and cluster must answer, all within `patience`.
    pub(super) fn connect(
        address: &str,
        node: &Node,
        tls: Option<&Tls>,
        cluster: &str,
        name: &str,
        patience: Duration,
    ) -> Result<(Self, Welcome), ChannelError> {
        let until = Instant::now() + patience;
        let unreachable = |source| ChannelError::Unreachable { address: address.to_owned(), source };
        let stream = dial(address, patience).map_err(unreachable)?;
        let met = greet::connect(stream, tls, node, "", until);
        let (socket, found) = met.map_err(|reason| match reason {
            GreetError::Away(error) => unreachable(error),
            reason if reason.is_tls() => ChannelError::Tls { address: address.to_owned(), reason },
            reason => ChannelError::Secret { address: address.to_owned(), reason },
        })?;
        if found != name {
            let expected = name.to_owned();
            return Err(ChannelError::Name { address: address.to_owned(), found, expected });
        }
        let mut channel = Self { address: address.to_owned(), socket: Arc::new(socket) };
        match channel.call(&Request::Hello { cluster: cluster.to_owned() }, until)? {
            Reply::Welcome(welcome) => Ok((channel, welcome)),
            _ => Err(channel.wrong_reply()),
        }
    }

    /// Asks, and waits for the answer until `until`. After an error the connection is of no further use.
    pub(super) fn call(&mut self, request: &Request, until: Instant) -> Result<Reply, ChannelError> {
        let mut stream = Deadlined { socket: &self.socket, deadline: until };
        let reply = message::write(&mut stream, request).and_then(|()| message::read(&mut stream));
        match reply {
            Ok(Reply::Refused { reason }) => {
                Err(ChannelError::Refused { address: self.address.clone(), reason })
            }
            Ok(reply) => Ok(reply),
            Err(source) => Err(ChannelError::Broken { address: self.address.clone(), source }),
        }
    }

    pub(super) fn wrong_reply(&self) -> ChannelError {
        ChannelError::WrongReply { address: self.address.clone() }
    }

    /// The address that it really reached, for the use of others on the same machine.
    pub(super) fn peer_ip(&self) -> Option<std::net::IpAddr> {
        self.socket.peer_addr().ok().map(|address| address.ip())
    }

    /// A handle to end it from outside.
    pub(super) fn handle(&self) -> Arc<Socket> {
        Arc::clone(&self.socket)
    }
}

fn dial(address: &str, patience: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "it resolves to no address");
    for resolved in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&resolved, patience) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}
