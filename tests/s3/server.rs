//! An S3-compatible server over a directory.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use hyper::server::conn::http1::Builder;
use hyper_util::rt::TokioIo;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s_fs::FileSystem;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

pub(crate) const BUCKET: &str = "blocks";
pub(crate) const ACCESS_KEY: &str = "kvasir";
pub(crate) const SECRET_KEY: &str = "kvasir-secret";

pub(crate) struct Server {
    root: TempDir,
    address: SocketAddr,
    /// The running server; `None` while stopped.
    running: Option<Runtime>,
}

impl Server {
    /// Serves an empty bucket at a free port.
    pub(crate) fn start() -> Self {
        let root = TempDir::new().unwrap();
        std::fs::create_dir(root.path().join(BUCKET)).unwrap();
        let mut server = Self { root, address: ([127, 0, 0, 1], 0).into(), running: None };
        server.restart();
        server
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops as a crash looks to clients: connections break wherever they are.
    pub(crate) fn stop(&mut self) {
        let running = self.running.take().expect("it is running");
        running.shutdown_timeout(Duration::from_secs(60));
    }

    /// Serves the same bucket at the same address.
    pub(crate) fn restart(&mut self) {
        assert!(self.running.is_none(), "stop it first");
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let mut service = S3ServiceBuilder::new(FileSystem::new(self.root.path()).unwrap());
        service.set_auth(SimpleAuth::from_single(ACCESS_KEY, SECRET_KEY));
        let listener = runtime.block_on(listen(self.address));
        self.address = listener.local_addr().unwrap();
        runtime.spawn(serve(listener, service.build()));
        self.running = Some(runtime);
    }
}

/// The port of a server that just stopped may take a moment to be free.
async fn listen(address: SocketAddr) -> TcpListener {
    let start = Instant::now();
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(error) => assert!(start.elapsed() < Duration::from_secs(60), "{address}: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn serve(listener: TcpListener, service: S3Service) {
    loop {
        let Ok((socket, _)) = listener.accept().await else { continue };
        let service = service.clone();
        tokio::spawn(async move {
            // Clients that go away do not concern the server.
            let _ = Builder::new().serve_connection(TokioIo::new(socket), service).await;
        });
    }
}
