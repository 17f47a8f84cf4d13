//! How a pool's pages lie: their size, their NUMA node, and whether they may be swapped out.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt;
use std::fs;
use std::io;

use rustix::mm::{Advice, MlockFlags};
use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};

use super::extents::PAGE;
use super::host::PoolError;

pub const HUGE_PAGE: u64 = 2 << 20;

/// Whether to ask for pages of 2 MiB, which spare the processor most of its address translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HugePages {
    /// Reserved pages if enough are free and the pool is a multiple of their size; else transparent ones if the kernel
    /// makes them ([`are_transparent`]); else ordinary pages.
    #[default]
    Auto,
    Off,
    /// Reserved pages, or no pool.
    Require,
}

/// What is asked of a pool's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Placing {
    pub huge_pages: HugePages,
    /// Take memory of this NUMA node only.
    pub numa_node: Option<u32>,
    /// Never swap it out. Touches every page at start.
    pub lock: bool,
    /// Touch every page at start.
    pub prefault: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    Ordinary,
    /// Asked for; the kernel gives them if it finds them.
    Transparent,
    Reserved,
}

/// What was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    pub pages: Pages,
    pub numa_node: Option<u32>,
    pub locked: bool,
}

impl fmt::Display for Placed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.pages {
            Pages::Ordinary => "4 KiB pages",
            Pages::Transparent => "2 MiB pages where the kernel finds them",
            Pages::Reserved => "2 MiB pages",
        })?;
        if let Some(node) = self.numa_node {
            write!(f, ", of NUMA node {node}")?;
        }
        f.write_str(if self.locked { ", locked" } else { "" })
    }
}

/// The pages for a pool of `bytes` on this machine.
pub(super) fn choose_pages(wanted: HugePages, bytes: u64) -> Result<Pages, PoolError> {
    let read = |name: &str| fs::read_to_string(format!("/sys/kernel/mm/{name}")).unwrap_or_default();
    let count =
        |name: &str| read(&format!("hugepages/hugepages-2048kB/{name}")).trim().parse().unwrap_or(0u64);
    let free = count("free_hugepages").saturating_sub(count("resv_hugepages"));
    pages_for(wanted, bytes, free, are_transparent())
}

/// Whether the kernel makes huge pages of shared memory: by itself, when advised, or when told to range by range, which `never` does not
/// forbid.
pub fn are_transparent() -> bool {
    let shared = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    match shared.split(['[', ']']).nth(1) {
        Some("never") => knows_collapse(),
        Some("deny") | None => false,
        Some(_) => true,
    }
}

/// Whether this is Linux 6.1 or newer, as far as that matters here.
fn knows_collapse() -> bool {
    // SAFETY: the range is empty; the kernel only checks whether it knows the advice (madvise(2)).
    unsafe { libc::madvise(std::ptr::null_mut(), 0, libc::MADV_COLLAPSE) == 0 }
}

fn pages_for(wanted: HugePages, bytes: u64, free: u64, transparent: bool) -> Result<Pages, PoolError> {
    let needed = bytes.div_ceil(HUGE_PAGE);
    match wanted {
        HugePages::Off => Ok(Pages::Ordinary),
        HugePages::Require if free < needed => Err(PoolError::HugePages { needed, free }),
        HugePages::Require => Ok(Pages::Reserved),
        // A pool of another size would not be the one that was asked for.
        HugePages::Auto if free >= needed && bytes.is_multiple_of(HUGE_PAGE) => Ok(Pages::Reserved),
        HugePages::Auto if transparent => Ok(Pages::Transparent),
        HugePages::Auto => Ok(Pages::Ordinary),
    }
}

/// A range of whole pages, in a mapping of this process that outlives it.
pub(super) struct Range {
    pub(super) base: *mut c_void,
    pub(super) len: usize,
}

impl Range {
    /// Asks the kernel for transparent huge pages. It may refuse; the pool still works.
    pub(super) fn advise_huge(&self) -> bool {
        // SAFETY: the range is exactly one live mapping of this process; the advice changes no contents.
        unsafe { rustix::mm::madvise(self.base, self.len, Advice::LinuxHugepage) }.is_ok()
    }

