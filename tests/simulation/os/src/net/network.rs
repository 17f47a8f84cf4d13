//! The network: connections, what is on its way on them, and what goes wrong.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::PollFlags;

use super::{TcpStream, Watch};
use crate::random::Rng;
use crate::schedule::{self, On};
use crate::world::name;

const MICROSECOND: u64 = 1000;
const MILLISECOND: u64 = 1_000_000;
/// The most that is taken from a socket at a time: what a packet of the model is.
const READ: usize = 64 << 10;
/// One that is cut short has so many bytes at most.
const PIECE_MAX: u64 = 8 << 10;
/// What may be on its way in one direction; more waits in the sender's socket.
const IN_FLIGHT_MAX: usize = 256 << 10;
/// How long until a full socket is tried again: first, and at most, as each time in vain doubles it.
const AGAIN: (u64, u64) = (MILLISECOND, 32 * MILLISECOND);
/// How long a packet that was lost takes to be sent again.
const LOST: u64 = 200 * MILLISECOND;

/// Machines are told apart by the last two parts of their address: 10.0.0.n is host n.
fn host_of(address: SocketAddr) -> usize {
    match address.ip() {
        std::net::IpAddr::V4(ip) => u16::from_be_bytes([ip.octets()[2], ip.octets()[3]]).into(),
        std::net::IpAddr::V6(_) => usize::MAX,
    }
}

#[derive(Default)]
pub(crate) struct Network {
    doors: BTreeMap<SocketAddr, Door>,
    connections: BTreeMap<u64, Connection>,
    cuts: BTreeSet<(usize, usize)>,
    /// The senders' sockets, by the number of the way.
    written: Watch,
    /// When the first packet of a way arrives, and the way.
    arrivals: BTreeSet<(u64, u64)>,
    /// Where what is read from a socket goes first.
    buffer: Vec<u8>,
    next: u64,
    next_port: u16,
}

struct Door {
    outside: UnixStream,
    waiting: VecDeque<(UnixStream, SocketAddr)>,
}

struct Connection {
    /// From the host that connected, and back.
    ways: [Way; 2],
}

/// One direction.
struct Way {
    from: usize,
    to: usize,
    /// The network's end of the sender's socket.
    source: Arc<UnixStream>,
    /// That of the receiver's.
    sink: Arc<UnixStream>,
    packets: VecDeque<Packet>,
    bytes: usize,
    /// When the receiver's socket is full: how long until it is tried again.
    again: u64,
    /// Nothing more will be sent.
    ended: bool,
    /// The end has arrived.
    over: bool,
    /// The network is told when the sender writes.
    watched: bool,
    /// When its first packet arrives, as it is noted in [`Network::arrivals`].
    due: Option<u64>,
}

struct Packet {
    at: u64,
    /// Empty: the end.
    bytes: Vec<u8>,
}

impl Way {
    fn has_room(&self) -> bool {
        !self.ended && self.bytes < IN_FLIGHT_MAX
    }

    /// Takes what the sender has written.
    fn collect(&mut self, cut: bool, read: &mut [u8], rng: &mut Rng) {
        while self.has_room() {
            // Most of what is written at once travels together.
            let most = if rng.below(8) == 0 { 1 + rng.below(PIECE_MAX) as usize } else { READ };
            let bytes = match (&*self.source).read(&mut read[..most]) {
                Ok(count) => read[..count].to_vec(),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => Vec::new(),
            };
            self.ended = bytes.is_empty();
            let at = if cut { u64::MAX } else { schedule::now() + delay(rng) };
            // In order.
            let at = self.packets.back().map_or(at, |last| at.max(last.at));
            self.bytes += bytes.len();
            let is_all = bytes.len() < most;
            self.packets.push_back(Packet { at, bytes });
            if is_all {
                return;
            }
        }
    }

    /// Hands over what has arrived. Returns false if the receiver takes nothing any more.
    fn deliver(&mut self, now: u64) -> bool {
        while let Some(packet) = self.packets.front_mut().filter(|packet| packet.at <= now) {
            if packet.bytes.is_empty() {
                let _ = self.sink.shutdown(Shutdown::Write);
                self.over = true;
                self.packets.clear();
                return true;
            }
            match (&*self.sink).write(&packet.bytes) {
                Ok(count) => {
                    self.again = AGAIN.0;
                    self.bytes -= count;
                    packet.bytes.drain(..count);
                    if packet.bytes.is_empty() {
                        self.packets.pop_front();
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    packet.at = now + self.again;
                    self.again = AGAIN.1.min(self.again * 2);
                    return true;
                }
                Err(_) => return false,
            }
        }
        true
    }
}

/// Mostly what a switch takes, sometimes a queue, seldom a loss.
fn delay(rng: &mut Rng) -> u64 {
    match rng.below(1000) {
        0..5 => LOST + rng.below(LOST),
        5..50 => MILLISECOND + rng.below(20 * MILLISECOND),
        _ => 20 * MICROSECOND + rng.below(200 * MICROSECOND),
    }
}

impl Network {
    /// Takes what hosts have written since.
    pub(crate) fn collect(&mut self, rng: &mut Rng) {
        self.buffer.resize(READ, 0);
        for number in self.written.ready() {
            let Some(way) = way(&mut self.connections, number) else { continue };
            way.watched = false;
            way.collect(self.cuts.contains(&(way.from, way.to)), &mut self.buffer, rng);
            self.note(number);
        }
    }

