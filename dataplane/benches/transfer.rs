//! `cargo bench -p kvasir-dataplane --bench transfer`: the rows of [`kvasir_dataplane::transfer::bench`] as text.

use std::time::Duration;

fn main() -> std::io::Result<()> {
    // cargo test --benches runs it too: then only to see that it runs.
    let quick = !std::env::args().any(|arg| arg == "--bench");
    let (round, rounds) = if quick { (Duration::from_millis(1), 1) } else { (Duration::from_millis(150), 7) };
    println!(
        "{:<20} {:>12} {:<9} {:>12} {:>7} {:>9} {:>9}",
        "", "value", "unit", "reference", "ratio", "p50 us", "p99 us"
    );
    for row in kvasir_dataplane::transfer::bench::run(round, rounds)? {
        let text = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.2}"));
        let ratio = row.reference.map(|reference| row.value / reference);
        let (reference, ratio) = (text(row.reference), text(ratio));
        let (p50, p99) = (text(row.p50_us), text(row.p99_us));
        println!(
            "{:<20} {:>12.2} {:<9} {reference:>12} {ratio:>7} {p50:>9} {p99:>9}",
            row.name, row.value, row.unit
        );
    }
    Ok(())
}
