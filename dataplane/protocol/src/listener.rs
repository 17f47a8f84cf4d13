//! Accepts connections on a Unix or TCP socket and gives each a thread.
//!
//! A [`Listener`] has a bounded number of places. When all are taken, a connection that has not yet said who it is makes
//! way, so that strangers who say nothing keep nobody out; if every place belongs to somebody known, the newcomer is
//! refused. Nothing that `accept` reports ends the listener, except that it was stopped. [`Listener::stop`] ends every
//! connection and returns once all their threads have let go of them.

use kvasir_os::net::{TcpListener, TcpStream};
use kvasir_os::thread::{self, JoinHandle};
use kvasir_os::time::{Duration, Instant};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use rustix::net::Shutdown;

/// How long accepting rests when descriptors or memory have run out, unless a connection ends before.
const REST: Duration = Duration::from_millis(20);
/// How long a newcomer waits for the thread of the connection that makes way.
const MAKING_WAY: Duration = Duration::from_secs(1);

/// What connections are accepted from.
pub trait Door: AsFd + Send + 'static {
    type Stream: AsFd + Send + 'static;

    /// Waits for the next connection.
    ///
    /// # Errors
    /// As `accept(2)`; `EINVAL` once the socket was shut down.
    fn next(&self) -> io::Result<Self::Stream>;
}

impl Door for TcpListener {
    type Stream = TcpStream;

    fn next(&self) -> io::Result<TcpStream> {
        self.accept().map(|(stream, _)| stream)
    }
}

impl Door for UnixListener {
    type Stream = UnixStream;

    fn next(&self) -> io::Result<UnixStream> {
        self.accept().map(|(stream, _)| stream)
    }
}

/// How many connections there may be.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most connections at once, those included that have not said who they are.
    pub connections_max: usize,
    /// A connection that has had this long and has not said who it is makes way when all places are taken.
    pub grace: Duration,
}

impl Limits {
    /// Limits with this many connections, and a grace that is ample for an honest handshake.
    pub const fn of(connections_max: usize) -> Self {
        Self { connections_max, grace: Duration::from_millis(250) }
    }
}

/// Accepts until it is stopped or dropped.
pub struct Listener {
    places: Arc<Places>,
    accepting: Mutex<Option<Accepting>>,
}

struct Accepting {
    /// A second handle on the door, to wake the thread.
    door: OwnedFd,
    thread: JoinHandle<()>,
}

struct Places {
    limits: Limits,
    state: Mutex<State>,
    /// Woken when a connection ends and when the listener stops.
    changed: Condvar,
    refused: AtomicU64,
}

#[derive(Default)]
struct State {
    stopping: bool,
    next: u64,
    /// By number, so that the first are the oldest.
    open: BTreeMap<u64, Open>,
}

struct Open {
    socket: Arc<OwnedFd>,
    standing: Standing,
}

#[derive(Clone, Copy)]
enum Standing {
    Unknown {
        since: Instant,
    },
    Known,
    /// It was ended to make way; its thread has not noticed yet.
    Ended,
}

/// The place of one connection. It is free again, and the connection over, when this is dropped.
pub struct Seat {
    places: Arc<Places>,
    id: u64,
}

/// A connection as seen from outside its thread.
#[derive(Clone)]
pub struct Handle(Arc<OwnedFd>);

impl Listener {
    /// Begins to accept. `serve` runs on a thread of its own, called `name`, for each connection; the connection is over
    /// when it returns or panics. `refuse` gets those for which there is no place; it runs on the accepting thread and must
    /// not take long.
    ///
    /// # Errors
    /// There is no descriptor or no thread left.
    pub fn start<D: Door>(
        door: D,
        name: &'static str,
        limits: Limits,
        serve: impl Fn(D::Stream, &Seat) + Send + Sync + 'static,
        refuse: impl Fn(D::Stream) + Send + 'static,
    ) -> io::Result<Self> {
        let places = Arc::new(Places {
            limits,
            state: Mutex::default(),
            changed: Condvar::new(),
            refused: AtomicU64::new(0),
        });
        let handle = door.as_fd().try_clone_to_owned()?;
        let (accepting, serve) = (Arc::clone(&places), Arc::new(serve));
        let admit = move |stream: D::Stream| {
            let Some(seat) = accepting.seat(&stream) else {
                // Who comes while it stops is sent away, but not for want of places.
                if !accepting.state.lock().stopping {
                    accepting.refused.fetch_add(1, Ordering::Relaxed);
                    refuse(stream);
                }
                return;
            };
            let serve = Arc::clone(&serve);
            let served = thread::Builder::new().name(name.into()).spawn(move || serve(stream, &seat));
            if served.is_err() {
                accepting.refused.fetch_add(1, Ordering::Relaxed);
            }
        };
        let accepting = Arc::clone(&places);
        let thread = thread::Builder::new().name("kvasir-accept".into());
        let thread = thread.spawn(move || accepting.accept_all(&door, admit))?;
        Ok(Self { places, accepting: Mutex::new(Some(Accepting { door: handle, thread })) })
    }

