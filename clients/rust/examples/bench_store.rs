//! Prints the store's figures: `cargo run --release -p kvasir-client --example bench_store [seconds per figure]`.

use std::time::Duration;

use kvasir_client::bench::{Error, Setup, store};

fn main() -> Result<(), Error> {
    let seconds = std::env::args().nth(1).map_or(Ok(1.0), |text| text.parse())?;
    let socket = std::env::temp_dir().join(format!("kvasir-bench-{}.sock", std::process::id()));
    for row in store(&Setup { each: Duration::from_secs_f64(seconds), socket: &socket })? {
        let reference = row.reference.map_or(String::new(), |reference| {
            format!("reference {reference:>8.2} ratio {:.2}", row.ratio.unwrap_or_default())
        });
        let (name, value, unit, p50, p99) = (row.name, row.value, row.unit, row.p50, row.p99);
        println!("{name:<24} {value:>14.2} {unit:<7} p50 {p50:>9.1} us p99 {p99:>9.1} us  {reference}");
    }
    Ok(())
}
