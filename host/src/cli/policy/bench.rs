//! `kvasir policy bench`.

use crate::bench::contest::{self, Budget};
use crate::bench::policy::Size;
use crate::policy::SlotKind;
use crate::replay::contender::Contender;
use clap::Args;
use std::process::ExitCode;

/// Time a policy call by call, beside the default of its slot and its native twin.
#[derive(Args, Debug)]
pub(super) struct BenchArgs {
    /// Name of a default policy, or file of a component or chain (contains `/` or ends in `.wasm` or `.toml`).
    policy: String,
    /// Slot of a name that several slots have.
    #[arg(long)]
    slot: Option<SlotKind>,
    /// A setting of the policy; may be given several times.
    #[arg(long = "setting", value_name = "NAME=VALUE", value_parser = crate::cli::setting)]
    settings: Vec<(String, String)>,
    /// What every row may cost, as `2us` (the median) or `p99=5us`; may be given several times. More is exit code 1.
    #[arg(long, value_name = "[p50=|p99=|mean=]TIME")]
    budget: Vec<Budget>,
    /// Seed of the instances, the prompts and the trace.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run every row with few calls: shows that it runs, measures nothing.
    #[arg(long)]
    smoke: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl BenchArgs {
    /// 1 if the policy failed or a row is over the budget.
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let size = if self.smoke { Size::SMOKE } else { Size::FULL };
        let contender = Contender::find(&self.policy, self.slot, self.settings)?;
        let report = match contest::run(&contender, size, self.seed) {
            Err(error @ contest::Error::Fault { .. }) => {
                eprintln!("kvasir: {error}");
                return Ok(ExitCode::FAILURE);
            }
            report => report?,
        };
        let over: Vec<_> = self.budget.iter().flat_map(|budget| budget.exceeded(&report.rows)).collect();
        if self.json {
            let mut object = serde_json::to_value(&report)?;
            object["over_budget"] = serde_json::json!(over);
            println!("{object}");
        } else {
            print!("{}", report.text());
        }
        over.iter().for_each(|row| eprintln!("kvasir: over the budget: {row}"));
        Ok(ExitCode::from(u8::from(!over.is_empty())))
    }
}
