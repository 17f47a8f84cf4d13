//! How to connect, and how jobs are run.

use std::ffi::c_char;
use std::time::Duration;

use kvasir_client::data as rust;

use crate::failure::{Failure, Status, call};
use crate::raw;

/// How to connect. Begin with `kvasir_v1_options_default`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Options {
    /// The token that tells the host who this client is, over TCP; null for none.
    pub token: *const c_char,
    /// How long the host may take to answer, in milliseconds.
    pub timeout_ms: u32,
    /// The tenant on whose account blocks are stored; 0 = none in particular.
    pub tenant: u16,
    /// Ask to store and remove blocks.
    pub write: bool,
    /// Compare every block read with its checksum; one that differs is reported to the host and is a miss.
    pub verify: bool,
}

/// How jobs are run. Begin with `kvasir_v1_job_options_default`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct JobOptions {
    /// Threads for loads, each with a connection; at least 1.
    pub load_threads: u32,
    /// Threads for saves, each with a connection; at least 1.
    pub save_threads: u32,
    /// How long a load may take from when it is given, in milliseconds.
    pub load_ms: u32,
    /// How long a save may take, likewise.
    pub save_ms: u32,
    /// The most jobs that are given and not taken by `kvasir_v1_jobs_next`; further ones are refused.
    pub jobs_max: u32,
    /// Workload class of the loads, 0 = unknown.
    pub workload_class: u16,
}

fn ms(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

/// The options that are used where null is given for them.
///
/// # Safety
/// `options` is null or room for one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_v1_options_default(options: *mut Options) -> Status {
    let rust::Options { write, verify, tenant, timeout, .. } = rust::Options::default();
    let value = Options { token: std::ptr::null(), timeout_ms: ms(timeout), tenant, write, verify };
    // SAFETY: the caller's word, as above.
    call(|| unsafe { raw::set("options", options, value) })
}

/// The options of jobs that are used where null is given for them.
///
/// # Safety
/// `options` is null or room for one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_v1_job_options_default(options: *mut JobOptions) -> Status {
    let default = rust::JobOptions::default();
    let value = JobOptions {
        load_threads: default.load_threads as u32,
        save_threads: default.save_threads as u32,
        load_ms: ms(default.load_time),
        save_ms: ms(default.save_time),
        jobs_max: default.jobs_max as u32,
        workload_class: default.class,
    };
    // SAFETY: the caller's word, as above.
    call(|| unsafe { raw::set("options", options, value) })
}

/// # Safety
/// Null or options whose texts end with a zero.
pub(crate) unsafe fn options(from: *const Options) -> Result<rust::Options, Failure> {
    let mut options = rust::Options::default();
    if from.is_null() {
        return Ok(options);
    }
    // SAFETY: the caller's word, as above.
    let Options { token, timeout_ms, tenant, write, verify } = unsafe { raw::list("options", from, 1) }?[0];
    // SAFETY: the caller's word, as above.
    options.token = unsafe { raw::text("the token", token) }?.unwrap_or_default().to_owned();
    options.timeout = Duration::from_millis(timeout_ms.into());
    (options.tenant, options.write, options.verify) = (tenant, write, verify);
    Ok(options)
}

/// # Safety
/// Null or options.
pub(crate) unsafe fn job_options(from: *const JobOptions) -> Result<rust::JobOptions, Failure> {
    if from.is_null() {
        return Ok(rust::JobOptions::default());
    }
    // SAFETY: the caller's word, as above.
    let from = unsafe { raw::list("options", from, 1) }?[0];
    Ok(rust::JobOptions {
        load_threads: from.load_threads as usize,
        save_threads: from.save_threads as usize,
        load_time: Duration::from_millis(from.load_ms.into()),
        save_time: Duration::from_millis(from.save_ms.into()),
        jobs_max: from.jobs_max as usize,
        class: from.workload_class,
    })
}
