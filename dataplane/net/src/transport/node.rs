//! What all transports of one node share: its name, its secret, what it exports, what peers told it.

use kvasir_os::time::Instant;
use parking_lot::{Condvar, Mutex};
use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use super::grant::Exports;

/// The longest notice in bytes.
pub const NOTICE_MAX: usize = 64 << 10;
/// Notices kept for a slow reader; more are dropped and counted.
pub const NOTICES_MAX: usize = 4096;

/// One node, as transports know it.
pub struct Node {
    /// How peers see it in errors and metrics. At most 255 bytes.
    pub name: String,
    pub secret: Secret,
    pub exports: Exports,
    pub notices: Notices,
    /// What the rails of this node have in common with those of its peers besides the secret; part of their handshake.
    pub cluster: String,
    /// The nodes that may come in over a rail; every node with the secret if it is not set.
    members: Option<HashSet<String>>,
}

impl Node {
    /// `epoch` must be larger than that of every earlier run of this node; it fences off grants of those.
    pub fn new(name: &str, secret: Secret, epoch: u64) -> Self {
        Self {
            name: name.to_owned(),
            secret,
            exports: Exports::new(epoch),
            notices: Notices::default(),
            cluster: String::new(),
            members: None,
        }
    }

    /// Has its rails take only peers of this cluster with these names.
    #[must_use]
    pub fn of_cluster(self, cluster: &str, members: impl IntoIterator<Item = String>) -> Self {
        Self { cluster: cluster.to_owned(), members: Some(members.into_iter().collect()), ..self }
    }

    /// Whether a peer that proved to know the secret may come in over a rail.
    pub fn admits(&self, peer: &str) -> bool {
        self.members.as_ref().is_none_or(|members| members.contains(peer))
    }
}

/// What nodes of one cluster share to know each other. It never appears in logs.
#[derive(Clone)]
pub struct Secret(Box<[u8]>);

impl Secret {
    pub fn new(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Something a peer said with [`Endpoint::notify`](super::Endpoint::notify).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    pub peer: String,
    pub message: Vec<u8>,
}

/// What peers said, oldest first. Notices of one endpoint keep their order.
#[derive(Default)]
pub struct Notices {
    waiting: Mutex<VecDeque<Notice>>,
    arrived: Condvar,
    dropped: AtomicU64,
}

impl Notices {
    /// For transports. Returns false if the notice was dropped: the queue is full, or the message too long.
    pub fn push(&self, peer: &str, message: &[u8]) -> bool {
        let mut waiting = self.waiting.lock();
        if waiting.len() >= NOTICES_MAX || message.len() > NOTICE_MAX {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        waiting.push_back(Notice { peer: peer.to_owned(), message: message.to_owned() });
        self.arrived.notify_one();
        true
    }

    /// The next notice, as soon as there is one, or `None` when `deadline` passes first.
    pub fn wait(&self, deadline: Instant) -> Option<Notice> {
        let mut waiting = self.waiting.lock();
        loop {
            if let Some(notice) = waiting.pop_front() {
                return Some(notice);
            }
            let left = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
            self.arrived.wait_for(&mut waiting, left);
        }
    }

    /// Notices dropped since the start.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

/// Bytes that no peer can guess.
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    kvasir_os::random::fill(&mut bytes);
    bytes
}

pub fn random_u64() -> u64 {
    u64::from_le_bytes(random())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_are_kept_in_order_up_to_their_limit() {
        let notices = Notices::default();
        for n in 0..NOTICES_MAX {
            assert!(notices.push("a", &n.to_le_bytes()));
        }
        assert!(!notices.push("a", b"one too many"));
        assert_eq!((notices.dropped(), notices.wait(Instant::now()).unwrap().message), (1, vec![0; 8]));
        assert!(!notices.push("b", &vec![0; NOTICE_MAX + 1]));
    }

    #[test]
    fn secrets_do_not_print() {
        assert_eq!(format!("{:?}", Secret::new(b"hunter2")), "Secret(..)");
    }
}
