//! The rows of `kvasir bench transfer`, without building the whole of it:
//! `cargo bench -p kvasir-dataplane --bench transfer [-- PART-OF-A-NAME...]`.

use std::time::Duration;

use kvasir_dataplane::transfer::bench;

fn main() -> std::io::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test` runs it without: once, at the smallest size.
    let full = args.iter().any(|arg| arg == "--bench");
    let (round, rounds) = if full { (Duration::from_millis(150), 7) } else { (Duration::from_millis(1), 1) };
    let names: Vec<&String> = args.iter().filter(|arg| !arg.starts_with("--")).collect();
    let wanted = |row: &str| names.is_empty() || names.iter().any(|name| row.contains(name.as_str()));
    for row in bench::run_some(round, rounds, wanted)? {
        let beside =
            row.reference.map(|reference| format!("  {:.2} of {reference:.3}", row.value / reference));
        let spread =
            row.p50_us.zip(row.p99_us).map(|(p50, p99)| format!("  p50 {p50:.0} us, p99 {p99:.0} us"));
        let more = [beside, spread].into_iter().flatten().collect::<String>();
        println!("{:<28} {:>14.3} {:<9}{more}", row.name, row.value, row.unit);
    }
    Ok(())
}
