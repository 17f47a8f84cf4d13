//! The time that people use. It may jump; for spans there is the host's own clock.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Unix time in milliseconds; 0 before 1970.
pub(crate) fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// Unix time in milliseconds, as people write it.
pub(crate) fn moment(at_ms: u64) -> String {
    // Beyond the year 9999 there is nothing to print, and such a time comes from no clock.
    let at_ms = at_ms.min(253_402_300_799_999);
    humantime::format_rfc3339_millis(UNIX_EPOCH + Duration::from_millis(at_ms)).to_string()
}
