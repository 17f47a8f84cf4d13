//! What comes between two hosts.

use std::net::Shutdown;
use std::sync::atomic::AtomicBool;

use super::*;

/// A way from one host to another.
pub(super) struct Gate {
    addr: SocketAddr,
    open: Arc<AtomicBool>,
    stalled: Arc<AtomicBool>,
    /// Both ends of what goes through it.
    through: Arc<Mutex<Vec<TcpStream>>>,
}

impl Gate {
    pub(super) fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let gate = Self {
            addr: listener.local_addr().unwrap(),
            open: Arc::new(AtomicBool::new(true)),
            stalled: Arc::default(),
            through: Arc::default(),
        };
        let (open, through) = (Arc::clone(&gate.open), Arc::clone(&gate.through));
        let stalled = Arc::clone(&gate.stalled);
        // Ends with the process.
        thread::spawn(move || {
            for from in listener.incoming().flatten() {
                let mut through = through.lock();
                if stalled.load(Ordering::SeqCst) {
                    through.push(from);
                    continue;
                }
                // Closed: the caller sees a connection that ends at once.
                if open.load(Ordering::SeqCst)
                    && let Ok(to) = TcpStream::connect(target)
                {
                    pump(&from, &to);
                    pump(&to, &from);
                    through.extend([from, to]);
                }
            }
        });
        gate
    }

    pub(super) fn close(&self) {
        let mut through = self.through.lock();
        self.open.store(false, Ordering::SeqCst);
        through.drain(..).for_each(|end| drop(end.shutdown(Shutdown::Both)));
    }

    pub(super) fn open(&self) {
        self.open.store(true, Ordering::SeqCst);
    }

    /// New connections are taken, and nobody answers on them.
    pub(super) fn stall(&self) {
        self.stalled.store(true, Ordering::SeqCst);
    }
}

fn pump(from: &TcpStream, to: &TcpStream) {
    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
    thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    });
}

/// Has the host reach peer `n` through a gate.
pub(super) fn through(config: &mut ClusterConfig, n: usize, gate: &Gate) {
    let name = format!("host-{n}");
    config.peers.iter_mut().filter(|peer| peer.name == name).for_each(|p| p.address = gate.addr.to_string());
}
