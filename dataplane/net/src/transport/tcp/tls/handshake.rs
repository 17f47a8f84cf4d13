//! The handshake, which reads no further than it has to: what follows may be for the kernel to decrypt.

use std::io::{self, Read, Write};

use kvasir_os::net::TcpStream;
use rustls::Connection;

/// Bytes before each record: its kind, its version, its length (RFC 8446, section 5.1).
const HEADER: usize = 5;

/// Exchanges certificates over a socket that does not block. `wait` waits until it can be written, or read.
///
/// # Errors
/// What `wait` says, an error of the network, or why one side refuses the other.
pub(in crate::transport::tcp) fn shake_hands(
    connection: &mut Connection,
    mut stream: &TcpStream,
    wait: impl Fn(bool) -> io::Result<()>,
) -> io::Result<()> {
    let mut records = Records { stream, header: Vec::with_capacity(HEADER), left: 0 };
    loop {
        let sent = write(connection, &mut stream)?;
        if sent && !connection.is_handshaking() {
            return Ok(());
        }
        let got = if sent { read(connection, &mut records) } else { Ok(false) };
        if got.is_err() {
            // Tells the peer why, if it still listens.
            let _ = write(connection, &mut stream);
        }
        if !got? {
            wait(!sent)?;
        }
    }
}

/// Sends encrypted bytes. Returns whether all of them are out.
pub(super) fn write(connection: &mut Connection, to: &mut impl Write) -> io::Result<bool> {
    while connection.wants_write() {
        match connection.write_tls(to) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(_) => {}
            Err(error) if is_later(&error) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Takes encrypted bytes in. Returns false if there are none now. After an error there may be an alert to [`write`].
pub(super) fn read(connection: &mut Connection, from: &mut impl Read) -> io::Result<bool> {
    match connection.read_tls(from) {
        Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(_) => {}
        Err(error) if is_later(&error) => return Ok(false),
        Err(error) => return Err(error),
    }
    let understood = connection.process_new_packets();
    understood.map(|_| true).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Whether the same call may succeed once the socket is ready.
pub(super) fn is_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Reads to the end of a record at most.
struct Records<'a> {
    stream: &'a TcpStream,
    /// What has come of the next record's header.
    header: Vec<u8>,
    /// Bytes that are missing of the record whose header has come.
    left: usize,
}

impl Read for Records<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let in_record = self.left > 0;
        let most = if in_record { self.left } else { HEADER - self.header.len() };
        let most = most.min(buffer.len());
        let count = self.stream.read(&mut buffer[..most])?;
        if in_record {
            self.left -= count;
            return Ok(count);
        }
        self.header.extend(&buffer[..count]);
        if let [_, _, _, high, low] = self.header[..] {
            self.left = u16::from_be_bytes([high, low]).into();
            self.header.clear();
        }
        Ok(count)
    }
}
