//! Generates the gRPC types and stubs from `host/proto`, without `protoc`.

use anyhow::Context;

const ROOT: &str = "../../host/proto";
const FILES: [&str; 4] = ["store", "conductor", "policy_admin", "node"];

fn main() -> anyhow::Result<()> {
    println!("cargo::rerun-if-changed={ROOT}");
    let files = FILES.map(|name| format!("kvasir/v1/{name}.proto"));
    let descriptors = protox::compile(files, [ROOT]).context("host/proto does not compile")?;
    tonic_prost_build::configure()
        .bytes(".kvasir.v1.LoadRequest")
        .compile_fds(descriptors)
        .context("the generated code cannot be written")
}
