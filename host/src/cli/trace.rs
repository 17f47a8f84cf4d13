//! `kvasir trace`: look at traces and make them.

use super::replay::{LayoutFlags, open_trace};
use crate::replay::convert::Converter;
use crate::replay::generate::{self, Generator, Plan, Workload};
use crate::replay::stats::{self, Report, Stats};
use crate::replay::trace::Writer;
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::num::NonZeroU16;
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
    /// Write a trace of another format or with larger blocks in the Mooncake format.
    Convert(ConvertArgs),
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
    pub layout: LayoutFlags,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Also write a page to look at, which needs nothing else.
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
}

/// Arguments of `kvasir trace convert`.
#[derive(clap::Args, Debug)]
pub struct ConvertArgs {
    /// Trace to read, plain or gzip.
    #[arg(value_name = "FILE")]
    pub trace: PathBuf,
    #[command(flatten)]
    pub layout: LayoutFlags,
    /// Tokens of a block of what is written, a multiple of those of the trace [default: the same].
    #[arg(long, value_name = "N")]
    pub to_block_size_tokens: Option<u32>,
    /// File to write; compressed if it ends in .gz.
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
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
    /// Tenants that the requests are of, numbered from 0. They share no blocks.
    #[arg(long, value_name = "N", default_value = "1")]
    pub tenants: NonZeroU16,
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
            TraceCommand::Convert(args) => args.run(),
            TraceCommand::Generate(args) => args.run(),
        }
    }
}

impl StatsArgs {
    fn run(self) -> Result<()> {
        let (trace, progress) = open_trace(&self.trace, &self.layout)?;
        let mut stats = Stats::of_blocks(self.layout.block_size_tokens());
        for request in trace {
            stats.add(&request?)?;
        }
        progress.finish_and_clear();
        let report = stats.report();
        if report.requests == 0 {
            bail!("trace {} holds no requests", self.trace.display());
        }
        if let Some(path) = &self.report {
            let page = stats.page(&self.trace.display().to_string(), &report);
            page.write(path).with_context(|| format!("cannot write {}", path.display()))?;
        }
        if self.json {
            println!("{}", serde_json::to_string(&report)?);
        } else {
            print!("{}", table(&report));
        }
        Ok(())
    }
}

impl ConvertArgs {
    fn run(self) -> Result<()> {
        let from = self.layout.block_size_tokens();
        let mut converter = Converter::new(from, self.to_block_size_tokens.unwrap_or(from))?;
        let (trace, progress) = open_trace(&self.trace, &self.layout)?;
        let mut file = Writer::create(&self.output)?;
        for request in trace {
            file.write(&converter.convert(request?)?)?;
        }
        progress.finish_and_clear();
        let written = file.finish()?;
        eprintln!("wrote {written} requests to {}", self.output.display());
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
        let generator = Generator::new(&plan)?.of_tenants(self.tenants);
        generate::write(generator, &self.output, || progress.inc(1))?;
        progress.finish_and_clear();
        eprintln!("wrote {} requests to {}", self.requests, self.output.display());
        Ok(())
    }
}

fn table(report: &Report) -> String {
    stats::rows(report).map(|(name, value)| format!("{name:15}{value}\n")).collect()
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
            let page = folder.path().join("page.html");
            run(&format!("stats {} --json --report {}", plain.display(), page.display())).unwrap();
            let page = std::fs::read_to_string(page).unwrap();
            assert!((6..=8).contains(&page.matches("<polyline").count()), "{page}");
            assert!(!page.contains("NaN") && !page.contains("nothing to draw"), "{page}");
        }
    }

    #[test]
    fn what_is_converted_is_the_same_trace_in_larger_blocks() {
        let folder = tempfile::tempdir().unwrap();
        let [qwen, same, large] =
            ["q.jsonl", "same.jsonl.gz", "large.jsonl"].map(|name| folder.path().join(name));
        let line = |chat: u64, tokens: u32, blocks: &[u64]| {
            format!(
                "{{\"chat_id\":{chat},\"parent_chat_id\":-1,\"timestamp\":{chat}.5,\"input_length\":{tokens},\"output_length\":3,\
                 \"type\":\"text\",\"turn\":1,\"hash_ids\":{blocks:?}}}\n"
            )
        };
        let lines = [line(1, 40, &[1, 2, 3]), line(2, 48, &[1, 2, 4]), line(3, 20, &[1, 2])];
        std::fs::write(&qwen, lines.concat()).unwrap();
        for (to, path) in [("", &same), (" --to-block-size-tokens 32", &large)] {
            run(&format!("convert {} --format bailian{to} -o {}", qwen.display(), path.display())).unwrap();
        }
        let read = |path, size| -> Vec<_> {
            let requests = Reader::open(path).unwrap().of_blocks(size).map(Result::unwrap);
            requests.map(|r| (r.time_us, r.blocks, r.class, r.turn, r.session)).collect()
        };
        let rows = [(1, vec![0, 1, 2]), (2, vec![0, 1, 3]), (3, vec![0, 1])];
        let told = rows.map(|(n, blocks)| (n * 1_000_000 + 500_000, blocks, Some(1), Some(1), Some(n)));
        assert_eq!(read(&same, 16), told);
        let large: Vec<_> = read(&large, 32).into_iter().map(|row| row.1).collect();
        assert_eq!(large, [vec![0, 1], vec![0, 2], vec![0]]);
        run(&format!("stats {} --format bailian", qwen.display())).unwrap();
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
            (format!("convert {} -o {}", at("bad"), at("x")), "bad:1: missing field"),
            (format!("convert {} -o {}", at("bad"), at("none/x")), "none/x after 0 requests"),
            (
                format!("convert {} --to-block-size-tokens 600 -o {}", at("bad"), at("x")),
                "blocks of 600 tokens cannot be made of blocks of 512; take a multiple of 512",
            ),
            (format!("generate --requests 0 -o {}", at("x")), "0 requests are outside 1 to"),
            (format!("generate --rate 0 -o {}", at("x")), "a rate of 0 requests per second"),
            (format!("generate --workload chats -o {}", at("x")), "invalid value 'chats'"),
            (format!("generate -o {}", at("none/x")), "cannot write"),
        ];
        for (line, expected) in rows {
            let error = format!("{:#}", run(&line).unwrap_err());
            assert!(error.contains(expected), "{line}: {error}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left half written");
    }
}
