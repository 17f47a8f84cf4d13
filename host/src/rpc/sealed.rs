//! gRPC and HTTP over TLS: handshakes beside each other, and what each caller has shown.

use crate::access::tls_config;
use kvasir_tls::HostTls;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

/// Handshakes at once. One more, and the oldest of the address that has the most is given up: callers that say nothing keep
/// nobody out but themselves.
const HANDSHAKES_MAX: usize = 64;
/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// A connection whose handshake is done.
pub(crate) struct Sealed(TlsStream<TcpStream>);

/// Who is at the other end of one.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(crate) addr: Option<SocketAddr>,
    /// In DER; one of an authority that the host trusts.
    pub(crate) certificate: Option<Vec<u8>>,
}

/// Accepts until the host stops.
pub(super) fn incoming(
    listener: TcpListener,
    tls: Arc<HostTls>,
    stopping: &watch::Receiver<bool>,
) -> ReceiverStream<io::Result<Sealed>> {
    let (done, incoming) = mpsc::channel(HANDSHAKES_MAX);
    let stop = super::stop_signal(stopping);
    tokio::spawn(async move {
        tokio::select! {
            () = accept(listener, tls, HANDSHAKE, done) => {}
            () = stop => {}
        }
    });
    ReceiverStream::new(incoming)
}

async fn accept(
    listener: TcpListener,
    tls: Arc<HostTls>,
    patience: Duration,
    done: mpsc::Sender<io::Result<Sealed>>,
) {
    let mut handshakes: Vec<(IpAddr, AbortHandle)> = Vec::new();
    loop {
        let Ok((stream, from)) = listener.accept().await else {
            tokio::time::sleep(super::ACCEPT_PAUSE).await;
            continue;
        };
        make_room(&mut handshakes);
        let (acceptor, done) = (TlsAcceptor::from(tls_config(&tls)), done.clone());
        let handshake = tokio::spawn(async move {
            let _ = stream.set_nodelay(true);
            // A handshake that fails is the caller's affair.
            if let Ok(Ok(stream)) = tokio::time::timeout(patience, acceptor.accept(stream)).await {
                let _ = done.send(Ok(Sealed(stream))).await;
            }
        });
        handshakes.push((from.ip(), handshake.abort_handle()));
    }
}

/// Oldest first.
fn make_room(handshakes: &mut Vec<(IpAddr, AbortHandle)>) {
    handshakes.retain(|(_, handshake)| !handshake.is_finished());
    if handshakes.len() < HANDSHAKES_MAX {
        return;
    }
    let of = |addr: IpAddr| handshakes.iter().filter(|(other, _)| *other == addr).count();
    let most = handshakes.iter().map(|(addr, _)| of(*addr)).max();
    let oldest = handshakes.iter().position(|(addr, _)| Some(of(*addr)) == most);
    if let Some(oldest) = oldest {
        handshakes.remove(oldest).1.abort();
    }
}

impl Connected for Sealed {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        let (stream, session) = self.0.get_ref();
        let shown = session.peer_certificates().and_then(<[_]>::first);
        Caller { addr: stream.peer_addr().ok(), certificate: shown.map(|shown| shown.to_vec()) }
    }
}

impl AsyncRead for Sealed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Sealed {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
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
        tokio::spawn(accept(listener, host, PATIENCE, done));
        let mut silent = Vec::new();
        for _ in 0..2 * HANDSHAKES_MAX {
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
    async fn the_address_with_the_most_handshakes_makes_room() {
        let waiting = |last: u8| (IpAddr::from([10, 0, 0, last]), tokio::spawn(std::future::pending::<()>()));
        let tasks: Vec<_> = (0..HANDSHAKES_MAX).map(|n| waiting(if n < 3 { n as u8 } else { 9 })).collect();
        let mut handshakes: Vec<_> = tasks.iter().map(|(addr, task)| (*addr, task.abort_handle())).collect();
        make_room(&mut handshakes);
        assert_eq!(handshakes.len(), HANDSHAKES_MAX - 1);
        let (n, given_up) = tasks.into_iter().enumerate().nth(3).unwrap();
        assert!(given_up.1.await.unwrap_err().is_cancelled(), "handshake {n}, the oldest of that address");
    }
}
