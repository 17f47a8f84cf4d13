//! `kvasir policy bench`.

use crate::authoring::Project;
use crate::bench::contest::{self, Budget};
use crate::bench::policy::Size as Amount;
use crate::config::{Size, Span};
use crate::policy::{PolicyConfig, SlotKind, Source};
use crate::replay::contender::Contender;
use clap::Args;
use std::path::Path;
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
    /// Memory limit of an instance. Default: that of the manifest beside the component, else 16 MiB.
    #[arg(long, value_name = "SIZE", value_parser = super::check::memory)]
    memory: Option<Size>,
    /// Deadline of a call. Default: that of the manifest beside the component, else 5 ms.
    #[arg(long, value_name = "TIME", value_parser = super::check::deadline)]
    deadline: Option<Span>,
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
        let size = if self.smoke { Amount::SMOKE } else { Amount::FULL };
        let mut limits = self.limits();
        limits.memory_bytes = self.memory.map_or(limits.memory_bytes, |memory| memory.0 as usize);
        limits.hot_deadline = self.deadline.map_or(limits.hot_deadline, |deadline| deadline.0);
        let contender = Contender::find(&self.policy, self.slot, self.settings)?;
        let report = contest::run(&contender, limits, size, self.seed)?;
        let over: Vec<_> = self.budget.iter().flat_map(|budget| budget.exceeded(&report.rows)).collect();
        if self.json {
            let mut object = serde_json::to_value(&report)?;
            object["over_budget"] = serde_json::json!(over);
            println!("{object}");
        } else {
            print!("{}", report.text());
        }
        report.failed.iter().for_each(|failed| eprintln!("kvasir: {failed}"));
        over.iter().for_each(|row| eprintln!("kvasir: over the budget: {row}"));
        Ok(ExitCode::from(u8::from(report.failed.is_some() || !over.is_empty())))
    }

    /// Those of its project, if it is a component in one.
    fn limits(&self) -> PolicyConfig {
        let folder = Path::new(&self.policy).parent().filter(|_| Source::is_path(&self.policy));
        let folder = folder.map(|folder| if folder.as_os_str().is_empty() { Path::new(".") } else { folder });
        let project = folder.and_then(|folder| Project::open(folder).ok());
        project.map_or_else(PolicyConfig::unhurried, |project| project.limits())
    }
}
