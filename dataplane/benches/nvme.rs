//! The NVMe tier beside the raw device: one JSON object a line.
//!
//! `cargo bench -p kvasir-dataplane --bench nvme`; `KVASIR_BENCH_DIR` names a directory on the device to measure (default:
//! the directory for temporary files), `KVASIR_BENCH_BYTES` the bytes of each sequential figure (default 1 GiB).

use kvasir_dataplane::tier::nvme::bench::Bench;

fn main() {
    let base = std::env::var_os("KVASIR_BENCH_DIR").map_or_else(std::env::temp_dir, Into::into);
    let bytes =
        std::env::var("KVASIR_BENCH_BYTES").ok().and_then(|bytes| bytes.parse().ok()).unwrap_or(1 << 30);
    let dir = tempfile::tempdir_in(base).expect("a directory to measure in");
    let bench = Bench { dir: dir.path(), bytes, reads: 50_000, queue_depth: 32 };
    match bench.run() {
        Ok(rows) => rows.iter().for_each(|row| {
            let (name, value, reference, unit) = (row.name, row.value, row.reference, row.unit);
            let ratio = if reference > 0.0 { value / reference } else { 0.0 };
            println!(
                r#"{{"name":"{name}","value":{value:.4},"unit":"{unit}","reference":{reference:.4},"ratio":{ratio:.3}}}"#
            );
        }),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}