    /// Connections now, those included that have not said who they are.
    pub fn open(&self) -> usize {
        self.places.state.lock().open.len()
    }

    /// Connections turned away since the start because there was no place, descriptor or thread.
    pub fn refused(&self) -> u64 {
        self.places.refused.load(Ordering::Relaxed)
    }

    /// Accepts no more, ends all connections and waits until their threads are done with them. Must not be called by one of
    /// those threads. Returns whether this call is the first.
    pub fn stop(&self) -> bool {
        let first = !std::mem::replace(&mut self.places.state.lock().stopping, true);
        self.places.changed.notify_all();
        if let Some(Accepting { door, thread }) = self.accepting.lock().take() {
            // Wakes the thread, and fails what it accepts next if it is only on its way there.
            let _ = rustix::net::shutdown(&door, Shutdown::Both);
            let _ = thread.join();
        }
        let mut state = self.places.state.lock();
        state.open.values().for_each(|open| end(&open.socket));
        self.places.changed.wait_while(&mut state, |state| !state.open.is_empty());
        first
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Places {
    fn accept_all<D: Door>(&self, door: &D, admit: impl Fn(D::Stream)) {
        while !self.state.lock().stopping {
            match door.next() {
                Ok(stream) => admit(stream),
                Err(error) => match Errno::from_io_error(&error) {
                    // The socket was shut down.
                    Some(Errno::INVAL) => return,
                    // The connection failed before it was accepted; `accept(2)` says to treat these alike.
                    Some(
                        Errno::CONNABORTED
                        | Errno::INTR
                        | Errno::PROTO
                        | Errno::NETDOWN
                        | Errno::NOPROTOOPT
                        | Errno::HOSTDOWN
                        | Errno::NONET
                        | Errno::HOSTUNREACH
                        | Errno::NETUNREACH,
                    ) => {}
                    // Out of descriptors or memory.
                    _ => self.rest(),
                },
            }
        }
    }

    fn rest(&self) {
        let mut state = self.state.lock();
        if !state.stopping {
            self.changed.wait_for(&mut state, REST);
        }
    }

    /// A place for this connection, or `None` if there is none.
    fn seat(self: &Arc<Self>, stream: &impl AsFd) -> Option<Seat> {
        let socket = Arc::new(stream.as_fd().try_clone_to_owned().ok()?);
        let mut state = self.state.lock();
        while state.open.len() >= self.limits.connections_max {
            let loiters = |open: &&mut Open| matches!(open.standing, Standing::Unknown { since } if since.elapsed() >= self.limits.grace);
            let loiterer = state.open.values_mut().find(loiters)?;
            loiterer.standing = Standing::Ended;
            end(&loiterer.socket);
            if self.changed.wait_for(&mut state, MAKING_WAY).timed_out() {
                return None;
            }
        }
        if state.stopping {
            return None;
        }
        let id = state.next;
        state.next += 1;
        let standing = Standing::Unknown { since: Instant::now() };
        state.open.insert(id, Open { socket, standing });
        Some(Seat { places: Arc::clone(self), id })
    }
}

impl Seat {
    /// A number that no other connection of this listener has.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Says that the other side is known: from now on this connection makes way for nobody.
    pub fn greeted(&self) {
        if let Some(open) = self.places.state.lock().open.get_mut(&self.id)
            && matches!(open.standing, Standing::Unknown { .. })
        {
            open.standing = Standing::Known;
        }
    }

    pub fn handle(&self) -> Handle {
        Handle(Arc::clone(&self.places.state.lock().open[&self.id].socket))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        // Our descriptor is closed under the lock, so that none is left once the place is seen to be free.
        let mut state = self.places.state.lock();
        if let Some(open) = state.open.remove(&self.id) {
            end(&open.socket);
        }
        self.places.changed.notify_all();
    }
}

impl Handle {
    /// A read that waits, and those that come, find the end. What is being written goes on.
    pub fn stop_reading(&self) {
        // It may be closed already, which is just as well.
        let _ = rustix::net::shutdown(&self.0, Shutdown::Read);
    }
}

/// Ends a connection in both directions, for every handle on it.
fn end(socket: &OwnedFd) {
    // It may have ended already, which is just as well.
    let _ = rustix::net::shutdown(socket, Shutdown::Both);
}

#[cfg(test)]
mod tests;
