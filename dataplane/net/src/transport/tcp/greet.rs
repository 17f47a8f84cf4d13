//! How two nodes meet on a connection: TLS if the settings ask for it, then the shared secret, then whether the name
//! that was proven with the secret is the one in the certificate. Nothing else is said before.
//!
//! A node with TLS and one without tell each other apart by the first bytes: each leaves the other something to read
//! that is not what it expects.

use kvasir_os::net::TcpStream;
use kvasir_os::time::Instant;
use std::io::{self, Write};

use super::socket::{Deadlined, Socket};
use super::tls::{self, Tls};
use crate::transport::auth::{self, AuthError};
use crate::transport::{Error, Node};

/// The first bytes of a TLS record of an alert, and of a handshake.
const ALERT: u8 = 0x15;
const HANDSHAKE: u8 = 0x16;

/// Why two nodes did not come together.
#[derive(Debug, thiserror::Error)]
pub enum GreetError {
    #[error("{0}")]
    Away(io::Error),
    #[error("{0}")]
    Secret(AuthError),
    #[error("that one has no TLS, this one has")]
    Plain,
    #[error("that one has TLS, this one has not")]
    Encrypted,
    #[error("{0}")]
    Certificate(String),
    #[error("it calls itself {name}, and shows a certificate for others: {reason}")]
    Name { name: String, reason: String },
}

impl GreetError {
    /// Whether the two differ about TLS or certificates.
    pub fn is_tls(&self) -> bool {
        matches!(self, Self::Plain | Self::Encrypted | Self::Certificate(_) | Self::Name { .. })
    }

    /// The same as an error of a transport that connected to `address`.
    pub(in crate::transport) fn of(self, transport: &'static str, address: &str) -> Error {
        let (address, reason) = (address.to_owned(), self.to_string());
        match self {
            Self::Away(_) => Error::Unreachable { transport, address, reason },
            error if error.is_tls() => Error::Certificate { address, reason },
            _ => Error::Authentication { address, reason },
        }
    }
}

/// The side that connected. Returns the peer's name. `realm`: as for [`auth::connect`].
pub fn connect(
    stream: TcpStream,
    tls: Option<&Tls>,
    node: &Node,
    realm: &str,
    deadline: Instant,
) -> Result<(Socket, String), GreetError> {
    let address = stream.peer_addr().map_err(GreetError::Away)?.ip();
    let mut socket = Socket::new(stream).map_err(GreetError::Away)?;
    if let Some(tls) = tls {
        let connection = tls.client(address);
        let encrypted = connection.and_then(|new| socket.encrypt(new, tls.is_for_kernel(), deadline));
        socket = encrypted.map_err(refused)?;
    }
    let peer = auth::connect(&mut Deadlined { socket: &socket, deadline }, node, realm);
    named(socket, peer.map_err(unbelieved)?)
}

/// The side that accepted. Returns the peer's name.
pub fn accept(
    stream: TcpStream,
    tls: Option<&Tls>,
    node: &Node,
    realm: &str,
    deadline: Instant,
) -> Result<(Socket, String), GreetError> {
    let mut socket = Socket::new(stream).map_err(GreetError::Away)?;
    if let Some(tls) = tls {
        let connection = tls.server();
        let encrypted = connection.and_then(|new| socket.encrypt(new, tls.is_for_kernel(), deadline));
        socket = encrypted.map_err(refused)?;
    }
    let mut stream = Deadlined { socket: &socket, deadline };
    match auth::accept(&mut stream, node, realm).map_err(unbelieved) {
        Ok(peer) => named(socket, peer),
        Err(error) => {
            if matches!(error, GreetError::Encrypted) {
                // Tell it that nobody here speaks TLS. If it is gone already, that is no loss.
                let _ = stream.write_all(&auth::PREFIX);
                stream.part();
            }
            Err(error)
        }
    }
}

fn named(socket: Socket, name: String) -> Result<(Socket, String), GreetError> {
    match socket.certified(&name) {
        Ok(()) => Ok((socket, name)),
        Err(reason) => Err(GreetError::Name { name, reason }),
    }
}

/// The meaning of an error of the TLS handshake, or of one after it.
fn refused(error: io::Error) -> GreetError {
    match tls::reason(&error) {
        Some(rustls::Error::InvalidMessage(_)) => GreetError::Plain,
        Some(reason) => GreetError::Certificate(reason.to_string()),
        None => GreetError::Away(error),
    }
}

/// The meaning of an error of the handshake about the secret.
fn unbelieved(error: AuthError) -> GreetError {
    match error {
        // A server may refuse our certificate only after our part of the handshake.
        AuthError::Io(error) if tls::reason(&error).is_some() => refused(error),
        // A peer that does not believe the proof hangs up, so an unexpected end is left to the last arm.
        AuthError::Io(error) if !auth::is_hanging_up(&error) => GreetError::Away(error),
        AuthError::Magic([ALERT | HANDSHAKE, 3, _, _]) => GreetError::Encrypted,
        error => GreetError::Secret(error),
    }
}
