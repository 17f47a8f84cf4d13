//! The side that owns the memory: it answers on the control stream, and its adapter does the rest.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::io::{self, Write};

use super::connect::{Epochs, connect};
use super::wire::{self, Frame, Inbox, Kind};
use super::{Shared, within};
use crate::transport::Denied;
use crate::transport::tcp::greet;
use crate::transport::tcp::socket::{Deadlined, Socket};
use kvasir_os::net::TcpStream;
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::listener::Seat;

/// Names whose epochs are remembered. When there are more, all are forgotten, which fences off less.
const FENCES_MAX: usize = 4096;
/// How long after a peer has spoken an earlier run of it is refused. By then that one knows what became of it; and one
/// false word, an epoch that no later run exceeds, does not shut a name out for good.
const FENCE_LIVES: Duration = Duration::from_secs(60);

/// The oldest epochs accepted from peers.
#[derive(Default)]
pub(super) struct Fences(Mutex<Spoken>);

impl Fences {
    /// The oldest epoch accepted from this peer; raised to `spoken` by [`raise`](Self::raise).
    pub(super) fn of(&self, peer: &str) -> u64 {
        self.0.lock().of(peer, Instant::now())
    }

    pub(super) fn raise(&self, peer: &str, spoken: u64) {
        self.0.lock().raise(peer, spoken, Instant::now());
    }
}

/// The highest epoch with which each peer has spoken lately, and until when that counts.
#[derive(Default)]
struct Spoken(HashMap<String, (u64, Instant)>);

impl Spoken {
    fn of(&self, peer: &str, now: Instant) -> u64 {
        self.0.get(peer).filter(|(_, until)| now < *until).map_or(0, |(epoch, _)| *epoch)
    }

    fn raise(&mut self, peer: &str, spoken: u64, now: Instant) {
        if self.0.len() >= FENCES_MAX && !self.0.contains_key(peer) {
            self.0.clear();
        }
        let epoch = spoken.max(self.of(peer, now));
        self.0.insert(peer.to_owned(), (epoch, now + FENCE_LIVES));
    }
}

/// From the handshake to the end of one connection.
pub(super) fn serve(shared: &Shared, stream: TcpStream, seat: &Seat) -> io::Result<()> {
    let config = &shared.config;
    let deadline = Instant::now() + config.handshake_timeout;
    let met = greet::accept(stream, config.tls.as_ref(), &shared.node, &shared.node.cluster, deadline);
    let (control, peer) = met.map_err(io::Error::other)?;
    if !shared.node.admits(&peer) {
        return Err(io::Error::other(format!("{peer} is no member of this cluster")));
    }
    seat.greeted();
    let id = shared.progress.id();
    let epochs = Epochs { ours: shared.node.exports.epoch(), fence: shared.fences.of(&peer) };
    let (device, channel) = (&shared.device, &shared.progress.channel);
    let mut meeting = Deadlined { socket: &control, deadline };
    let connection =
        connect(device, channel, id, config.queue, epochs, &mut meeting).map_err(io::Error::other)?;
    shared.fences.raise(&peer, connection.peer.epoch);
    // The queue pair is the only way for the peer's adapter to reach us, and goes when this returns.
    answer(shared, &peer, &control)
}

fn answer(shared: &Shared, peer: &str, control: &Socket) -> io::Result<()> {
    let (mut inbox, mut heard) = (Inbox::default(), Instant::now());
    loop {
        let Some(frame) = inbox.next(&mut within(control, shared.config.heartbeat))? else {
            // Peers ping when idle.
            if heard.elapsed() > shared.config.peer_timeout {
                return Err(io::ErrorKind::TimedOut.into());
            }
            continue;
        };
        heard = Instant::now();
        let reply = match frame.kind {
            Kind::Ping => Frame::new(Kind::Pong, b""),
            Kind::Open => open(shared, peer, &frame.body).unwrap_or_else(Frame::refusal),
            // A full queue drops notices and counts them.
            Kind::Notice => {
                shared.node.notices.push(peer, &frame.body);
                continue;
            }
            Kind::Grant | Kind::Pong => return Err(io::ErrorKind::InvalidData.into()),
        };
        within(control, shared.config.peer_timeout).write_all(&reply.encode())?;
    }
}

fn open(shared: &Shared, peer: &str, segment: &[u8]) -> Result<Frame, Denied> {
    let segment = std::str::from_utf8(segment).map_err(|_| Denied::Malformed)?;
    let granted = shared.node.exports.grant(segment, peer)?;
    // Memory that may be locked or keys have run out, or the GPU exports no dma-buf. In each case the peer cannot reach
    // the memory over this link.
    let regions = shared.registry.lend(granted.clone()).map_err(|_| Denied::Unreachable)?;
    // The grant may have been revoked while its memory was registered. Its lease may be the next to end.
    shared.registry.sweep();
    shared.progress.wake();
    Ok(wire::encode_grant(&granted, &regions))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_run_is_refused_for_a_while_and_nobody_for_ever() {
        let (mut fences, now) = (Spoken::default(), Instant::now());
        fences.raise("a", 7, now);
        fences.raise("a", 5, now);
        assert_eq!((fences.of("a", now), fences.of("b", now)), (7, 0));
        fences.raise("a", u64::MAX, now);
        assert_eq!(fences.of("a", now), u64::MAX);
        let later = now + FENCE_LIVES;
        assert_eq!(fences.of("a", later), 0);
        fences.raise("a", 8, later);
        assert_eq!(fences.of("a", later), 8, "what it said long ago no longer counts");
    }
}
