//! Setting up a connection over a control stream that the caller has opened and authenticated.
//!
//! Both sides send a [`Hello`], connect their queue pairs to what they got, and then send the other's key back.
//! The key is fresh for every attempt, so an answer to an earlier attempt, or a recorded one, is refused; the
//! epoch fences off a side that was declared dead and does not know it yet. Deadlines are those of the stream.

use std::io::{Read, Write};
use std::sync::Arc;

use super::Error;
use super::cq::Channel;
use super::device::Device;
use super::qp::{QueueAddress, QueueOptions, QueuePair};
use crate::transport::node::random;

const MAGIC: [u8; 4] = *b"KvRC";
const VERSION: u16 = 1;
/// Bytes of a [`Hello`] on the control stream.
pub const HELLO_BYTES: usize = 64;

/// What one side says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The membership epoch that the side lives in.
    pub epoch: u64,
    /// Random, for this attempt and this peer.
    pub key: [u8; 16],
    pub address: QueueAddress,
}

/// The epoch of this end, and the one expected of the peer.
#[derive(Clone, Copy, Debug)]
pub struct Epochs {
    pub ours: u64,
    /// The oldest epoch that a peer may speak for.
    pub fence: u64,
}

/// A connected queue pair, and what its peer said.
pub struct Connection {
    pub queue: QueuePair,
    pub peer: Hello,
}

/// Makes a queue pair and connects it to the one that the other side of `control` makes. Both sides call this.
///
/// # Errors
/// [`Error::Control`], [`Error::Handshake`], [`Error::StaleEpoch`], or whatever went wrong with the queue pair. The
/// stream is of no further use then.
pub fn connect(
    device: &Arc<Device>,
    channel: &Arc<Channel>,
    id: u64,
    options: QueueOptions,
    epochs: Epochs,
    control: &mut (impl Read + Write),
) -> Result<Connection, Error> {
    let queue = QueuePair::new(device, channel, id, options)?;
    let ours = Hello { epoch: epochs.ours, key: random(), address: queue.address()? };
    let peer = exchange(&ours, epochs.fence, control)?;
    queue.connect(&peer.address)?;
    confirm(&ours, &peer, control)?;
    Ok(Connection { queue, peer })
}

/// Sends our hello, then reads and checks the peer's.
fn exchange(ours: &Hello, fence: u64, control: &mut (impl Read + Write)) -> Result<Hello, Error> {
    let failed = |step| move |source| Error::Control { step, source };
    control.write_all(&ours.encode()).map_err(failed("sending our hello"))?;
    control.flush().map_err(failed("sending our hello"))?;
    let mut bytes = [0; HELLO_BYTES];
    control.read_exact(&mut bytes).map_err(failed("waiting for the peer's hello"))?;
    let peer = Hello::decode(&bytes)?;
    if peer.epoch < fence {
        return Err(Error::StaleEpoch { theirs: peer.epoch, fence });
    }
    Ok(peer)
}

/// After this, both sides know that both are connected, and to each other.
fn confirm(ours: &Hello, peer: &Hello, control: &mut (impl Read + Write)) -> Result<(), Error> {
    let failed = |step| move |source| Error::Control { step, source };
    control.write_all(&peer.key).map_err(failed("confirming"))?;
    control.flush().map_err(failed("confirming"))?;
    let mut key = [0; 16];
    control.read_exact(&mut key).map_err(failed("waiting for the peer to confirm"))?;
    if key != ours.key {
        return Err(Error::Handshake { problem: "it confirmed another attempt than this one".into() });
    }
    Ok(())
}

impl Hello {
    /// Little-endian; the bytes after the fields are reserved and zero.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let address = &self.address;
        let fields: [&[u8]; 10] = [
            &MAGIC,
            &VERSION.to_le_bytes(),
            &address.lid.to_le_bytes(),
            &self.epoch.to_le_bytes(),
            &self.key,
            &address.gid,
            &address.number.to_le_bytes(),
            &address.sequence.to_le_bytes(),
            &[address.mtu],
            &[address.reads_in],
        ];
        let mut bytes = [0; HELLO_BYTES];
        let mut at = 0;
        for field in fields {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        }
        bytes
    }

    /// # Errors
    /// [`Error::Handshake`]: it is no hello, of another version, or names a queue pair that cannot be.
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, Error> {
        let refused = |problem: String| Err(Error::Handshake { problem });
        let mut rest = &bytes[..];
        if take::<4>(&mut rest) != MAGIC {
            return refused("it is not an RDMA hello".into());
        }
        let version = u16::from_le_bytes(take(&mut rest));
        if version != VERSION {
            return refused(format!("version {version}, but only {VERSION} is spoken here"));
        }
        let lid = u16::from_le_bytes(take(&mut rest));
        let epoch = u64::from_le_bytes(take(&mut rest));
        let (key, gid) = (take(&mut rest), take(&mut rest));
        let number = u32::from_le_bytes(take(&mut rest));
        let sequence = u32::from_le_bytes(take(&mut rest));
        let [mtu, reads_in] = take(&mut rest);
        if number >> 24 != 0 || sequence >> 24 != 0 || !(1..=5).contains(&mtu) {
            return refused(format!("queue pair {number:#x}, sequence {sequence:#x}, MTU code {mtu}"));
        }
        Ok(Self { epoch, key, address: QueueAddress { number, sequence, gid, lid, mtu, reads_in } })
    }
}

