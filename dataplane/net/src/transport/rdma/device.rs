//! An open device: its port, its address on the fabric, its limits.

use std::ffi::CStr;
use std::io;
use std::mem::{size_of, zeroed};
use std::net::Ipv6Addr;
use std::ptr::NonNull;
use std::sync::Arc;

use super::Error;
use super::load::{Verbs, check};
use super::sys;

/// The most entries of a GID table that are looked at.
const GIDS_MAX: usize = 1024;

/// How a device is opened. The default suits a RoCE v2 or InfiniBand adapter with one port.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// Counted from 1.
    pub port: u8,
    /// Which entry of the port's GID table to speak as; by default the best one, see [`Device::open`].
    pub gid_index: Option<u32>,
    /// The IP header's traffic class (DSCP in its upper six bits) of everything sent. Switches choose priority queues
    /// and lossless classes by it.
    pub traffic_class: u8,
    /// InfiniBand service level, or the RoCE priority where the traffic class does not decide it.
    pub service_level: u8,
}

impl Default for DeviceOptions {
    fn default() -> Self {
        Self { port: 1, gid_index: None, traffic_class: 0, service_level: 0 }
    }
}

/// The limits of a device.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of one work request.
    pub message_bytes: u32,
    /// Local pieces of one work request.
    pub pieces: u32,
    /// Work requests outstanding on one connection.
    pub queue_depth: u32,
    /// RDMA reads outstanding from us to a peer.
    pub reads_out: u8,
    /// RDMA reads outstanding from a peer to us.
    pub reads_in: u8,
}

/// Names of the devices of this machine, as `ibv_devices` prints them.
///
/// # Errors
/// One that begins with "no RDMA devices" if there are none, for whatever reason.
pub fn device_names() -> Result<Vec<String>, Error> {
    let list = DeviceList::new(Verbs::load()?)?;
    let names: Vec<_> = list.iter().map(|(name, _)| name).collect();
    if names.is_empty() { Err(Error::NoDevices) } else { Ok(names) }
}

/// An open device with a protection domain. Memory keys of one device are unknown to another.
pub struct Device {
    pub(super) verbs: Arc<Verbs>,
    pub(super) context: NonNull<sys::Context>,
    pub(super) pd: NonNull<sys::Pd>,
    name: String,
    options: DeviceOptions,
    limits: Limits,
}