    /// When something arrives next.
    pub(crate) fn next(&self) -> Option<u64> {
        self.arrivals.first().map(|(at, _)| *at)
    }

    pub(crate) fn deliver(&mut self, now: u64) {
        let due = self.arrivals.range(..=(now, u64::MAX)).map(|(_, way)| way / 2);
        for number in due.collect::<BTreeSet<u64>>() {
            let Some(connection) = self.connections.get_mut(&number) else { continue };
            if !connection.ways.iter_mut().all(|way| way.deliver(now)) {
                connection.hang_up();
                self.forget(number);
            } else if connection.ways.iter().all(|way| way.over) {
                self.forget(number);
            } else {
                (number * 2..number * 2 + 2).for_each(|way| self.note(way));
            }
        }
    }

    /// A way has changed: notes when its first packet arrives, and has the network told of what is written, if there is room.
    fn note(&mut self, number: u64) {
        let Some(way) = way(&mut self.connections, number) else { return };
        let due = way.packets.front().map(|packet| packet.at).filter(|at| *at < u64::MAX);
        if let Some(before) = std::mem::replace(&mut way.due, due) {
            self.arrivals.remove(&(before, number));
        }
        self.arrivals.extend(due.map(|at| (at, number)));
        if way.has_room() && !way.watched {
            way.watched = self.written.again(&way.source, number, PollFlags::IN).is_ok();
        }
    }

    fn note_all(&mut self) {
        let all: Vec<u64> = self.connections.keys().flat_map(|number| [number * 2, number * 2 + 1]).collect();
        all.into_iter().for_each(|way| self.note(way));
    }

    fn forget(&mut self, number: u64) -> Option<Connection> {
        let connection = self.connections.remove(&number)?;
        for (way, number) in connection.ways.iter().zip(number * 2..) {
            if let Some(due) = way.due {
                self.arrivals.remove(&(due, number));
            }
        }
        Some(connection)
    }

    pub(crate) fn cut(&mut self, from: usize, to: usize) {
        self.cuts.insert((from, to));
        for way in self.connections.values_mut().flat_map(|connection| &mut connection.ways) {
            if (way.from, way.to) == (from, to) {
                way.packets.iter_mut().for_each(|packet| packet.at = u64::MAX);
            }
        }
        self.note_all();
    }

    /// What was held up is sent again.
    pub(crate) fn mend(&mut self, rng: &mut Rng) {
        self.cuts.clear();
        let again = schedule::now() + rng.below(LOST);
        for way in self.connections.values_mut().flat_map(|connection| &mut connection.ways) {
            let held = way.packets.iter_mut().filter(|packet| packet.at == u64::MAX);
            held.for_each(|packet| packet.at = again);
        }
        self.note_all();
    }

    /// Breaks a connection; which one.
    pub(crate) fn reset_one(&mut self, rng: &mut Rng) -> Option<String> {
        let all: Vec<u64> = self.connections.keys().copied().collect();
        let which = *all.get(rng.below(all.len().max(1) as u64) as usize)?;
        let connection = self.forget(which)?;
        connection.hang_up();
        let Way { from, to, .. } = connection.ways[0];
        Some(format!("{which} of {} to {}", name(from), name(to)))
    }

    /// A process has ended: the kernel closes its sockets. What it sent last may arrive or not.
    pub(crate) fn lose(&mut self, host: usize, rng: &mut Rng) {
        self.doors.retain(|address, _| host_of(*address) != host);
        for way in self.connections.values_mut().flat_map(|connection| &mut connection.ways) {
            if way.from == host && !way.over {
                let last = way.packets.back().map_or(0, |last| last.at);
                if rng.below(2) == 0 {
                    way.packets.truncate(rng.below(way.packets.len() as u64 + 1) as usize);
                    way.bytes = way.packets.iter().map(|packet| packet.bytes.len()).sum();
                }
                let at = last.max(schedule::now() + delay(rng));
                way.packets.push_back(Packet { at, bytes: Vec::new() });
                way.ended = true;
            } else if way.to == host {
                way.packets.clear();
                (way.ended, way.over) = (true, true);
            }
        }
        let all: Vec<u64> = self.connections.keys().copied().collect();
        for number in all {
            if self.connections[&number].ways.iter().all(|way| way.over) {
                self.forget(number);
            }
        }
        self.note_all();
    }