    /// Binds the memory, which is shared, to a NUMA node: pages come from there, whichever thread touches them first.
    pub(super) fn bind(&self, node: u32) -> Result<(), PoolError> {
        let there = fs::read_to_string("/sys/devices/system/node/online").unwrap_or_default();
        let there = there.trim();
        if !in_list(there, node) {
            return Err(PoolError::NumaNode { node, there: there.to_owned() });
        }
        let mut nodes = vec![0u64; node as usize / 64 + 1];
        nodes[node as usize / 64] |= 1 << (node % 64);
        // SAFETY: the range is exactly one live mapping; `nodes` outlives the call and holds the bits announced (the
        // kernel reads one less than `maxnode`). Binding changes no contents. There is no safe wrapper for it.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base,
                self.len,
                libc::MPOL_BIND,
                nodes.as_ptr(),
                nodes.len() * 64 + 1,
                0,
            )
        };
        match result {
            0 => Ok(()),
            _ => Err(PoolError::Bind { node, source: io::Error::last_os_error() }),
        }
    }

    /// Keeps the pages that there are and those to come from being swapped out.
    pub(super) fn lock(&self) -> Result<(), PoolError> {
        // SAFETY: the range is exactly one live mapping of this process; locking changes no contents.
        let locked = unsafe { rustix::mm::mlock_with(self.base, self.len, MlockFlags::ONFAULT) };
        locked.map_err(|errno| PoolError::Lock {
            bytes: self.len as u64,
            limit: getrlimit(Resource::Memlock)
                .current
                .map_or("unlimited".to_owned(), |limit| format!("{limit} B")),
            source: errno.into(),
        })
    }

    /// Has the kernel give it pages.
    pub(super) fn populate(&self) -> io::Result<()> {
        // SAFETY: the range lies in a live mapping of this process; populating changes no contents.
        Ok(unsafe { rustix::mm::madvise(self.base, self.len, Advice::LinuxPopulateWrite) }?)
    }

    /// Has the kernel give it huge pages, as far as it finds any; `base` is the start of one. What is there already is copied.
    pub(super) fn populate_huge(&self) -> io::Result<()> {
        // Of a range in which there is nothing the kernel makes no huge page.
        for at in (0..self.len).step_by(HUGE_PAGE as usize) {
            Self { base: self.base.wrapping_byte_add(at), len: PAGE as usize }.populate()?;
        }
        // SAFETY: the range lies in a live mapping of this process; no contents change. There is no safe wrapper for it.
        match unsafe { libc::madvise(self.base, self.len, libc::MADV_COLLAPSE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Whether `node` is in a list as the kernel writes it, such as `0-1,3`.
fn in_list(list: &str, node: u32) -> bool {
    list.split(',').any(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        matches!((first.parse(), last.parse()), (Ok(first), Ok(last)) if (first..=last).contains(&node))
    })
}

#[cfg(test)]
mod tests {
    use super::super::host::HostPool;
    use super::*;

    #[test]
    fn pages_are_chosen_by_what_the_machine_has() {
        let check = |wanted, free, transparent, expected: &str| {
            let pages = pages_for(wanted, 6 << 20, free, transparent);
            let text = pages.map_or_else(|error| error.to_string(), |pages| format!("{pages:?}"));
            assert!(text.contains(expected), "{text}");
        };
        check(HugePages::Off, 100, true, "Ordinary");
        check(HugePages::Auto, 3, false, "Reserved");
        check(HugePages::Auto, 2, true, "Transparent");
        check(HugePages::Auto, 2, false, "Ordinary");
        check(HugePages::Require, 3, false, "Reserved");
        assert_eq!(pages_for(HugePages::Auto, 4096, 3, false).unwrap(), Pages::Ordinary);
        check(HugePages::Require, 2, true, "needs 3 huge pages of 2 MiB and the machine has 2 free");
    }

    #[test]
    fn lists_of_the_kernel_are_read() {
        for (list, node, expected) in [
            ("0", 0, true),
            ("0", 1, false),
            ("0-1,3", 1, true),
            ("0-1,3", 2, false),
            ("0-1,3", 3, true),
            ("", 0, false),
        ] {
            assert_eq!(in_list(list, node), expected, "{list} {node}");
        }
    }

    fn open(placing: Placing) -> Result<HostPool, PoolError> {
        HostPool::open(4 << 20, &placing)
    }

    #[test]
    fn a_node_that_does_not_exist_is_named() {
        let error = open(Placing { numa_node: Some(4095), ..Placing::default() }).err().unwrap();
        assert!(error.to_string().contains("NUMA node 4095 does not exist"), "{error}");
    }

    /// Also on a kernel without NUMA, where binding fails instead of pretending.
    #[test]
    fn a_bound_pool_holds_bytes() {
        match open(Placing { numa_node: Some(0), prefault: true, ..Placing::default() }) {
            Ok(pool) => {
                assert_eq!(pool.placed().numa_node, Some(0));
                assert!(pool.mapping().write(123, b"bytes"));
                assert_eq!(pool.mapping().bytes(123, 5).unwrap(), &b"bytes"[..]);
            }
            Err(PoolError::NumaNode { there, .. }) => assert_eq!(there, ""),
            Err(error) => assert!(matches!(error, PoolError::Bind { .. }), "{error}"),
        }
    }

    /// Whether the limit allows it depends on the machine; what the pool reports must hold in either case.
    #[test]
    fn a_locked_pool_is_locked_or_says_what_to_do() {
        match open(Placing { lock: true, ..Placing::default() }) {
            Ok(pool) => {
                let status = fs::read_to_string("/proc/self/status").unwrap();
                let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
                let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().unwrap();
                assert!(pool.placed().locked && kib >= 4096, "{kib} KiB are locked");
            }
            Err(error) => {
                let text = error.to_string();
                assert!(
                    text.contains("4194304 B cannot be locked") && text.contains("the limit is"),
                    "{text}"
                );
            }
        }
    }

    #[test]
    #[ignore = "needs 2 free huge pages: sysctl vm.nr_hugepages=2"]
    fn a_pool_of_huge_pages_is_shared_like_any_other() {
        use std::os::fd::AsFd;
        let placing = Placing { huge_pages: HugePages::Require, prefault: true, ..Placing::default() };
        let pool = HostPool::open((2 << 20) + 1, &placing).unwrap();
        assert_eq!((pool.bytes(), pool.placed().pages), (4 << 20, Pages::Reserved));
        assert!(pool.mapping().write(3 << 20, b"bytes"));
        let fd = pool.readonly_fd().unwrap();
        let reader = super::super::host::Mapping::new(fd.as_fd(), pool.bytes(), false).unwrap();
        assert_eq!(reader.bytes(3 << 20, 5).unwrap(), &b"bytes"[..]);
        let more = HostPool::open(4 << 20, &placing).err().unwrap();
        assert!(more.to_string().contains("the machine has 0 free"), "{more}");
        let auto = HostPool::open(4 << 20, &Placing::default()).unwrap();
        assert_ne!(auto.placed().pages, Pages::Reserved);
    }
}
