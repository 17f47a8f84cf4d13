//! Measures the DRAM store through its client, in this process.

use super::Row;
use anyhow::Result;
use kvasir_client::bench::{self, Setup};
use std::time::Duration;

/// How long each row is measured.
#[derive(Clone, Copy, Debug)]
pub struct Size(Duration);

impl Size {
    pub const FULL: Self = Self(Duration::from_secs(1));
    /// Shows that every row runs, measures nothing.
    pub const SMOKE: Self = Self(Duration::from_millis(2));
}

/// Every row. A host on a temporary socket and a loopback port serves them.
///
/// p50 and p99 are of single calls, in microseconds, also where the value is a rate.
///
/// # Errors
/// The pool does not fit this machine, or a socket cannot be opened.
pub fn rows(size: Size) -> Result<Vec<Row>> {
    let socket = std::env::temp_dir().join(format!("kvasir-bench-{}.sock", std::process::id()));
    let setup = Setup { each: size.0, socket: &socket };
    let measured = bench::store(&setup).map_err(anyhow::Error::from_boxed)?;
    Ok(measured.into_iter().map(row).collect())
}

fn row(measured: bench::Row) -> Row {
    let bench::Row { name, value, unit, p50, p99, reference, ratio } = measured;
    Row { name, value, unit, p50: Some(p50), p99: Some(p99), reference, ratio }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_their_published_names() {
        let rows = rows(Size::SMOKE).unwrap();
        for (name, unit) in
            [("exists/1024", "keys/s"), ("get/4KiB/cpu", "us"), ("put/1MiB", "GB/s"), ("put/16MiB", "GB/s")]
        {
            let row = rows.iter().find(|row| row.name == name).unwrap_or_else(|| panic!("no row {name}"));
            assert_eq!(row.unit, unit, "{name}");
            assert!(row.value > 0.0 && row.p99 >= row.p50, "{row:?}");
            assert_eq!(row.ratio, row.reference.map(|reference| row.value / reference), "{name}");
            assert_eq!(row.reference.is_some(), name.starts_with("put/"), "{name}");
        }
    }
}
