//! The thread that has the guards look.

use super::{Error, PolicyHost};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Starts the thread, unless somebody else has the guards look; it ends with the host.
pub(super) fn start(host: &Arc<PolicyHost>) -> Result<(), Error> {
    let every = host.guards().every;
    if every.is_zero() {
        return Ok(());
    }
    let host = Arc::downgrade(host);
    let thread = std::thread::Builder::new().name("kvasir-guard".into());
    let started = thread.spawn(move || look(&host, every));
    started.map(drop).map_err(|e| Error::Engine(format!("cannot start the guards' thread: {e}")))
}

fn look(host: &Weak<PolicyHost>, every: Duration) {
    let start = Instant::now();
    while let Some(host) = host.upgrade() {
        host.judge(start.elapsed().as_millis() as u64);
        drop(host);
        std::thread::sleep(every);
    }
}
