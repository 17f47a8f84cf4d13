//! Recorded decisions that a policy is asked again, and how they come to be recorded.

use super::trials::{self, Policy};
use super::{Row, admitter, balancer, evictor, scheduler};
use crate::policy::inspect::Inspection;
use crate::policy::record::{Player, PolicyOf, Record, Records};
use crate::policy::{Error, SlotKind};
use kvasir_policy::Description;
use std::fs::{self, File};
use std::io::BufReader;
use std::path::Path;

/// The longest record that is written: vectors lie beside the sources, and large tables show nothing that small ones do not.
const RECORD_BYTES_MAX: usize = 64 << 10;

/// A line for each recording. What was recorded of another policy, or of this one with other settings, is asked, but its
/// answers are not expected.
///
/// # Errors
/// The policy cannot be compiled.
pub(super) fn rows(
    policy: &Policy<'_>,
    slot: SlotKind,
    description: &Description,
) -> Result<Vec<Row>, Error> {
    let Policy { engine, trial, source } = policy;
    if trial.vectors.is_empty() {
        let none = "there are none; --write-vectors records some";
        return Ok(vec![Row::skipped("vectors", "recorded decisions", none)]);
    }
    let player = Player::new(engine, &trial.config, slot, source.clone(), trial.settings.clone())?;
    let own = Own { description, settings: effective(description, &trial.settings) };
    let row = |path: &std::path::PathBuf| {
        Row::new("vectors", path.display().to_string(), played(&player, path, &own))
    };
    Ok(trial.vectors.iter().map(row).collect())
}

fn played(player: &Player, path: &Path, own: &Own<'_>) -> Result<String, String> {
    let file = File::open(path).map_err(|error| format!("cannot read it: {error}"))?;
    let (mut asked, mut compared) = (0, 0);
    for (line, record) in (1..).zip(Records::new(BufReader::new(file))) {
        let record = record.map_err(|error| error.to_string())?;
        let answer = player.play(&record, false).map_err(|error| format!("decision {line}: {error}"))?.answer;
        asked += 1;
        let own = own.has_decided(&record);
        if own && answer != record.answer {
            return Err(format!(
                "decision {line}: {answer:?}, where {:?} is recorded; if that is as it should be, --write-vectors records it anew",
                record.answer
            ));
        }
        compared += u64::from(own);
    }
    Ok(format!("{asked} asked, {compared} answers as recorded"))
}

/// Which records are of the policy that is tried.
struct Own<'a> {
    description: &'a Description,
    settings: Vec<(String, String)>,
}

impl Own<'_> {
    fn has_decided(&self, record: &Record) -> bool {
        let PolicyOf { name, settings, .. } = &record.policy;
        let same_name = *name == self.description.name || name.is_empty();
        same_name && record.fallback.is_none() && effective(self.description, settings) == self.settings
    }
}

/// The settings in force where these are given, in the order of the description.
fn effective(description: &Description, given: &[(String, String)]) -> Vec<(String, String)> {
    let value = |name: &str| given.iter().rev().find(|(known, _)| known == name).map(|(_, value)| value);
    let setting = |s: &kvasir_policy::Setting| (s.name.clone(), value(&s.name).unwrap_or(&s.default).clone());
    description.settings.iter().map(setting).collect()
}

/// Records what the policy answers in the worlds that it was tried in.
///
/// # Errors
/// It fails, or the file cannot be written.
pub(super) fn write(policy: &Policy<'_>, found: &Inspection, to: &Path) -> Result<String, String> {
    let of = PolicyOf {
        name: found.description.name.clone(),
        version: found.description.version.clone(),
        digest: Some(found.digest.to_string()),
        settings: policy.trial.settings.clone(),
    };
    let records = match found.slot {
        SlotKind::Scheduler => trials::records::<scheduler::Cluster>(policy, &of),
        SlotKind::Evictor => trials::records::<evictor::Pool>(policy, &of),
        SlotKind::Admitter => trials::records::<admitter::Door>(policy, &of),
        SlotKind::Balancer => trials::records::<balancer::Load>(policy, &of),
    }?;
    let (mut text, mut written) = (Vec::new(), 0);
    for record in &records {
        let start = text.len();
        let fits = record.write(&mut text).is_ok() && text.len() - start <= RECORD_BYTES_MAX;
        if !fits {
            text.truncate(start);
        }
        written += usize::from(fits);
    }
    let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(to, &text))
        .map_err(|error| format!("cannot write it: {error}"))?;
    let left_out = records.len() - written;
    Ok(format!("{written} decisions recorded, {left_out} with large tables left out"))
}
