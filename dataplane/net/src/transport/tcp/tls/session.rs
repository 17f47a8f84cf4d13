//! An encrypted connection that never blocks, once both sides have shown their certificates.

use parking_lot::{Mutex, MutexGuard};
use std::io::{self, BufRead, BufReader, Write};

use kvasir_memory::shared::{Place, Shared};
use kvasir_os::net::TcpStream;
use rustls::Connection;

use super::RECORD;
use super::handshake::{self, is_later};

/// The most encrypted bytes that may wait to be sent; beyond that, senders wait.
const UNSENT_MAX: usize = 256 << 10;
/// Encrypted bytes read in one system call: four records.
const READ_AHEAD: usize = 64 << 10;

/// The encrypted side of a [`Socket`](super::super::socket::Socket). Both directions share its state, so they take
/// turns; no thread holds it while waiting.
pub(in crate::transport::tcp) struct Session(Mutex<State>);

struct State {
    connection: Connection,
    /// The socket, which does not block.
    stream: BufReader<TcpStream>,
}

impl Session {
    pub(in crate::transport::tcp) fn new(mut connection: Connection, stream: TcpStream) -> Self {
        connection.set_buffer_limit(Some(UNSENT_MAX));
        Self(Mutex::new(State { connection, stream: BufReader::with_capacity(READ_AHEAD, stream) }))
    }

    /// Receives bytes into the parts in order and returns how many, or `None` if there are none now.
    pub(in crate::transport::tcp) fn receive(&self, parts: &mut [Place<'_>]) -> io::Result<Option<usize>> {
        let mut state = self.state();
        loop {
            match state.decrypted(parts)? {
                0 if state.read()? => {}
                0 => return Ok(None),
                count => return Ok(Some(count)),
            }
        }
    }

    /// Encrypts as much as there is room for and sends what the network takes. Returns `None` if there is no room now.
    pub(in crate::transport::tcp) fn send(&self, parts: &[Shared<'_>]) -> io::Result<Option<usize>> {
        let mut state = self.state();
        if !state.write()? {
            return Ok(None);
        }
        let mut taken = 0;
        let mut left = parts.to_vec();
        let mut left = &mut left[..];
        // A record holds as much; what is encrypted is read from a copy that nobody changes.
        let mut copy = [0; RECORD];
        loop {
            let record = fill(&mut copy, left);
            let count = state.connection.writer().write(record)?;
            taken += count;
            Shared::advance(&mut left, count);
            if count < RECORD {
                break;
            }
        }
        state.write()?;
        Ok((taken > 0 || parts.iter().all(|part| part.is_empty())).then_some(taken))
    }

    /// Sends what is encrypted, as much as fits now. Returns whether nothing is left.
    pub(in crate::transport::tcp) fn flush(&self) -> io::Result<bool> {
        self.state().write()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }
}

impl State {
    /// Sends encrypted bytes. Returns whether all of them are out.
    fn write(&mut self) -> io::Result<bool> {
        handshake::write(&mut self.connection, self.stream.get_mut())
    }

    /// Takes encrypted bytes in. Returns false if there are none now.
    fn read(&mut self) -> io::Result<bool> {
        let got = handshake::read(&mut self.connection, &mut self.stream);
        if got.is_err() {
            // Tells the peer why, if it still listens.
            let _ = self.write();
        }
        got
    }

    /// Copies bytes that are decrypted already into the parts in order. Returns 0 if there are none.
    fn decrypted(&mut self, parts: &mut [Place<'_>]) -> io::Result<usize> {
        let mut total = 0;
        for part in parts {
            while part.left() > 0 {
                let mut reader = self.connection.reader();
                let count = match reader.fill_buf() {
                    // The peer has said that it will send nothing more.
                    Ok([]) if total == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok([]) => return Ok(total),
                    Ok(bytes) => part.copy_in(bytes.into()),
                    Err(error) if is_later(&error) => return Ok(total),
                    Err(error) => return Err(error),
                };
                reader.consume(count);
                total += count;
            }
        }
        Ok(total)
    }
}

/// Copies the beginning of a list, as much as there is room for.
fn fill<'a>(to: &'a mut [u8], parts: &[Shared<'_>]) -> &'a [u8] {
    let mut filled = 0;
    for part in parts {
        filled += part.copy_to(&mut to[filled..]);
        if filled == to.len() {
            break;
        }
    }
    &to[..filled]
}
