//! `kvasir trace`: look at traces and make them.

use super::replay::{BlockFlags, open_trace};
use crate::replay::generate::{self, Plan, Workload};
use crate::replay::stats::{Report, Stats};
use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::path::PathBuf;

/// Inspect request traces, or generate one.
#[derive(clap::Args, Debug)]
pub struct TraceArgs {
    #[command(subcommand)]
    pub command: TraceCommand,
}

/// What to do with traces.
#[derive(clap::Subcommand, Debug)]
pub enum TraceCommand {
    /// Count requests, blocks, lengths and possible reuse.
    Stats(StatsArgs),
    /// Write a synthetic trace in the Mooncake format.
    Generate(GenerateArgs),
}

/// Arguments of `kvasir trace stats`.
#[derive(clap::Args, Debug)]
pub struct StatsArgs {
    /// Trace to read, plain or gzip.
    #[arg(value_name = "FILE")]
    pub trace: PathBuf,
    #[command(flatten)]
    pub blocks: BlockFlags,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `kvasir trace generate`.
#[derive(clap::Args, Debug)]
pub struct GenerateArgs {
    /// Kind of workload.
    #[arg(long, value_enum, default_value_t = Workload::Chat)]
    pub workload: Workload,
    /// Requests to write.
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub requests: u64,
    /// Mean arrival rate, requests per second.
    #[arg(long, value_name = "RPS", default_value_t = 5.0)]
    pub rate: f64,
    /// The same seed gives the same trace.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// File to write; compressed if it ends in .gz.
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
}

impl TraceArgs {
    /// # Errors
    /// The trace cannot be read or written, or the workload's numbers are out of range.
    pub fn run(self) -> Result<()> {
        match self.command {
            TraceCommand::Stats(args) => args.run(),
            TraceCommand::Generate(args) => args.run(),
        }
    }
}

impl StatsArgs {
    fn run(self) -> Result<()> {
        let (trace, progress) = open_trace(&self.trace, &self.blocks)?;
        let mut stats = Stats::of_blocks(self.blocks.block_size_tokens);
        for request in trace {
            stats.add(&request?)?;
        }
        progress.finish_and_clear();
        let report = stats.report();
        if report.requests == 0 {
            bail!("trace {} holds no requests", self.trace.display());
        }
        if self.json {
            println!("{}", serde_json::to_string(&report)?);
        } else {
            print!("{}", table(&report));
        }
        Ok(())
    }
}

impl GenerateArgs {
    fn run(self) -> Result<()> {
        let plan =
            Plan { workload: self.workload, requests: self.requests, rate_rps: self.rate, seed: self.seed };
        let progress = if std::io::stderr().is_terminal() {
            ProgressBar::new(self.requests)
        } else {
            ProgressBar::hidden()
        };
        let style = ProgressStyle::with_template("{bar:40} {pos} of {len} requests, {eta} left");
        progress.set_style(style.expect("the template is constant"));
        generate::write(&plan, &self.output, || progress.inc(1))?;
        progress.finish_and_clear();
        eprintln!("wrote {} requests to {}", self.requests, self.output.display());
        Ok(())
    }
}

fn table(report: &Report) -> String {
    let classes = report.classes.iter().map(|(class, requests)| format!("{class}: {requests}"));
    let rows = [
        ("requests", format!("{} in {:.0} s ({:.2} /s)", report.requests, report.span_s, report.rate_rps)),
        ("input", format!("{:.0} tokens mean, {} max", report.input_tokens_mean, report.input_tokens_max)),
        ("output", format!("{:.0} tokens mean", report.output_tokens_mean)),
        ("blocks", format!("{} references, {} distinct", report.block_references, report.distinct_blocks)),
        ("best hit rate", format!("{:.2} % with unlimited space", report.best_hit_rate_percent)),
        ("later turns", format!("{:.1} % of the requests", 100.0 * report.later_turn_share)),
        ("classes", classes.collect::<Vec<_>>().join(", ")),
    ];
    rows.iter().map(|(name, value)| format!("{name:15}{value}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::trace::Reader;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        trace: TraceArgs,
    }

    fn run(line: &str) -> Result<()> {
        Command::try_parse_from(std::iter::once("kvasir").chain(line.split(' ')))?.trace.run()
    }

    fn stats(path: &std::path::Path) -> Report {
        let mut stats = Stats::default();
        Reader::open(path).unwrap().for_each(|request| stats.add(&request.unwrap()).unwrap());
        stats.report()
    }

    #[test]
    fn what_is_generated_can_be_counted() {
        let folder = tempfile::tempdir().unwrap();
        for workload in ["chat", "api", "agent"] {
            let [plain, gzip, other] = ["a.jsonl", "a.jsonl.gz", "b.jsonl"]
                .map(|name| folder.path().join(workload.to_owned() + name));
            for (path, seed) in [(&plain, 7), (&gzip, 7), (&other, 8)] {
                let line = "generate --requests 200 --rate 20 --workload";
                run(&format!("{line} {workload} --seed {seed} --output {}", path.display())).unwrap();
            }
            let report = stats(&plain);
            assert_eq!(report.requests, 200, "{workload}");
            assert_eq!(table(&report), table(&stats(&gzip)), "{workload}: compression changes nothing");
            assert_ne!(table(&report), table(&stats(&other)), "{workload}: another seed, another trace");
            assert!(report.best_hit_rate_percent > 0.0 && report.distinct_blocks < report.block_references);
            for row in ["requests       200 in ", "best hit rate", "classes"] {
                assert!(table(&report).contains(row), "{}", table(&report));
            }
            run(&format!("stats {} --json", plain.display())).unwrap();
        }
    }

    #[test]
    fn what_cannot_run_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(at("bad"), "{}\n").unwrap();
        let rows = [
            ("stats /none.jsonl".into(), "cannot open trace /none.jsonl"),
            ("stats /dev/null".into(), "/dev/null holds no requests"),
            (format!("stats {}", at("bad")), "bad:1: missing field `timestamp`"),
            (format!("generate --requests 0 -o {}", at("x")), "0 requests are outside 1 to"),
            (format!("generate --rate 0 -o {}", at("x")), "a rate of 0 requests per second"),
            (format!("generate --workload chats -o {}", at("x")), "invalid value 'chats'"),
            (format!("generate -o {}", at("none/x")), "cannot write"),
        ];
        for (line, expected) in rows {
            let error = format!("{:#}", run(&line).unwrap_err());
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
