//! `kvasir policy check`: a component is tried as a host would use it, and in ways that a host seldom does.
//!
//! Each slot has worlds of its own ([`World`]), made from a seed: small, full and degenerate ones. What happens in
//! one is told to two engines of the policy, which must give the same answers, all within the contract.

mod admitter;
mod ancestors;
mod balancer;
mod evictor;
mod learning;
mod panel;
mod scheduler;
mod trials;
mod vectors;

use crate::policy::inspect::{Inspection, inspect};
use crate::policy::{Engine, Error, PolicyConfig, SlotKind, Source};
use std::path::{Path, PathBuf};

/// What a policy is tried with.
#[derive(Clone, Debug)]
pub struct Trial {
    /// Limits of the host.
    pub config: PolicyConfig,
    pub settings: Vec<(String, String)>,
    /// Seed of the worlds in which it is tried.
    pub seed: u64,
    /// Recordings whose decisions it is asked again.
    pub vectors: Vec<PathBuf>,
    /// Where its answers in these worlds are recorded, if it passes.
    pub record_to: Option<PathBuf>,
    /// The slot, the name and the version that its project gives it.
    pub called: Option<(SlotKind, String, String)>,
}

/// What came of it.
#[derive(Debug)]
pub struct Report {
    /// `None` means that it does not load.
    pub slot: Option<SlotKind>,
    pub rows: Vec<Row>,
}

/// One check.
#[derive(Debug)]
pub struct Row {
    pub check: &'static str,
    pub asked: String,
    pub came: String,
    pub verdict: Verdict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Passed,
    Failed,
    /// The policy has nothing to check there.
    Skipped,
}

impl Report {
    /// Nothing failed.
    pub fn passed(&self) -> bool {
        self.rows.iter().all(|row| row.verdict != Verdict::Failed)
    }
}

impl Row {
    fn new(check: &'static str, asked: impl Into<String>, came: Result<String, String>) -> Self {
        let (verdict, came) = match came {
            Ok(came) => (Verdict::Passed, came),
            Err(came) => (Verdict::Failed, came),
        };
        Self { check, asked: asked.into(), came, verdict }
    }

    fn skipped(check: &'static str, asked: impl Into<String>, why: impl Into<String>) -> Self {
        Self { check, asked: asked.into(), came: why.into(), verdict: Verdict::Skipped }
    }
}

/// Tries the component in `path`. One that does not load is a report of one line.
///
/// # Errors
/// The file cannot be read or is that of a chain, or the machine has no engine for it.
pub fn check(path: &Path, trial: &Trial) -> Result<Report, Error> {
    let asked = "as a host would, with default settings";
    let found = match inspect(&trial.config, path) {
        Ok(found) => found,
        Err(error @ (Error::Read { .. } | Error::Engine(_) | Error::Chain { .. })) => return Err(error),
        Err(error) => {
            return Ok(Report { slot: None, rows: vec![Row::new("loads", asked, Err(error.to_string()))] });
        }
    };
    let load_ms = found.load_time.as_secs_f64() * 1e3;
    let mut rows = vec![Row::new("loads", asked, Ok(format!("{} B in {load_ms:.0} ms", found.bytes)))];
    rows.extend(trial.called.as_ref().map(|called| says(&found, called)));

    let engine = Engine::new(&trial.config, None)?;
    let source = Source::File(path.into());
    let (policy, description) = (trials::Policy { engine: &engine, trial, source }, &found.description);
    rows.extend(match found.slot {
        SlotKind::Scheduler => trials::rows::<scheduler::Cluster>(&policy, description),
        SlotKind::Evictor => trials::rows::<evictor::Pool>(&policy, description),
        SlotKind::Admitter => trials::rows::<admitter::Door>(&policy, description),
        SlotKind::Balancer => trials::rows::<balancer::Load>(&policy, description),
    }?);
    rows.extend(vectors::rows(&policy, found.slot, description)?);
    let mut report = Report { slot: Some(found.slot), rows };
    if let Some(to) = &trial.record_to {
        let asked = format!("to {}", to.display());
        report.rows.push(match report.passed() {
            true => Row::new("vectors", asked, vectors::write(&policy, &found, to)),
            false => Row::skipped("vectors", asked, "not written: a check failed"),
        });
    }
    Ok(report)
}

/// Compares what it says of itself with what its project says.
fn says(found: &Inspection, (slot, name, version): &(SlotKind, String, String)) -> Row {
    let said = &found.description;
    let same = (found.slot, &said.name, &said.version) == (*slot, name, version);
    let came = format!("{} {} {}", found.slot, said.name, said.version);
    Row::new(
        "says who it is",
        format!("{slot} {name} {version}, as in the manifest"),
        if same { Ok(came) } else { Err(came) },
    )
}
