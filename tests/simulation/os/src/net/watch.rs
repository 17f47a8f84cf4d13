//! Which of many descriptors are ready: asked of `epoll`, which tells of these alone, however many others there are.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{PollFlags, Timespec};
use rustix::io::Errno;

use crate::schedule;

/// So many are told of at a time.
const EVENTS: usize = 256;

/// Descriptors, each with a number. Each is told of once, until it is watched again.
pub(crate) struct Watch(OwnedFd);

impl Default for Watch {
    fn default() -> Self {
        Self(epoll::create(CreateFlags::CLOEXEC).expect("a descriptor is left"))
    }
}

impl Watch {
    pub(super) fn add(&self, fd: impl AsFd, number: u64, events: PollFlags) -> rustix::io::Result<()> {
        epoll::add(&self.0, fd, EventData::new_u64(number), once(events))
    }

    pub(super) fn again(&self, fd: impl AsFd, number: u64, events: PollFlags) -> rustix::io::Result<()> {
        epoll::modify(&self.0, fd, EventData::new_u64(number), once(events))
    }

    pub(super) fn remove(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.0, fd);
    }

    /// The numbers of those that are ready, in order, so that it does not count in which the kernel knows them.
    pub(crate) fn ready(&self) -> Vec<u64> {
        let none = Event { flags: EventFlags::empty(), data: EventData::new_u64(0) };
        let mut events = [none; EVENTS];
        let mut ready = Vec::new();
        loop {
            let found = epoll::wait(&self.0, &mut events[..], Some(&Timespec::default())).unwrap_or(0);
            ready.extend(events[..found].iter().map(|event| event.data.u64()));
            if found < EVENTS {
                break;
            }
        }
        ready.sort_unstable();
        ready.dedup();
        ready
    }
}

fn once(events: PollFlags) -> EventFlags {
    EventFlags::from_bits_retain(u32::from(events.bits())) | EventFlags::ONESHOT
}

/// What the calling thread waits for, as long as it does.
pub(super) struct Watched<'a>(Vec<Fd<'a>>);

enum Fd<'a> {
    Borrowed(BorrowedFd<'a>),
    /// Another thread waits for the same descriptor.
    Own(OwnedFd),
}

impl<'a> Watched<'a> {
    pub(super) fn new(fds: impl Iterator<Item = (BorrowedFd<'a>, PollFlags)>) -> rustix::io::Result<Self> {
        let me = schedule::me().expect("a thread of the world") as u64;
        let world = schedule::world();
        let watch = |(fd, events): (BorrowedFd<'a>, PollFlags)| match world.sockets.add(fd, me, events) {
            Err(Errno::EXIST) => {
                let own = rustix::io::dup(fd)?;
                world.sockets.add(&own, me, events).map(|()| Fd::Own(own))
            }
            done => done.map(|()| Fd::Borrowed(fd)),
        };
        fds.map(watch).collect::<Result<_, _>>().map(Self)
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        let world = schedule::world();
        for fd in &self.0 {
            match fd {
                Fd::Borrowed(fd) => world.sockets.remove(fd),
                Fd::Own(fd) => world.sockets.remove(fd),
            }
        }
    }
}
