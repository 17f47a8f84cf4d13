//! How memory of a GPU is given to a peer: as a descriptor whose few bytes say where the memory is.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, LazyLock};

use rustix::fs::MemfdFlags;

use crate::memory::Device;
use crate::memory::ipc::{self, MEMORY_HANDLE_LEN, MemoryHandle};
use kvasir_memory::region::{Region, WeakRegion};
use kvasir_net::transport::node::random_u64;

const MAGIC: [u8; 4] = *b"KVCU";
const VERSION: u8 = 1;
/// Magic, version, process, region, whether there is a handle, and the handle.
const LEN: usize = 4 + 1 + 8 + 8 + 1 + MEMORY_HANDLE_LEN;

/// A random number that no other process has, and no earlier run had.
static PROCESS: LazyLock<u64> = LazyLock::new(random_u64);
/// Regions that were given away. The driver does not open a handle in the process that made it, so within one process
/// the region is found here.
static GIVEN: LazyLock<Mutex<HashMap<u64, WeakRegion>>> = LazyLock::new(Mutex::default);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    process: u64,
    region: u64,
    /// `None` if the memory can be reached in its own process only.
    handle: Option<MemoryHandle>,
}

impl Ticket {
    pub(super) fn of(region: &Region) -> Self {
        let mut given = GIVEN.lock();
        given.retain(|_, region| region.upgrade().is_some());
        given.insert(region.id(), region.downgrade());
        Self { process: *PROCESS, region: region.id(), handle: region.handle() }
    }

    /// Writes it into a descriptor that can travel.
    pub(super) fn send(&self) -> io::Result<OwnedFd> {
        let file = File::from(rustix::fs::memfd_create("kvasir-cuda", MemfdFlags::CLOEXEC)?);
        file.write_all_at(&self.encode(), 0)?;
        Ok(file.into())
    }

    pub(super) fn receive(fd: OwnedFd) -> io::Result<Self> {
        let mut bytes = [0; LEN];
        File::from(fd).read_exact_at(&mut bytes, 0)?;
        Self::decode(&bytes).ok_or_else(|| invalid("a descriptor that came for memory of a GPU is none"))
    }

    /// Opens the memory that it names, all `len` bytes of it.
    pub(super) fn open(&self, device: &Arc<Device>, len: u64) -> io::Result<Region> {
        if self.process == *PROCESS {
            return self.find().filter(|region| region.len() == len).ok_or_else(gone);
        }
        let handle = self.handle.ok_or_else(|| invalid("the peer's GPU memory cannot leave its process"))?;
        ipc::open(&handle, device, len).map_err(io::Error::other)
    }

    /// A region of this process.
    fn find(&self) -> Option<Region> {
        GIVEN.lock().get(&self.region)?.upgrade()
    }

    fn encode(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        bytes[5..13].copy_from_slice(&self.process.to_le_bytes());
        bytes[13..21].copy_from_slice(&self.region.to_le_bytes());
        if let Some(handle) = self.handle {
            bytes[21] = 1;
            bytes[22..].copy_from_slice(&handle.encode());
        }
        bytes
    }

    fn decode(bytes: &[u8; LEN]) -> Option<Self> {
        let rest = bytes.strip_prefix(&MAGIC)?.strip_prefix(&[VERSION])?;
        let (process, rest) = rest.split_first_chunk()?;
        let (region, rest) = rest.split_first_chunk()?;
        let (has_handle, handle) = rest.split_first()?;
        let handle = match has_handle {
            0 => None,
            1 => Some(MemoryHandle::decode(handle.try_into().ok()?)),
            _ => return None,
        };
        Some(Self { process: u64::from_le_bytes(*process), region: u64::from_le_bytes(*region), handle })
    }
}

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn gone() -> io::Error {
    invalid("the GPU memory that was given is gone")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use kvasir_memory::buffer::Buffer;

    #[test]
    fn tickets_travel_as_descriptors() {
        let handle = Some(MemoryHandle::decode(&std::array::from_fn(|i| i as u8)));
        for ticket in
            [Ticket { process: 1, region: 2, handle }, Ticket { process: 3, region: 4, handle: None }]
        {
            assert_eq!(Ticket::receive(ticket.send().unwrap()).unwrap(), ticket);
        }
    }

    #[test]
    fn a_region_of_this_process_is_found_while_it_lives() {
        let region = Region::of_buffer(Buffer::zeroed(100));
        let ticket = Ticket::receive(Ticket::of(&region).send().unwrap()).unwrap();
        assert_eq!(ticket.find().map(|found| found.id()), Some(region.id()));
        drop(region);
        assert!(ticket.find().is_none());
    }

    #[test]
    fn other_descriptors_are_refused() {
        let short = File::from(rustix::fs::memfd_create("short", MemfdFlags::CLOEXEC).unwrap());
        short.write_all_at(b"KVCU\x01", 0).unwrap();
        assert!(Ticket::receive(short.into()).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_ticket_or_none(mut bytes in prop::collection::vec(any::<u8>(), LEN), ours: bool) {
            if ours {
                bytes[..5].copy_from_slice(b"KVCU\x01");
            }
            let bytes: [u8; LEN] = bytes.try_into().unwrap();
            if let Some(ticket) = Ticket::decode(&bytes) {
                prop_assert!(ours && bytes[21] <= 1);
                prop_assert_eq!(ticket.encode()[..22].to_vec(), bytes[..22].to_vec());
            }
        }
    }
}
