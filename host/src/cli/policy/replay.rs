//! `kvasir policy replay`.

use super::serving::{self, Served};
use crate::cli::HostFlags;
use crate::cli::cluster_flags::ClusterFlags;
use crate::cli::replay::{LayoutFlags, open_trace};
use crate::policy::SlotKind;
use crate::policy::record::{LINE_BYTES_MAX, Record, Records};
use crate::replay::cache::Prompts;
use crate::replay::cluster::{Choice, Choices};
use crate::replay::compare::{self, Comparison, Decisions, Evictors, Match, Requests};
use crate::replay::contender::Contender;
use anyhow::{Context, Result, bail};
use clap::Args;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Take a trace through two policies, and tell what came of it side by side.
///
/// Evictors in caches of several sizes; schedulers, admitters and balancers in a cluster that is simulated in virtual time, and so
/// evictors where one of its flags is given, such as --pool-blocks. Where the trace is a recording of decisions (explain.file), both are
/// asked what was asked then.
#[derive(Args, Debug)]
pub(super) struct ReplayArgs {
    /// Name of a default policy, or file of a component or chain (contains `/` or ends in `.wasm` or `.toml`).
    policy: String,
    /// Trace, plain or gzip; or a recording: a file that explain.file of a host names, or lines of `kvasir explain ID --record`.
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    #[command(flatten)]
    layout: LayoutFlags,
    /// What to compare with: `current`, which serves the running host; a default policy; a file. Default: the slot's default.
    #[arg(long, value_name = "current|NAME|FILE")]
    against: Option<String>,
    /// Slot of a name that several slots have.
    #[arg(long)]
    slot: Option<SlotKind>,
    /// A setting of the policy; may be given several times.
    #[arg(long = "setting", value_name = "NAME=VALUE", value_parser = crate::cli::setting)]
    settings: Vec<(String, String)>,
    /// A setting of the policy compared with; may be given several times.
    #[arg(long = "against-setting", value_name = "NAME=VALUE", value_parser = crate::cli::setting)]
    against_settings: Vec<(String, String)>,
    /// Replay the first N requests, or decisions of a recording, only.
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Evictors: size of the cache in blocks; may be given several times. Default: 2, 5, 10 and 20 % of
    /// the trace's distinct blocks.
    #[arg(long = "capacity-blocks", value_name = "N")]
    capacities: Vec<u32>,
    #[command(flatten)]
    cluster: ClusterFlags,
    /// Write a page of HTML with plots, which needs nothing else.
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostFlags,
}

impl ReplayArgs {
    /// 1 if the policy failed on the way.
    pub(super) fn run(self) -> Result<ExitCode> {
        let candidate = Contender::find(&self.policy, self.slot, self.settings.clone())?;
        let baseline = self.baseline(candidate.slot)?;
        let comparison = self.compare(&candidate, &baseline)?;
        if self.json {
            println!("{}", serde_json::to_string(&comparison)?);
        } else {
            print!("{}", comparison.text());
        }
        if let Some(path) = &self.report {
            comparison.page().write(path).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(told(&candidate, &baseline, &comparison))
    }

    fn baseline(&self, slot: SlotKind) -> Result<Contender> {
        let settings = self.against_settings.clone();
        match self.against.as_deref() {
            None => {
                let default = Contender::default_of(slot);
                Ok(Contender { choice: Choice { settings, ..default.choice }, ..default })
            }
            Some("current") if settings.is_empty() => self.current(slot),
            Some("current") => bail!("what serves has its settings; leave out --against-setting"),
            Some(named) => Ok(Contender::find(named, Some(slot), settings)?),
        }
    }

    /// What serves the running host.
    fn current(&self, slot: SlotKind) -> Result<Contender> {
        let served = serving::fetch(&self.host, slot, true);
        let Served { source, settings } =
            served.context("--against current needs the running host; or name a policy or its file")?;
        Ok(Contender { slot, name: source.name().to_owned(), choice: Choice { source, settings } })
    }

    fn compare(&self, candidate: &Contender, baseline: &Contender) -> Result<Comparison> {
        if is_recording(&self.trace)? {
            return self.decisions([candidate, baseline]);
        }
        let trace = self.trace.display().to_string();
        let block_size_tokens = self.layout.block_size_tokens();
        let of = Match { trace: &trace, candidate, baseline, block_size_tokens };
        if candidate.slot == SlotKind::Evictor && !self.cluster.any() {
            return Ok(Comparison::Evictors(self.evictors(&of)?));
        }
        if !self.capacities.is_empty() {
            bail!("--capacity-blocks is for evictors in caches; the pools of a cluster have --pool-blocks");
        }
        let setup = self.cluster.setup(block_size_tokens)?;
        let (requests, progress) = open_trace(&self.trace, &self.layout)?;
        let choices = Choices::default();
        let compared = Requests::compare(&of, &setup, &choices, requests.take(self.limit()))?;
        progress.finish_and_clear();
        Ok(Comparison::Requests(Box::new(compared)))
    }

    fn decisions(&self, sides: [&Contender; 2]) -> Result<Comparison> {
        if self.cluster.any() || !self.capacities.is_empty() {
            bail!(
                "{} is a recording of decisions, which has instances and pools of its own; leave out --capacity-blocks, {}",
                self.trace.display(),
                ClusterFlags::NAMES
            );
        }
        let file =
            File::open(&self.trace).with_context(|| format!("cannot open {}", self.trace.display()))?;
        let records = Records::new(BufReader::new(file));
        let recording = self.trace.display().to_string();
        Ok(Comparison::Decisions(Box::new(Decisions::compare(&recording, sides, records, self.limit())?)))
    }

    fn evictors(&self, of: &Match<'_>) -> Result<Evictors> {
        let capacities = match self.capacities.is_empty() {
            true => compare::capacities(self.distinct_blocks()?),
            false => self.capacities.clone(),
        };
        let (requests, progress) = open_trace(&self.trace, &self.layout)?;
        let compared = Evictors::compare(of, &capacities, requests.take(self.limit()))?;
        progress.finish_and_clear();
        Ok(compared)
    }

    fn distinct_blocks(&self) -> Result<usize> {
        let (requests, progress) = open_trace(&self.trace, &self.layout)?;
        let mut prompts = Prompts::default();
        for request in requests.take(self.limit()) {
            prompts.of(&request?)?;
        }
        progress.finish_and_clear();
        Ok(prompts.distinct_blocks())
    }

    fn limit(&self) -> usize {
        self.limit.unwrap_or(usize::MAX)
    }
}

/// Whether the first line of a file is a recorded decision rather than a request.
fn is_recording(path: &Path) -> Result<bool> {
    let file = File::open(path).with_context(|| format!("cannot open trace {}", path.display()))?;
    let mut line = Vec::new();
    let mut limited = BufReader::new(file).take(LINE_BYTES_MAX as u64);
    while limited.read_until(b'\n', &mut line)? > 0 && line.trim_ascii().is_empty() {
        line.clear();
    }
    Ok(Record::is_line(&line))
}

/// Says what failed, and whether that was the policy that was to be replayed.
fn told(candidate: &Contender, baseline: &Contender, comparison: &Comparison) -> ExitCode {
    let (candidate_faults, baseline_faults) = (comparison.candidate_faults(), comparison.baseline_faults());
    for (name, faults) in [(&candidate.name, &candidate_faults), (&baseline.name, &baseline_faults)] {
        for fault in faults {
            eprintln!("kvasir: `{name}` failed, so that not all figures beside it are its own: {fault}");
        }
    }
    ExitCode::from(u8::from(!(candidate_faults.is_empty() && baseline_faults.is_empty())))
}