    pub(crate) fn close(&mut self, address: SocketAddr) {
        self.doors.remove(&address);
    }

    pub(crate) fn accepted(&mut self, address: SocketAddr) -> Option<(UnixStream, SocketAddr)> {
        self.doors.get_mut(&address)?.waiting.pop_front()
    }

    fn port(&mut self) -> u16 {
        self.next_port = self.next_port.wrapping_add(1).max(1);
        20_000 + self.next_port % 40_000
    }

    fn join(&mut self, from: SocketAddr, to: SocketAddr) -> io::Result<UnixStream> {
        let (ours, near) = UnixStream::pair()?;
        let (theirs, far) = UnixStream::pair()?;
        near.set_nonblocking(true)?;
        far.set_nonblocking(true)?;
        let door = self.doors.get_mut(&to).ok_or(ErrorKind::ConnectionRefused)?;
        if door.waiting.len() >= BACKLOG {
            // One that stands still for minutes: to write to its door would wait for it outside of the world.
            return Err(ErrorKind::ConnectionRefused.into());
        }
        door.outside.write_all(&[1]).map_err(|_| ErrorKind::ConnectionRefused)?;
        door.waiting.push_back((theirs, from));
        let (a, b) = (host_of(from), host_of(to));
        let way = |from, to, source, sink| Way {
            from,
            to,
            source,
            sink,
            packets: VecDeque::new(),
            bytes: 0,
            again: AGAIN.0,
            ended: false,
            over: false,
            watched: true,
            due: None,
        };
        let (near, far) = (Arc::new(near), Arc::new(far));
        let there = way(a, b, Arc::clone(&near), Arc::clone(&far));
        let back = way(b, a, far, near);
        self.written.add(&there.source, self.next * 2, PollFlags::IN)?;
        self.written.add(&back.source, self.next * 2 + 1, PollFlags::IN)?;
        self.connections.insert(self.next, Connection { ways: [there, back] });
        self.next += 1;
        Ok(ours)
    }
}

/// Connections that wait to be accepted, at most.
const BACKLOG: usize = 128;

/// The ways of connection `n` are numbers `2 * n` and the next.
fn way(connections: &mut BTreeMap<u64, Connection>, number: u64) -> Option<&mut Way> {
    Some(&mut connections.get_mut(&(number / 2))?.ways[(number % 2) as usize])
}

impl Connection {
    fn hang_up(&self) {
        for way in &self.ways {
            let _ = way.source.shutdown(Shutdown::Both);
        }
    }
}

/// Opens a port. `outside`: the network's end of the door.
pub(super) fn listen(mut address: SocketAddr, outside: UnixStream) -> io::Result<SocketAddr> {
    let mut world = schedule::world();
    if address.port() == 0 {
        address.set_port(world.net.port());
    }
    if world.net.doors.contains_key(&address) {
        return Err(ErrorKind::AddrInUse.into());
    }
    world.net.doors.insert(address, Door { outside, waiting: VecDeque::new() });
    Ok(address)
}

pub(super) fn connect(to: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    let until = schedule::now().saturating_add(timeout.as_nanos() as u64);
    let me = schedule::me().expect("a thread of the world");
    let (host, trip) = {
        let mut world = schedule::world();
        let trip = delay(&mut world.rng) + delay(&mut world.rng);
        (world.tasks[me].host.unwrap_or(usize::MAX), trip)
    };
    schedule::wait(On::Time, Some((schedule::now() + trip).min(until)));
    loop {
        let mut world = schedule::world();
        let (there, back) = ((host, host_of(to)), (host_of(to), host));
        if !world.net.cuts.contains(&there) && !world.net.cuts.contains(&back) {
            let [high, low] = (host as u16).to_be_bytes();
            let from = SocketAddr::from(([10, 0, high, low], world.net.port()));
            let joined = world.net.join(from, to);
            world.note(&format!(
                "connects to {to}: {}",
                joined.as_ref().map_or_else(ToString::to_string, |_| "done".into())
            ));
            return joined.map(|socket| TcpStream::new(socket, from, to));
        }
        drop(world);
        if schedule::now() >= until {
            return Err(ErrorKind::TimedOut.into());
        }
        schedule::wait(On::Time, Some((schedule::now() + LOST).min(until)));
    }
}
