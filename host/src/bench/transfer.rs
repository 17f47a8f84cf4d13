//! Measures the transfer engine between two nodes in this process.

use super::Row;
use super::engine;
use std::io;
use std::time::Duration;

/// How long one round of a row lasts, and how many rounds there are.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    round: Duration,
    rounds: usize,
}

impl Size {
    pub const FULL: Self = Self { round: Duration::from_millis(150), rounds: 7 };
    /// Shows that every row runs, measures nothing.
    pub const SMOKE: Self = Self { round: Duration::from_millis(1), rounds: 1 };
}

/// Every row. p50 and p99 are of single operations, in microseconds.
///
/// `only`: the groups of rows whose first name begins with one of these, or all if there is none.
///
/// # Errors
/// A socket or shared memory is not available.
pub fn rows(size: Size, only: &[String]) -> io::Result<Vec<Row>> {
    let wanted = |name: &str| only.is_empty() || only.iter().any(|prefix| name.starts_with(prefix));
    engine::run(size.round, size.rounds, wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_their_published_names() {
        let rows = rows(Size::SMOKE, &[]).unwrap();
        let published = [
            ("tcp/get/64KiB", "GB/s"),
            ("tcp/get/1MiB", "GB/s"),
            ("tcp/get/16MiB", "GB/s"),
            ("tcp/cpu", "CPU-s/GB"),
            ("tcp/get/4KiB", "ops/s"),
            ("tls/get/1MiB", "GB/s"),
            ("plan/slice", "ns"),
            ("shm/entry", "entries/s"),
            ("handover/first-layer", "ms"),
        ];
        for (name, unit) in published {
            let row = rows.iter().find(|row| row.name == name).unwrap_or_else(|| panic!("no row {name}"));
            assert!(row.unit == unit && row.value > 0.0, "{row:?}");
        }
    }
}
