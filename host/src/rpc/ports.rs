//! Connections of the control ports: who is at the other end, encrypted or not, and how many there may be.
//!
//! A port has room for [`CONNECTIONS_MAX`]. In a full one, a connection that has not yet made a call that it may make gives its place to
//! the next: callers that say nothing, and callers that nobody knows, keep nobody out.

use crate::access::door::{Caller, From};
use crate::access::tls_config;
use kvasir_tls::HostTls;
use std::convert::Infallible;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

/// The most connections of one port.
pub(super) const CONNECTIONS_MAX: usize = 256;
/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Pause after a failure to accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// Where a port listens.
pub(super) enum Port {
    Unix(UnixListener),
    Tcp(TcpListener),
    Tls(TcpListener, Arc<HostTls>),
}

/// A connection, whatever carries it.
pub(super) struct Connection {
    stream: Box<dyn Io>,
    caller: Caller,
    /// Ready when it must make room.
    leave: oneshot::Receiver<Infallible>,
}

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// A place in a port.
struct Seat {
    of: Group,
    known: Arc<AtomicBool>,
    /// Dropped so that it makes room; closed once the connection has ended.
    stay: oneshot::Sender<Infallible>,
}

/// Callers whose connections are counted together: one of them makes room for another first.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Group {
    User(u32),
    Address(IpAddr),
    Unknown,
}

/// Accepts until the host stops.
pub(super) fn incoming(
    port: Port,
    stopping: &watch::Receiver<bool>,
) -> ReceiverStream<io::Result<Connection>> {
    let (done, incoming) = mpsc::channel(CONNECTIONS_MAX);
    let stop = super::stop_signal(stopping);
    tokio::spawn(async move {
        tokio::select! {
            () = accept(port, HANDSHAKE, done) => {}
            () = stop => {}
        }
    });
    ReceiverStream::new(incoming)
}

async fn accept(port: Port, patience: Duration, done: mpsc::Sender<io::Result<Connection>>) {
    let mut seats: Vec<Seat> = Vec::new();
    loop {
        let Ok((stream, from)) = port.accept().await else {
            // For lack of descriptors, for example.
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        if !make_room(&mut seats) {
            continue;
        }
        let (known, (stay, leave)) = (Arc::new(AtomicBool::new(false)), oneshot::channel());
        seats.push(Seat { of: Group::of(from), known: Arc::clone(&known), stay });
        let caller = Caller { from, certificate: None, known };
        match (stream, &port) {
            (Raw::Tcp(stream), Port::Tls(_, tls)) => {
                let handshake = handshake(stream, TlsAcceptor::from(tls_config(tls)), caller, leave);
                let done = done.clone();
                tokio::spawn(async move {
                    // A connection that fails is the caller's problem.
                    if let Ok(Some(sealed)) = tokio::time::timeout(patience, handshake).await {
                        let _ = done.send(Ok(sealed)).await;
                    }
                });
            }
            (Raw::Tcp(stream), _) => drop(done.send(Ok(clear(Box::new(stream), caller, leave))).await),
            (Raw::Unix(stream), _) => drop(done.send(Ok(clear(stream, caller, leave))).await),
        }
    }
}

enum Raw {
    Unix(Box<dyn Io>),
    Tcp(TcpStream),
}

impl Port {
    async fn accept(&self) -> io::Result<(Raw, Option<From>)> {
        match self {
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let from =
                    stream.peer_cred().ok().map(|peer| From::Unix { uid: peer.uid(), gid: peer.gid() });
                Ok((Raw::Unix(Box::new(stream)), from))
            }
            Self::Tcp(listener) | Self::Tls(listener, _) => {
                let (stream, from) = listener.accept().await?;
                let _ = stream.set_nodelay(true);
                Ok((Raw::Tcp(stream), Some(From::Tcp(from))))
            }
        }
    }
}

fn clear(stream: Box<dyn Io>, caller: Caller, leave: oneshot::Receiver<Infallible>) -> Connection {
    Connection { stream, caller, leave }
}

/// `None` means that it failed, or made room.
async fn handshake(
    stream: TcpStream,
    acceptor: TlsAcceptor,
    mut caller: Caller,
    mut leave: oneshot::Receiver<Infallible>,
) -> Option<Connection> {
    let sealed = tokio::select! {
        sealed = acceptor.accept(stream) => sealed.ok()?,
        _ = &mut leave => return None,
    };
    let shown = sealed.get_ref().1.peer_certificates().and_then(<[_]>::first);
    caller.certificate = shown.map(|shown| shown.to_vec());
    Some(Connection { stream: Box::new(sealed), caller, leave })
}