/// The next bytes, or zeros beyond the end, which no caller reaches.
fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let Some((head, tail)) = rest.split_first_chunk() else { return [0; N] };
    *rest = tail;
    *head
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::net::UnixStream;

    fn hello(epoch: u64) -> Hello {
        let address =
            QueueAddress { number: 17, sequence: 0xab_cdef, gid: [9; 16], lid: 3, mtu: 5, reads_in: 16 };
        Hello { epoch, key: random(), address }
    }

    /// What each side concludes about the other.
    fn meet(a: Hello, b: Hello, fence: u64) -> (Result<Hello, Error>, Result<Hello, Error>) {
        let (mut left, mut right) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let other = scope.spawn(move || exchange(&b, fence, &mut right));
            (exchange(&a, fence, &mut left), other.join().unwrap())
        })
    }

    #[test]
    fn both_sides_learn_the_other() {
        let (a, b) = (hello(4), hello(5));
        let (from_b, from_a) = meet(a, b, 4);
        assert_eq!((from_b.unwrap(), from_a.unwrap()), (b, a));
    }

    #[test]
    fn the_layout_is_fixed() {
        let hello = Hello { key: [8; 16], ..hello(0x0506) };
        let fields: [&[u8]; 8] = [
            b"KvRC\x01\0\x03\0",
            b"\x06\x05\0\0\0\0\0\0",
            &[8; 16],
            &[9; 16],
            b"\x11\0\0\0",
            b"\xef\xcd\xab\0",
            b"\x05\x10",
            &[0; 6],
        ];
        assert_eq!(hello.encode().as_slice(), fields.concat());
    }

    #[test]
    fn an_old_epoch_is_fenced() {
        let (from_b, from_a) = meet(hello(7), hello(6), 7);
        assert!(matches!(from_b, Err(Error::StaleEpoch { theirs: 6, fence: 7 })));
        assert!(from_a.is_ok());
    }

    #[test]
    fn a_key_of_another_attempt_is_refused() {
        let (a, b) = (hello(1), hello(1));
        let (mut left, mut right) = UnixStream::pair().unwrap();
        right.write_all(&b.key).unwrap();
        let error = confirm(&a, &b, &mut left).unwrap_err();
        assert!(error.to_string().contains("another attempt"), "{error}");
        right.write_all(&a.key).unwrap();
        confirm(&a, &b, &mut left).unwrap();
    }

    #[test]
    fn a_peer_that_hangs_up_is_an_error() {
        let (mut left, right) = UnixStream::pair().unwrap();
        drop(right);
        assert!(matches!(exchange(&hello(1), 0, &mut left), Err(Error::Control { .. })));
    }

    proptest! {
        #[test]
        fn hellos_survive_the_wire(epoch: u64, key: [u8; 16], gid: [u8; 16], lid: u16, reads_in: u8,
                                   number in 0u32..1 << 24, sequence in 0u32..1 << 24, mtu in 1u8..=5) {
            let address = QueueAddress { number, sequence, gid, lid, mtu, reads_in };
            let hello = Hello { epoch, key, address };
            prop_assert_eq!(Hello::decode(&hello.encode()).unwrap(), hello);
        }

        #[test]
        fn any_bytes_are_decoded_or_refused(mut bytes in any::<[u8; 32]>(), head: bool, tail: [u8; 32]) {
            if head {
                bytes[..6].copy_from_slice(&hello(0).encode()[..6]);
            }
            let mut frame = [0; HELLO_BYTES];
            frame[..32].copy_from_slice(&bytes);
            frame[32..].copy_from_slice(&tail);
            if let Ok(hello) = Hello::decode(&frame) {
                prop_assert!(hello.address.number < 1 << 24 && (1..=5).contains(&hello.address.mtu));
            }
        }
    }
}
