//! Recorded decisions that a policy is asked again.

use super::{Row, Trial};
use crate::policy::record::{Player, Records};
use crate::policy::{Engine, Error, SlotKind, Source};
use kvasir_policy::Description;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

/// A line for each recording. What was recorded of another policy is asked, but its answers are not expected.
///
/// # Errors
/// The policy cannot be compiled.
pub(super) fn rows(
    engine: &Engine,
    trial: &Trial,
    source: Source,
    slot: SlotKind,
    description: &Description,
) -> Result<Vec<Row>, Error> {
    if trial.vectors.is_empty() {
        return Ok(vec![Row::skipped("vectors", "recorded decisions", "there are none")]);
    }
    let player = Player::new(engine, &trial.config, slot, source, trial.settings.clone())?;
    let row = |path: &std::path::PathBuf| {
        Row::new("vectors", path.display().to_string(), played(&player, path, &description.name))
    };
    Ok(trial.vectors.iter().map(row).collect())
}

fn played(player: &Player, path: &Path, name: &str) -> Result<String, String> {
    let file = File::open(path).map_err(|error| format!("cannot read it: {error}"))?;
    let (mut asked, mut compared) = (0, 0);
    for (line, record) in (1..).zip(Records::new(BufReader::new(file))) {
        let record = record.map_err(|error| error.to_string())?;
        let answer = player.play(&record, false).map_err(|error| format!("decision {line}: {error}"))?.answer;
        asked += 1;
        let own = record.fallback.is_none() && (record.policy.name == name || record.policy.name.is_empty());
        if own && answer != record.answer {
            return Err(format!("decision {line}: {answer:?}, where {:?} is recorded", record.answer));
        }
        compared += u64::from(own);
    }
    Ok(format!("{asked} asked, {compared} answers as recorded"))
}
