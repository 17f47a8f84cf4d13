//! One encrypted connection of the data protocol.

use parking_lot::Mutex;
use std::io::{self, Read, Write};
use std::ops::DerefMut;

use kvasir_os::net::TcpStream;
use kvasir_protocol::stream::Sealed;
use rustls::{ConnectionCommon, SideData};

/// A connection whose two ends take turns, as the data protocol does: one thread reads and writes it. Others may end it by
/// its socket, without the lock.
pub(crate) struct Session<C> {
    connection: Mutex<C>,
    stream: TcpStream,
}

impl<C> Session<C> {
    pub(crate) fn new(connection: C, stream: TcpStream) -> Self {
        Self { connection: Mutex::new(connection), stream }
    }
}

impl<C, S> Sealed for Session<C>
where
    C: DerefMut<Target = ConnectionCommon<S>> + Send,
    S: SideData,
{
    fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut socket = &self.stream;
        rustls::Stream::new(&mut *self.connection.lock(), &mut socket).read(buffer)
    }

    fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize> {
        // What is still encrypted in the socket is left to a read that may wait.
        self.connection.lock().reader().read(buffer)
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut socket = &self.stream;
        let mut connection = self.connection.lock();
        let mut stream = rustls::Stream::new(&mut *connection, &mut socket);
        let written = stream.write(bytes)?;
        // An answer that is kept back would never come: its reader waits.
        stream.flush()?;
        Ok(written)
    }

    fn socket(&self) -> &TcpStream {
        &self.stream
    }

    fn certificate(&self) -> Option<Vec<u8>> {
        let connection = self.connection.lock();
        connection.peer_certificates().and_then(<[_]>::first).map(|shown| shown.to_vec())
    }
}
