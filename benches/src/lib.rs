//! What the criterion benches share. Run them with `cargo xtask bench --criterion`.

/// Whether numbers are wanted: `cargo bench` says so, `cargo test` runs each bench once.
pub fn measuring() -> bool {
    std::env::args().any(|arg| arg == "--bench")
}
