//! gRPC over TLS: handshakes beside each other, and what each caller has shown.

use crate::access::tls_config;
use kvasir_tls::HostTls;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

/// Handshakes at once; a caller beyond them waits in the listener's queue.
const HANDSHAKES_MAX: usize = 64;
/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Pause after a failure to accept, such as for want of descriptors.
const PAUSE: Duration = Duration::from_millis(20);

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
            () = accept(listener, tls, done) => {}
            () = stop => {}
        }
    });
    ReceiverStream::new(incoming)
}

async fn accept(listener: TcpListener, tls: Arc<HostTls>, done: mpsc::Sender<io::Result<Sealed>>) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    while let Ok(permit) = Arc::clone(&handshakes).acquire_owned().await {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let (acceptor, done) = (TlsAcceptor::from(tls_config(&tls)), done.clone());
        tokio::spawn(async move {
            let _permit = permit;
            let _ = stream.set_nodelay(true);
            // A handshake that fails is the caller's affair.
            if let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
                let _ = done.send(Ok(Sealed(stream))).await;
            }
        });
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
