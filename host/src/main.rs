//! The `kvasir` binary.

fn main() -> std::process::ExitCode {
    kvasir::cli::main()
}
