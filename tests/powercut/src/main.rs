//! Power cuts, replayed from a recording of a real block device: `cargo xtask powercut`, `docs/design/0017-power-cuts.md`.
//!
//! One program with three parts. A session runs in a virtual machine, and starts the other two: the process whose writes are
//! recorded, and the process that looks at what a cut has left.

mod blocks;
mod chance;
mod check;
mod cut;
mod database;
mod log;
mod machine;
mod model;
mod session;
mod work;

use anyhow::Result;
use clap::{Parser, Subcommand};
use kvasir_os::planted::{self, Bug};

#[derive(Parser)]
#[command(about = "Cuts the power of the NVMe tier and of the databases")]
struct Args {
    #[command(subcommand)]
    part: Part,
}

#[derive(Subcommand)]
enum Part {
    /// Record, cut and look, in the virtual machine of tests/rdma-vm.
    Session(session::SessionArgs),
    /// Be recorded.
    Work {
        #[command(flatten)]
        work: work::WorkArgs,
        #[arg(long, value_parser = bug)]
        plant: Option<Bug>,
    },
    /// Look at what is left.
    Check {
        #[command(flatten)]
        check: check::CheckArgs,
        #[arg(long, value_parser = bug)]
        plant: Option<Bug>,
    },
}

fn bug(name: &str) -> Result<Bug, String> {
    let names = || Bug::ALL.iter().map(|bug| bug.name()).collect::<Vec<_>>().join(", ");
    let found = Bug::ALL.iter().find(|bug| bug.name() == name);
    found.copied().ok_or_else(|| format!("there is no such bug; there are {}", names()))
}

fn expected(text: &str) -> Result<model::Expected, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

fn main() -> Result<()> {
    match Args::parse().part {
        Part::Session(session) => session::run(&session),
        Part::Work { work, plant } => {
            plant.into_iter().for_each(planted::plant);
            work::run(&work)
        }
        Part::Check { check, plant } => {
            plant.into_iter().for_each(planted::plant);
            check::run(&check)
        }
    }
}
