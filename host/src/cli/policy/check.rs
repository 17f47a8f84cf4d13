//! `kvasir policy check`.

use crate::authoring::{DEADLINE_MIN, Error, MEMORY_MIN, Project, Report, Row, Trial, Verdict, check};
use crate::policy::PolicyConfig;
use crate::text::printable;
use clap::Args;
use kvasir_dataplane::units::{Size, Span};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Try a component as a host would use it, and worse: answers, state, time, memory. No host need run.
#[derive(Args, Debug)]
pub(super) struct CheckArgs {
    /// A component, or a policy's folder in which `kvasir policy build` made one.
    #[arg(default_value = ".")]
    what: PathBuf,
    /// A setting to try it with; may be given several times, and overrides the manifest.
    #[arg(long = "setting", value_name = "NAME=VALUE", value_parser = crate::cli::setting)]
    settings: Vec<(String, String)>,
    /// Memory of one instance. Default: the manifest's, or that of a host.
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    memory: Option<Size>,
    /// CPU time of one hot call, 1 ms or more. Default: the manifest's, or that of a host.
    #[arg(long, value_name = "TIME", value_parser = deadline)]
    deadline: Option<Span>,
    /// What it is tried with follows from this number.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A recording whose decisions it is asked again; may be given several times. Default: vectors/*.jsonl of the project.
    #[arg(long, value_name = "FILE")]
    vectors: Vec<PathBuf>,
    /// If it passes, record what it answers in the worlds of the seed: decisions that it must answer alike from then on. Default:
    /// vectors/seed-N.jsonl of the project.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    write_vectors: Option<Option<PathBuf>>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub(super) fn memory(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|e| format!("{e}"))?;
    if size < MEMORY_MIN { Err(format!("must be {MEMORY_MIN} or more")) } else { Ok(size) }
}

pub(super) fn deadline(text: &str) -> Result<Span, String> {
    let span: Span = text.parse().map_err(|e| format!("{e}"))?;
    if span.0 < DEADLINE_MIN { Err(format!("must be {DEADLINE_MIN:?} or more")) } else { Ok(span) }
}

/// The longest text on one line of the table.
const LINE_BYTES: usize = 300;

impl CheckArgs {
    pub(super) fn run(self) -> ExitCode {
        let json = self.json;
        match self.check() {
            Ok((file, report)) => {
                print(&file, &report, json);
                ExitCode::from(u8::from(!report.passed()))
            }
            Err(error) => super::failed(&error),
        }
    }

    fn check(self) -> Result<(PathBuf, Report), Error> {
        let (mut record_to, mut own_file) = (self.write_vectors.clone(), None);
        let (file, mut trial) = if self.what.is_dir() {
            let project = Project::open(&self.what)?;
            let path = project.component();
            if !path.exists() {
                return Err(Error::NotBuilt { path });
            }
            if let Some(source) = project.source_changed() {
                let (path, source) = (path.display(), source.display());
                eprintln!(
                    "kvasir: {source} was changed after {path} was made; `kvasir policy build` makes it anew"
                );
            }
            own_file = Some(project.vectors_of(self.seed));
            (path, project.trial()?)
        } else {
            let (config, vectors) = (PolicyConfig::unhurried(), Vec::new());
            (
                self.what,
                Trial { config, settings: Vec::new(), seed: 0, vectors, record_to: None, called: None },
            )
        };
        trial.seed = self.seed;
        for (name, value) in self.settings {
            trial.settings.retain(|(known, _)| *known != name);
            trial.settings.push((name, value));
        }
        if let Some(memory) = self.memory {
            trial.config.memory_bytes = memory.0 as usize;
        }
        if let Some(deadline) = self.deadline {
            trial.config.hot_deadline = deadline.0;
        }
        trial.vectors.extend(self.vectors);
        if let Some(named) = record_to.take() {
            let to = named.or(own_file).ok_or(Error::NoVectors)?;
            // What it says so far is what is to be replaced.
            trial.vectors.retain(|known| !is_same_file(known, &to));
            trial.record_to = Some(to);
        }
        let report = check(&file, &trial)?;
        Ok((file, report))
    }
}

fn is_same_file(a: &Path, b: &Path) -> bool {
    let real = |path: &Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.into());
    real(a) == real(b)
}

fn print(file: &Path, report: &Report, json: bool) {
    let word = |verdict| match verdict {
        Verdict::Passed => "ok",
        Verdict::Failed => "FAILED",
        Verdict::Skipped => "-",
    };
    if json {
        let row = |row: &Row| {
            serde_json::json!({
                "check": row.check, "asked": row.asked, "came": row.came, "verdict": word(row.verdict).to_lowercase(),
            })
        };
        let rows: Vec<_> = report.rows.iter().map(row).collect();
        return println!(
            "{}",
            serde_json::json!({ "file": file, "passed": report.passed(), "checks": rows })
        );
    }
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["check", "asked", "", "came"]);
    for row in &report.rows {
        let [asked, came] = [&row.asked, &row.came].map(|text| printable(text, LINE_BYTES));
        table.add_row([row.check.to_owned(), asked, word(row.verdict).to_owned(), came]);
    }
    println!("{table}");
    let failed = report.rows.iter().filter(|row| row.verdict == Verdict::Failed).count();
    match failed {
        0 => {
            let slot = report.slot.map_or("SLOT", |slot| slot.as_str());
            println!("passed; next: kvasir policy load {slot} {} --shadow", file.display());
        }
        1 => println!("1 check failed"),
        _ => println!("{failed} checks failed"),
    }
}
