//! `kvasir bench`.

use super::bench_engine::BenchEngineArgs;
use super::bench_index::BenchIndexArgs;
use super::bench_policy::BenchPolicyArgs;
use super::bench_rpc::BenchRpcArgs;
use super::bench_store::BenchStoreArgs;
use super::bench_tiers::BenchTiersArgs;
use super::bench_transfer::BenchTransferArgs;

/// Measure one part of Kvasir on this machine.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum What {
    Engine(BenchEngineArgs),
    Index(BenchIndexArgs),
    Policy(BenchPolicyArgs),
    Rpc(BenchRpcArgs),
    Store(BenchStoreArgs),
    Tiers(BenchTiersArgs),
    Transfer(BenchTransferArgs),
}

impl BenchArgs {
    /// # Errors
    /// As the part that is measured.
    pub fn run(self) -> anyhow::Result<()> {
        match self.what {
            What::Engine(args) => args.run(),
            What::Index(args) => args.run(),
            What::Policy(args) => args.run(),
            What::Rpc(args) => args.run(),
            What::Store(args) => args.run(),
            What::Tiers(args) => args.run(),
            What::Transfer(args) => args.run(),
        }
    }
}