/// Whether there is a place for one more. In a full port, the oldest connection that is not known makes room, of the group that
/// has the most such.
fn make_room(seats: &mut Vec<Seat>) -> bool {
    seats.retain(|seat| !seat.stay.is_closed());
    if seats.len() < CONNECTIONS_MAX {
        return true;
    }
    let unknown = |seat: &&Seat| !seat.known.load(Ordering::Relaxed);
    let of = |group| seats.iter().filter(unknown).filter(|seat| seat.of == group).count();
    let most = seats.iter().filter(unknown).map(|seat| of(seat.of)).max();
    let oldest = seats.iter().position(|seat| unknown(&seat) && Some(of(seat.of)) == most);
    oldest.map(|oldest| seats.remove(oldest)).is_some()
}

impl Group {
    fn of(from: Option<From>) -> Self {
        match from {
            Some(From::Unix { uid, .. }) => Self::User(uid),
            Some(From::Tcp(addr)) => Self::Address(addr.ip()),
            None => Self::Unknown,
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // A server reads whenever it has nothing to say.
        if !self.leave.is_terminated() && Pin::new(&mut self.leave).poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_tls::{ClientFiles, ClientTls, HostFiles};
    use rcgen::{CertifiedKey, generate_simple_self_signed};
    use std::os::unix::fs::PermissionsExt;

    const PATIENCE: Duration = Duration::from_secs(3600);

    fn pair(dir: &std::path::Path) -> (Arc<HostTls>, ClientTls) {
        let CertifiedKey { cert, signing_key } =
            generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let (certificate, key) = (dir.join("cert.pem"), dir.join("key.pem"));
        std::fs::write(&certificate, cert.pem()).unwrap();
        std::fs::write(&key, signing_key.serialize_pem()).unwrap();
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
        let trusted = ClientFiles { authority: certificate.clone(), identity: None };
        let host = HostTls::open(HostFiles { certificate, key, client_authority: None }).unwrap();
        (Arc::new(host), ClientTls::read(&trusted, "127.0.0.1").unwrap())
    }

    #[tokio::test]
    async fn callers_that_say_nothing_keep_nobody_out() {
        let dir = tempfile::tempdir().unwrap();
        let (host, client) = pair(dir.path());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (done, mut incoming) = mpsc::channel(1);
        tokio::spawn(accept(Port::Tls(listener, host), PATIENCE, done));
        let mut silent = Vec::new();
        for _ in 0..CONNECTIONS_MAX + 50 {
            silent.push(TcpStream::connect(addr).await.unwrap());
        }
        let connector = tokio_rustls::TlsConnector::from(Arc::clone(client.config()));
        let honest = async {
            let stream = TcpStream::connect(addr).await.unwrap();
            connector.connect(client.name().clone(), stream).await.unwrap()
        };
        // Ends the test where it fails; nothing waits for it otherwise.
        let served =
            tokio::time::timeout(Duration::from_secs(120), async { tokio::join!(honest, incoming.recv()) });
        let (_, served) = served.await.expect("the honest caller waits for the silent ones");
        assert!(served.unwrap().is_ok());
    }

    #[tokio::test]
    async fn the_group_with_the_most_unknown_makes_room_and_a_known_caller_stays() {
        let (mut seats, mut lines) = (Vec::new(), Vec::new());
        for n in 0..CONNECTIONS_MAX {
            // The first three are of other groups, and the fourth is known.
            let (known, of) = (Arc::new(AtomicBool::new(n == 3)), if n < 3 { n as u32 } else { 9 });
            let (stay, leave) = oneshot::channel();
            seats.push(Seat { of: Group::User(of), known, stay });
            lines.push(leave);
        }
        assert!(make_room(&mut seats));
        assert_eq!(seats.len(), CONNECTIONS_MAX - 1);
        assert!((&mut lines[4]).await.is_err(), "the oldest of the unknown of that group");
        lines.remove(0);
        assert!(make_room(&mut seats));
        assert_eq!(seats.len(), CONNECTIONS_MAX - 2, "one has ended");
        for seat in &seats {
            seat.known.store(true, Ordering::Relaxed);
        }
        let (stay, _leave) = oneshot::channel();
        seats.push(Seat { of: Group::Unknown, known: Arc::new(AtomicBool::new(true)), stay });
        let (stay, _leave) = oneshot::channel();
        seats.push(Seat { of: Group::Unknown, known: Arc::new(AtomicBool::new(true)), stay });
        assert!(!make_room(&mut seats), "known callers keep their places");
    }

    #[tokio::test]
    async fn a_connection_that_makes_room_ends() {
        use tokio::io::AsyncReadExt;
        let (ours, _theirs) = tokio::io::duplex(16);
        let (stay, leave) = oneshot::channel();
        let caller = Caller { from: None, certificate: None, known: Arc::default() };
        let mut connection = clear(Box::new(ours), caller, leave);
        drop(stay);
        assert_eq!(connection.read(&mut [0]).await.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    }
}
