//! `libibverbs.so.1`, opened at run time.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::io;
use std::sync::Arc;

use libloading::Library;

use super::Error;
use super::sys;

/// The name that every distribution gives the library of ABI 1.
const LIBRARY: &str = "libibverbs.so.1";

macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident = $symbol:literal : fn($($arg:ty),*) $(-> $ret:ty)?;)+) => {
        /// The loaded library and the functions that we call. Each has the contract of its C namesake.
        pub(super) struct Verbs {
            $($(#[$doc])* pub(super) $field: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)+
            /// rdma-core 34 and later.
            pub(super) reg_dmabuf_mr: Option<RegDmabufMr>,
            /// Keeps the code behind the pointers mapped.
            _library: Library,
        }

        impl Verbs {
            fn from_library(library: Library) -> Result<Self, Error> {
                Ok(Self {
                    // SAFETY: the types are those of the header, checked by review and, for all structures
                    // behind the pointers, by the test in `sys`. The copied pointers live beside the library.
                    $($field: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }
                        .map_err(|source| Error::OldLibrary { name: $symbol, source })?,)+
                    // SAFETY: as above.
                    reg_dmabuf_mr: unsafe { library.get(b"ibv_reg_dmabuf_mr\0") }.ok().map(|f| *f),
                    _library: library,
                })
            }
        }
    };
}

type RegDmabufMr = unsafe extern "C" fn(*mut sys::Pd, u64, usize, u64, c_int, c_int) -> *mut sys::Mr;

functions! {
    get_device_list = "ibv_get_device_list": fn(*mut c_int) -> *mut *mut sys::Device;
    free_device_list = "ibv_free_device_list": fn(*mut *mut sys::Device);
    get_device_name = "ibv_get_device_name": fn(*mut sys::Device) -> *const c_char;
    open_device = "ibv_open_device": fn(*mut sys::Device) -> *mut sys::Context;
    close_device = "ibv_close_device": fn(*mut sys::Context) -> c_int;
    query_device = "ibv_query_device": fn(*mut sys::Context, *mut sys::DeviceAttr) -> c_int;
    /// Fills only the members that ABI 1.1 knew; the caller clears the rest.
    query_port = "ibv_query_port": fn(*mut sys::Context, u8, *mut sys::PortAttr) -> c_int;
    query_gid_table = "_ibv_query_gid_table": fn(*mut sys::Context, *mut sys::GidEntry, usize, u32, usize) -> isize;
    alloc_pd = "ibv_alloc_pd": fn(*mut sys::Context) -> *mut sys::Pd;
    dealloc_pd = "ibv_dealloc_pd": fn(*mut sys::Pd) -> c_int;
    reg_mr = "ibv_reg_mr": fn(*mut sys::Pd, *mut c_void, usize, c_int) -> *mut sys::Mr;
    dereg_mr = "ibv_dereg_mr": fn(*mut sys::Mr) -> c_int;
    create_comp_channel = "ibv_create_comp_channel": fn(*mut sys::Context) -> *mut sys::CompChannel;
    destroy_comp_channel = "ibv_destroy_comp_channel": fn(*mut sys::CompChannel) -> c_int;
    create_cq = "ibv_create_cq": fn(*mut sys::Context, c_int, *mut c_void, *mut sys::CompChannel, c_int) -> *mut sys::Cq;
    destroy_cq = "ibv_destroy_cq": fn(*mut sys::Cq) -> c_int;
    get_cq_event = "ibv_get_cq_event": fn(*mut sys::CompChannel, *mut *mut sys::Cq, *mut *mut c_void) -> c_int;
    ack_cq_events = "ibv_ack_cq_events": fn(*mut sys::Cq, c_uint);
    create_qp = "ibv_create_qp": fn(*mut sys::Pd, *mut sys::QpInitAttr) -> *mut sys::Qp;
    modify_qp = "ibv_modify_qp": fn(*mut sys::Qp, *mut sys::QpAttr, c_int) -> c_int;
    destroy_qp = "ibv_destroy_qp": fn(*mut sys::Qp) -> c_int;
}

impl Verbs {
    /// Opens the system's library.
    ///
    /// # Errors
    /// [`Error::NoLibrary`] or [`Error::OldLibrary`]: this machine has no (usable) verbs library.
    pub(super) fn load() -> Result<Arc<Self>, Error> {
        Self::load_from(LIBRARY)
    }

    fn load_from(name: &str) -> Result<Arc<Self>, Error> {
        // SAFETY: the library's initialisers set up its own tables and nothing else; it is the one the system's
        // administrator installed under the name that is reserved for it.
        let library = unsafe { Library::new(name) }
            .map_err(|source| Error::NoLibrary { library: name.into(), source })?;
        Self::from_library(library).map(Arc::new)
    }
}

/// A call's result where 0 is success: other values are an error number, or -1 with `errno` set.
pub(super) fn check(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        code if code > 0 => Err(io::Error::from_raw_os_error(code)),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::rdma::device_names;

    #[test]
    fn a_missing_or_foreign_library_means_no_devices() {
        let check = |name: &str, expected: &str| {
            let text = Verbs::load_from(name).err().unwrap().to_string();
            assert!(text.starts_with("no RDMA devices: ") && text.contains(expected), "{text}");
        };
        check("libibverbs-of-nowhere.so.1", "libibverbs-of-nowhere.so.1 could not be loaded");
        check("libc.so.6", "has no function ibv_get_device_list");
    }

    #[test]
    fn this_machine_has_devices_or_says_so() {
        match device_names() {
            Ok(names) => assert!(!names.is_empty()),
            Err(error) => assert!(error.to_string().starts_with("no RDMA devices: "), "{error}"),
        }
    }
}