// SAFETY: verbs calls are thread-safe by their specification (`man ibv_open_device` and rdma-core's
// Documentation/libibverbs.md); the pointers are owned by this value until it is dropped.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Opens the device `name`.
    ///
    /// Unless told otherwise it speaks as the best address of its port: RoCE v2 over an IPv4 address, then
    /// over a routable IPv6 one, then over a link-local one, then RoCE v1, then InfiniBand.
    ///
    /// # Errors
    /// [`Error::PortDown`], [`Error::NoGid`], or what the system said to one of the steps.
    pub fn open(name: &str, options: DeviceOptions) -> Result<Arc<Self>, Error> {
        let verbs = Verbs::load()?;
        let context = open_context(&verbs, name)?;
        // SAFETY: `context` is open.
        let Some(pd) = NonNull::new(unsafe { (verbs.alloc_pd)(context.as_ptr()) }) else {
            let error = system("allocating a protection domain", name)(io::Error::last_os_error());
            // SAFETY: `context` is open, nothing was made from it, and it is not used again.
            unsafe { (verbs.close_device)(context.as_ptr()) };
            return Err(error);
        };
        let mut device = Self {
            verbs,
            context,
            pd,
            name: name.into(),
            options,
            limits: Limits { message_bytes: 0, pieces: 0, queue_depth: 0, reads_out: 0, reads_in: 0 },
        };
        let port = device.active_port()?;
        device.limits = device.query_limits(&port)?;
        device.gid()?;
        Ok(Arc::new(device))
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether the library can register a GPU's memory by its dma-buf. Only registering tells whether the adapter and
    /// the GPU can.
    pub(super) fn takes_dma_bufs(&self) -> bool {
        self.verbs.reg_dmabuf_mr.is_some()
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    pub fn options(&self) -> &DeviceOptions {
        &self.options
    }

    /// Whether the link is up.
    pub fn is_up(&self) -> bool {
        self.active_port().is_ok()
    }

    /// The place in the port's GID table of the address that the device speaks as; it may change when addresses do.
    ///
    /// # Errors
    /// [`Error::NoGid`] while there is none.
    pub fn gid_index(&self) -> Result<u32, Error> {
        Ok(self.gid()?.gid_index)
    }

    /// The port as it is now.
    ///
    /// # Errors
    /// [`Error::PortDown`] while its link is.
    pub(super) fn active_port(&self) -> Result<sys::PortAttr, Error> {
        // SAFETY: plain numbers, for which zero is valid.
        let mut port: sys::PortAttr = unsafe { zeroed() };
        // SAFETY: the context is open, and the structure at least as long as what is filled in.
        let code = unsafe { (self.verbs.query_port)(self.context.as_ptr(), self.options.port, &mut port) };
        check(code).map_err(self.failed("querying the port"))?;
        match port.state {
            sys::PORT_ACTIVE => Ok(port),
            state => Err(Error::PortDown { device: self.name.clone(), port: self.options.port, state }),
        }
    }

    /// For `map_err`: names the step and the device.
    pub(super) fn failed(&self, step: &'static str) -> impl FnOnce(io::Error) -> Error {
        system(step, &self.name)
    }

    fn query_limits(&self, port: &sys::PortAttr) -> Result<Limits, Error> {
        // SAFETY: plain numbers, for which zero is valid.
        let mut attr: sys::DeviceAttr = unsafe { zeroed() };
        // SAFETY: the context is open, and the structure is the header's.
        check(unsafe { (self.verbs.query_device)(self.context.as_ptr(), &mut attr) })
            .map_err(self.failed("querying the device"))?;
        let count = |n: i32| u32::try_from(n).unwrap_or(0);
        let byte = |n: i32| u8::try_from(n.max(0)).unwrap_or(u8::MAX);
        Ok(Limits {
            message_bytes: port.max_msg_sz,
            pieces: count(attr.max_sge),
            queue_depth: count(attr.max_qp_wr),
            reads_out: byte(attr.max_qp_init_rd_atom),
            reads_in: byte(attr.max_qp_rd_atom),
        })
    }

    /// The address on the fabric: for RoCE v2 an IPv6 or IPv4-mapped address.
    pub(super) fn gid(&self) -> Result<sys::GidEntry, Error> {
        let mut table = vec![sys::GidEntry::default(); GIDS_MAX];
        // SAFETY: the table has room for `GIDS_MAX` entries of the size given.
        let filled = unsafe {
            (self.verbs.query_gid_table)(
                self.context.as_ptr(),
                table.as_mut_ptr(),
                GIDS_MAX,
                0,
                size_of::<sys::GidEntry>(),
            )
        };
        let filled = usize::try_from(filled).map_err(|_| {
            self.failed("querying the GID table")(io::Error::from_raw_os_error(-(filled as i32)))
        })?;
        table.truncate(filled);
        table.retain(|entry| entry.port_num == u32::from(self.options.port));
        choose_gid(&table, self.options.gid_index).ok_or_else(|| Error::NoGid {
            device: self.name.clone(),
            port: self.options.port,
            wanted: self.options.gid_index.map_or("usable".into(), |index| format!("GID {index}")),
        })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: everything made from the domain or the context holds an `Arc` of this value, so nothing of it is
        // left.
        unsafe {
            (self.verbs.dealloc_pd)(self.pd.as_ptr());
            (self.verbs.close_device)(self.context.as_ptr());
        }
    }
}

fn system(step: &'static str, device: &str) -> impl FnOnce(io::Error) -> Error {
    let device = device.to_owned();
    move |source| Error::System { step, device, source }
}

fn open_context(verbs: &Arc<Verbs>, name: &str) -> Result<NonNull<sys::Context>, Error> {
    let list = DeviceList::new(Arc::clone(verbs))?;
    let Some((_, device)) = list.iter().find(|(found, _)| found == name) else {
        let found: Vec<_> = list.iter().map(|(name, _)| name).collect();
        return Err(match found.is_empty() {
            true => Error::NoDevices,
            false => Error::NoSuchDevice { wanted: name.into(), found: found.join(", ") },
        });
    };
    // SAFETY: the device is of a list not yet freed; an open context keeps what it needs of it.
    NonNull::new(unsafe { (verbs.open_device)(device) })
        .ok_or_else(|| system("opening the device", name)(io::Error::last_os_error()))
}

/// The best entry, or the one asked for.
fn choose_gid(table: &[sys::GidEntry], wanted: Option<u32>) -> Option<sys::GidEntry> {
    let rank = |entry: &sys::GidEntry| {
        let address = Ipv6Addr::from(entry.gid);
        match entry.gid_type {
            sys::GID_TYPE_ROCE_V2 if address.to_ipv4_mapped().is_some() => 0,
            sys::GID_TYPE_ROCE_V2 if !address.is_unicast_link_local() => 1,
            sys::GID_TYPE_ROCE_V2 => 2,
            sys::GID_TYPE_ROCE_V1 => 3,
            sys::GID_TYPE_IB => 4,
            _ => 5,
        }
    };
    let usable = table.iter().filter(|entry| entry.gid != [0; 16]);
    match wanted {
        Some(index) => usable.filter(|entry| entry.gid_index == index).min_by_key(|entry| rank(entry)),
        None => usable.min_by_key(|entry| (rank(entry), entry.gid_index)),
    }
    .copied()
}

/// The library's list of devices, freed when dropped.
struct DeviceList {
    verbs: Arc<Verbs>,
    list: NonNull<*mut sys::Device>,
    len: usize,
}

impl DeviceList {
    /// A kernel without RDMA has no list at all; that is an empty one to us.
    fn new(verbs: Arc<Verbs>) -> Result<Self, Error> {
        let mut len = 0;
        // SAFETY: `len` is written during the call only.
        let list = unsafe { (verbs.get_device_list)(&mut len) };
        let list = NonNull::new(list).ok_or(Error::NoDevices)?;
        Ok(Self { verbs, list, len: usize::try_from(len).unwrap_or(0) })
    }

    fn iter(&self) -> impl Iterator<Item = (String, *mut sys::Device)> {
        (0..self.len).map(|n| {
            // SAFETY: the list holds `len` devices, and a device's name is a C string inside it.
            unsafe {
                let device = *self.list.as_ptr().add(n);
                let name = CStr::from_ptr((self.verbs.get_device_name)(device));
                (name.to_string_lossy().into_owned(), device)
            }
        })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from `get_device_list` and is freed once.
        unsafe { (self.verbs.free_device_list)(self.list.as_ptr()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_gid_is_chosen() {
        const V1: u32 = sys::GID_TYPE_ROCE_V1;
        const V2: u32 = sys::GID_TYPE_ROCE_V2;
        const IB: u32 = sys::GID_TYPE_IB;
        let check = |rows: &[(&str, u32)], wanted, expected: Option<u32>| {
            let entry = |(index, (address, kind)): (usize, &(&str, u32))| sys::GidEntry {
                gid: address.parse::<Ipv6Addr>().unwrap().octets(),
                gid_index: index as u32,
                port_num: 1,
                gid_type: *kind,
                ndev_ifindex: 0,
            };
            let table: Vec<_> = rows.iter().enumerate().map(entry).collect();
            assert_eq!(choose_gid(&table, wanted).map(|e| e.gid_index), expected, "{rows:?} {wanted:?}");
        };
        let roce = [
            ("fe80::1", V1),
            ("fe80::1", V2),
            ("2001:db8::1", V1),
            ("2001:db8::1", V2),
            ("::ffff:192.0.2.1", V1),
            ("::ffff:192.0.2.1", V2),
        ];
        check(&roce, None, Some(5));
        check(&roce[..4], None, Some(3));
        check(&roce[..2], None, Some(1));
        check(&roce[..1], None, Some(0));
        check(&roce, Some(3), Some(3));
        check(&roce, Some(6), None);
        check(&[("fe80::2", IB)], None, Some(0));
        check(&[("::", V2)], None, None);
        check(&[], None, None);
    }
}
