//! `kvasir doctor`: is this machine fit for a host, and is its host well?

use super::ConfigFlags;
use crate::config::Config;
use crate::doctor::{Finding, Level, bad_settings, examine, facts::Facts};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// Look for what keeps a host from running, or from running well, and say what to do.
///
/// Looks at limits, memory, ports, the data folder, sockets, clocks, the kernel, RDMA and CUDA, as the settings need them;
/// with or without a running host. Run it as the user of the host. Exit code 1 if something is broken; warnings and notes
/// do not count.
#[derive(clap::Args, Debug)]
pub(super) struct DoctorArgs {
    /// Print one JSON object: {"broken": true|false, "findings": [{"area", "level", "found", "advice"}]}.
    #[arg(long)]
    json: bool,
    /// Print also what is in order.
    #[arg(long, short)]
    verbose: bool,
    /// Compare this machine's clock with that of another host, by its listen.http; may be given several times.
    #[arg(long, value_name = "HOST:PORT")]
    clock_of: Vec<String>,
    /// Certificates of the authorities of those hosts, where they speak TLS.
    #[arg(long, value_name = "FILE", env = "KVASIR_TLS_CA")]
    tls_ca: Option<PathBuf>,
    #[command(flatten)]
    settings: ConfigFlags,
}

impl DoctorArgs {
    /// # Errors
    /// Even the default settings cannot be used here.
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let (config, bad) = match self.settings.load() {
            Ok(config) => (config, None),
            Err(error) => (Config::load(None, [], &[])?, Some(bad_settings(&error))),
        };
        let facts = Facts::gather(&config, &self.clock_of, self.tls_ca.as_deref());
        let findings: Vec<Finding> = bad.into_iter().chain(examine(&config, &facts)).collect();
        let broken = findings.iter().any(|finding| finding.level == Level::Broken);
        if self.json {
            println!("{}", json!({ "broken": broken, "findings": findings }));
        } else {
            print!("{}", text(&findings, self.verbose));
        }
        Ok(super::there(!broken))
    }
}

fn text(findings: &[Finding], verbose: bool) -> String {
    let mut text = String::new();
    for Finding { area, level, found, advice } in findings {
        if *level == Level::Ok && !verbose {
            continue;
        }
        text += &format!("{:<8} {area}: {found}\n", level.name());
        if !advice.is_empty() {
            text += &format!("{:<8} -> {advice}\n", "");
        }
    }
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let [ok, notes, warnings, broken] = [Level::Ok, Level::Note, Level::Warning, Level::Broken].map(count);
    text + &format!("in order: {ok}, notes: {notes}, warnings: {warnings}, broken: {broken}\n")
}
