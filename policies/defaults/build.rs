//! Compiles the default policies to components, so that the host can embed them.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

const POLICIES: [&str; 29] = [
    "adaptive-balancer",
    "affinity-scheduler",
    "arc-evictor",
    "early-rejection-admitter",
    "fifo-evictor",
    "fitted-cost-scheduler",
    "gdsf-evictor",
    "kvasir-evictor",
    "lbgr-scheduler",
    "lfu-evictor",
    "lhd-evictor",
    "local-cache-aware-scheduler",
    "local-or-remote-scheduler",
    "lora-affinity-scheduler",
    "lru-evictor",
    "mooncake-scheduler",
    "netkv-scheduler",
    "overlap-cost-scheduler",
    "pick-scheduler",
    "random-scheduler",
    "rlt-evictor",
    "round-robin-scheduler",
    "s3fifo-evictor",
    "score-scheduler",
    "sieve-evictor",
    "slo-admitter",
    "static-balancer",
    "vtc-scheduler",
    "workload-aware-evictor",
];

fn main() -> Result<()> {
    let policies = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("policies folder")?;
    let workspace = policies.parent().context("workspace folder")?;
    for input in ["sdk/rust", "wit", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={}", workspace.join(input).display());
    }
    for policy in POLICIES {
        println!("cargo::rerun-if-changed={}", policies.join(policy).display());
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").context("OUT_DIR")?);
    // OUT_DIR is <target>/<profile>/build/<package>/out: one guest folder serves every profile.
    let target = out.ancestors().nth(4).context("target folder")?.join("guests");
    let components = kvasir_policy_build::components(workspace, &POLICIES, &target)?;
    for (policy, component) in POLICIES.iter().zip(components) {
        std::fs::write(out.join(format!("{policy}.wasm")), component)?;
    }
    Ok(())
}
