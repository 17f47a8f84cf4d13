//! Generates the gRPC types and stubs from the files in `kvasir/`, without `protoc`.

use anyhow::Context;
use protox::prost::Message;

const ROOT: &str = "kvasir";
const FILES: [&str; 6] = ["store", "conductor", "policy_admin", "policy_rollouts", "node", "explain"];

fn main() -> anyhow::Result<()> {
    println!("cargo::rerun-if-changed={ROOT}");
    let files = FILES.map(|name| format!("kvasir/v1/{name}.proto"));
    let descriptors = protox::compile(files, ["."]).context("the contract does not compile")?;
    // For reflection, and for the test that walks every call.
    let out = std::env::var("OUT_DIR").context("OUT_DIR, which cargo sets")?;
    std::fs::write(std::path::Path::new(&out).join("kvasir.bin"), descriptors.encode_to_vec())
        .context("the descriptors cannot be written")?;
    tonic_prost_build::configure()
        .bytes(".kvasir.v1.LoadRequest")
        .bytes(".kvasir.v1.ChainPart")
        .compile_fds(descriptors)
        .context("the generated code cannot be written")
}
