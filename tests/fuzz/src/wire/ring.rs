//! A ring in memory that both ends write. While the client keeps to the rules, all bytes arrive in order; whatever it writes
//! where it should not, the host reads and writes inside the ring, or refuses to.

use crate::input::Input;
use kvasir_dataplane::memory::host::{HostPool, Mapping};
use kvasir_dataplane::stream::ring::{self, Ring, Side};
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Of one direction, as both ends of a release know it.
const CAPACITY: usize = 64 << 10;
/// Words before the bytes: of each direction written, read, and who sleeps, each on a line of its own.
const WORDS: u64 = 256;
const STEPS_MAX: usize = 64;

pub(super) fn run(steps: &[u8]) {
    let memory = ring::memory().expect("shared memory");
    let (near, far) = UnixStream::pair().expect("two sockets");
    let end = |side, socket: UnixStream| {
        socket.set_read_timeout(Some(Duration::from_millis(1))).expect("a timeout");
        Ring::new(memory.writable_fd(), side, socket).expect("a ring")
    };
    let (host, client) = (end(Side::Host, near), end(Side::Client, far));
    let mut ends = Ends { to_host: Way::default(), to_client: Way::default(), honest: true };
    let mut input = Input(steps);
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            return;
        }
        match input.byte() % 5 {
            0 => ends.to_host.write(&client, input.u16().into(), ends.honest),
            1 => ends.to_host.read(&host, input.u16().into(), ends.honest),
            2 => ends.to_client.write(&host, input.u16().into(), ends.honest),
            3 => ends.to_client.read(&client, input.u16().into(), ends.honest),
            _ => {
                ends.honest = false;
                lie(&memory, &mut input);
            }
        }
    }
}

struct Ends {
    to_host: Way,
    to_client: Way,
    /// Nobody has written into the ring past the rules.
    honest: bool,
}

/// One direction, and the bytes on their way.
#[derive(Default)]
struct Way {
    there: VecDeque<u8>,
    next: u8,
}

impl Way {
    fn write(&mut self, from: &Ring, len: usize, honest: bool) {
        // A full ring is waited for.
        let len = if honest { len.min(CAPACITY - self.there.len()) } else { len };
        let bytes: Vec<u8> = (0..len).map(|at| self.next.wrapping_add(at as u8)).collect();
        let written = from.write(&bytes);
        if !honest {
            return harmless(written, len);
        }
        assert_eq!(written.expect("there is room"), len);
        self.next = self.next.wrapping_add(len as u8);
        self.there.extend(bytes);
    }

    fn read(&mut self, at: &Ring, len: usize, honest: bool) {
        let mut bytes = vec![0; len];
        let read = at.read_now(&mut bytes);
        if !honest {
            return harmless(read, len);
        }
        let there = len.min(self.there.len());
        match read {
            Ok(count) => {
                assert_eq!(count, there);
                assert!(self.there.drain(..count).eq(bytes[..count].iter().copied()));
            }
            Err(error) => assert_eq!((error.kind(), there), (ErrorKind::WouldBlock, 0)),
        }
    }
}

fn harmless(done: io::Result<usize>, len: usize) {
    match done {
        Ok(count) => assert!(count <= len),
        Err(error) => {
            assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::InvalidData), "{error}")
        }
    }
}

/// Writes any word of the ring, near to what is there or anything at all.
fn lie(memory: &HostPool, input: &mut Input<'_>) {
    let memory: &Mapping = memory.mapping();
    let (word, value) = (u64::from(input.byte()) * 32 % WORDS, input.u32());
    let before = memory.load_word(word).expect("a word of the ring");
    let value = if input.byte().is_multiple_of(2) { value } else { before.wrapping_add(value as u16 as u32) };
    memory.store_word(word, value);
}
