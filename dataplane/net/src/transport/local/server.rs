//! The side of a connection that gives memory away.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::{PAGE, Reach, SLOTS, word_of};
use crate::transport::auth;
use crate::transport::deadlined::Deadlined;
use crate::transport::grant::{Denied, Granted};
use crate::transport::node::Node;
use crate::transport::tcp::wire::{self, BODY_MAX, HEADER_LEN, Header, Kind};
use kvasir_memory::host::HostPool;
use kvasir_protocol::listener::Seat;
use kvasir_protocol::stream::send_with_fds;

/// What one connection was granted, and the page that says which of it is alive.
struct Slots {
    control: Arc<HostPool>,
    granted: Vec<Weak<Granted>>,
}

/// From the handshake to the end of one connection.
pub(super) fn serve(
    mut stream: UnixStream,
    seat: &Seat,
    node: &Node,
    reach: &dyn Reach,
    timeout: Duration,
) -> Result<(), Box<dyn std::error::Error>> {
    let peer = auth::accept(&mut Deadlined::new(&stream, timeout), node, &node.cluster)?;
    if !node.admits(&peer) {
        return Err(format!("{peer} is no member of this cluster").into());
    }
    seat.greeted();
    stream.set_write_timeout(Some(timeout))?;
    let mut slots = Slots { control: Arc::new(HostPool::read_only_to_others(PAGE)?), granted: Vec::new() };
    send_with_fds(&mut stream, &[0], &[slots.control.readonly_fd()?.as_fd()])?;
    let mut body = Vec::new();
    loop {
        let header = read_frame(&mut stream, &mut body)?;
        match header.kind {
            Kind::Open => {
                let name = wire::decode_segment(&body)?;
                answer_open(&mut stream, node, reach, &mut slots, &peer, (header.request, name))?;
            }
            Kind::Notice => {
                node.notices.push(&peer, &body);
            }
            kind => return Err(wire::WireError::Unasked(kind).into()),
        }
    }
}

pub(super) fn read_frame(
    stream: &mut impl Read,
    body: &mut Vec<u8>,
) -> Result<Header, Box<dyn std::error::Error>> {
    let mut head = [0; HEADER_LEN];
    stream.read_exact(&mut head)?;
    // Nothing on this link has a payload, and the decoder bounds the body.
    let header = Header::decode(&head)?;
    debug_assert!(header.body_len as usize <= BODY_MAX);
    body.resize(header.body_len as usize, 0);
    stream.read_exact(body)?;
    Ok(header)
}

fn answer_open(
    stream: &mut UnixStream,
    node: &Node,
    reach: &dyn Reach,
    slots: &mut Slots,
    peer: &str,
    (request, name): (u64, &str),
) -> Result<(), Box<dyn std::error::Error>> {
    let opened = node.exports.grant(name, peer).and_then(|granted| {
        let fds = descriptors(reach, &granted)?;
        let slot = slots.take(&granted)?;
        Ok((granted, fds, slot))
    });
    let (granted, fds, slot) = match opened {
        Ok(opened) => opened,
        Err(denied) => {
            let refusal = Header { code: denied as u8, ..Header::new(Kind::Grant, request) };
            return Ok(stream.write_all(&refusal.encode())?);
        }
    };
    let mut frame = Vec::new();
    wire::encode_grant(&mut frame, slot as u64, &granted);
    stream.write_all(&frame)?;
    for fd in fds {
        send_with_fds(stream, &[0], &[fd.as_fd()])?;
    }
    Ok(())
}

/// A descriptor per region.
fn descriptors(reach: &dyn Reach, granted: &Granted) -> Result<Vec<OwnedFd>, Denied> {
    let give = |region| reach.give(region, granted.access).ok_or(Denied::Unreachable);
    granted.regions.iter().map(give).collect()
}

impl Slots {
    /// Takes a word of the control page that says that this grant is alive, until the grant dies.
    fn take(&mut self, granted: &Arc<Granted>) -> Result<usize, Denied> {
        let is_dead = |old: &Weak<Granted>| old.upgrade().is_none_or(|old| old.enter().is_err());
        let slot = match self.granted.iter().position(is_dead) {
            Some(slot) => slot,
            None if self.granted.len() < SLOTS => self.granted.len(),
            None => return Err(Denied::Full),
        };
        if slot == self.granted.len() {
            self.granted.push(Arc::downgrade(granted));
        } else {
            self.granted[slot] = Arc::downgrade(granted);
        }
        let word = word_of(granted.key);
        self.control.mapping().store_word(slot as u64, word);
        // A grant may outlive the connection, and must not keep its page.
        let control = Arc::downgrade(&self.control);
        granted.on_death(move || {
            let Some(control) = control.upgrade() else { return };
            // Another grant may have the word by now.
            if control.mapping().load_word(slot as u64) == Some(word) {
                control.mapping().store_word(slot as u64, 0);
            }
        });
        Ok(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::grant::{Access, Exports};
    use kvasir_memory::buffer::Buffer;
    use kvasir_memory::region::Region;

    /// It is a mapping and two descriptors.
    #[test]
    fn the_page_of_a_connection_ends_with_it_though_its_grants_live_on() {
        let exports = Exports::new(1);
        let region = Region::of_buffer(Buffer::zeroed(100));
        exports.export("kv", vec![region], Access::Read, Duration::from_secs(3600)).unwrap();
        let granted = exports.grant("kv", "peer").unwrap();
        let control = Arc::new(HostPool::read_only_to_others(PAGE).unwrap());
        let (page, mut slots) = (Arc::downgrade(&control), Slots { control, granted: Vec::new() });
        let slot = slots.take(&granted).unwrap() as u64;
        assert_eq!(slots.control.mapping().load_word(slot), Some(word_of(granted.key)));
        drop(slots);
        assert!(page.upgrade().is_none());
        exports.revoke("kv");
    }
}
