//! The resources that a process holds.

use std::fs;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    /// Resident memory in KiB.
    resident_kib: u64,
    descriptors: usize,
    threads: usize,
}

impl Usage {
    /// Of this process, now.
    pub(crate) fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        let resident = field("VmRSS:").trim().trim_end_matches(" kB");
        Self {
            resident_kib: resident.parse().unwrap(),
            descriptors: fs::read_dir("/proc/self/fd").unwrap().count(),
            threads: field("Threads:").trim().parse().unwrap(),
        }
    }
}

/// The second half of the time must take no more than the first.
pub(crate) fn check_flat(usage: &[Usage]) {
    /// What allocators and an occasional thread that is about to end may add.
    const SPARE: Usage = Usage { resident_kib: 16 << 10, descriptors: 8, threads: 8 };
    let most = |part: &[Usage]| Usage {
        resident_kib: part.iter().map(|usage| usage.resident_kib).max().unwrap_or(0),
        descriptors: part.iter().map(|usage| usage.descriptors).max().unwrap_or(0),
        threads: part.iter().map(|usage| usage.threads).max().unwrap_or(0),
    };
    let (early, late) = (most(&usage[..usage.len().div_ceil(2)]), most(&usage[usage.len() / 2..]));
    eprintln!("at most, first half: {early:?}; second half: {late:?}");
    assert!(late.resident_kib <= early.resident_kib + SPARE.resident_kib, "memory grows: {usage:?}");
    assert!(late.descriptors <= early.descriptors + SPARE.descriptors, "descriptors leak: {usage:?}");
    assert!(late.threads <= early.threads + SPARE.threads, "threads leak: {usage:?}");
}
