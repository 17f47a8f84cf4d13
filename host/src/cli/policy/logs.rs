//! `kvasir policy logs`.

use super::Target;
use clap::Args;
use kvasir_client::control::Control;
use kvasir_proto as proto;
use std::process::ExitCode;

/// Show what the policies of a slot logged.
#[derive(Args, Debug)]
pub(super) struct LogsArgs {
    slot: String,
    #[command(flatten)]
    to: Target,
}

impl LogsArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { slot, to } = self;
        let logs = async |mut control: Control| {
            Ok(control.policy.logs(proto::LogsRequest { slot }).await?.into_inner())
        };
        to.print_logs(&to.host.control(logs)?);
        Ok(ExitCode::SUCCESS)
    }
}

impl Target {
    fn print_logs(&self, logs: &proto::LogsResponse) {
        if self.json {
            let line = |l: &proto::LogLine| serde_json::json!({ "at_ms": l.at_ms, "level": level(l.level), "text": l.text });
            let lines: Vec<_> = logs.lines.iter().map(line).collect();
            println!("{}", serde_json::json!({ "lines": lines, "dropped": logs.dropped }));
            return;
        }
        for l in &logs.lines {
            println!("{:>10.3} s {:5} {}", l.at_ms as f64 / 1e3, level(l.level), l.text);
        }
        if logs.dropped > 0 {
            println!("{} lines over the rate limit were dropped", logs.dropped);
        }
    }
}

fn level(level: u32) -> &'static str {
    ["error", "warn", "info", "debug"].get(level.wrapping_sub(1) as usize).copied().unwrap_or("debug")
}
