//! The file of a chain:
//!
//! ```toml
//! [[filter]]
//! source = "tenants.wasm"   # beside this file; or the name of a default policy
//! [[scorer]]
//! source = "netkv"
//! weight = 2.0
//! settings = { decode-steps = "2" }
//! [picker]                  # `pick`, if it is left out
//! source = "pick"
//! ```

use super::Role;
use crate::policy::slot::{ChainPart, Source};
use crate::policy::{Error, description};
use crate::text::{printable, printable_lines};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Longest file of a chain.
const FILE_BYTES: u64 = 64 << 10;
/// Longest name or path of a part.
const SOURCE_BYTES: usize = 1 << 10;
/// Largest weight of a scorer.
const WEIGHT_MAX: f64 = 1e6;

#[derive(Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct ChainFile {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    filter: Vec<PartFile>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    scorer: Vec<PartFile>,
    picker: Option<PartFile>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct PartFile {
    source: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    weight: Option<f64>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    settings: BTreeMap<String, String>,
}

/// Whether that file is the file of a chain, rather than a component.
pub fn is_chain(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "toml")
}

/// What a chain's file names, its parts in their order; components as files beside it.
///
/// # Errors
/// The file cannot be read, or is not as the module documentation says.
pub fn read(path: &Path) -> Result<(String, Vec<ChainPart>), Error> {
    let failed = |source| Error::Read { path: path.into(), source };
    let bytes = std::fs::metadata(path).map_err(failed)?.len();
    if bytes > FILE_BYTES {
        let reason = format!("{bytes} bytes, where a chain has at most {FILE_BYTES}");
        return Err(Error::Chain { name: path.display().to_string(), reason });
    }
    parse(path, &std::fs::read_to_string(path).map_err(failed)?)
}

/// As [`read`], of what the file in `path` has in it.
///
/// # Errors
/// As [`read`].
pub fn parse(path: &Path, text: &str) -> Result<(String, Vec<ChainPart>), Error> {
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let refuse = |reason: String| Error::Chain { name: path.display().to_string(), reason };
    if !description::is_name(&name) {
        return Err(refuse("a chain is called as its file is; take a-z, 0-9 and - only".into()));
    }
    let file: ChainFile = toml::from_str(text).map_err(|e| refuse(printable_lines(&e.to_string())))?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let parts = file.parts().map_err(refuse)?;
    let part = |(role, part): (Role, PartFile)| ChainPart {
        role,
        source: if Source::is_path(&part.source) {
            Source::File(folder.join(part.source))
        } else {
            Source::Builtin(part.source)
        },
        settings: part.settings.into_iter().collect(),
    };
    Ok((name, parts.into_iter().map(part).collect()))
}

/// The file of a chain of these parts, which [`read`] understands; `called` gives what a part is called there.
pub fn text(parts: &[ChainPart], called: impl Fn(usize, &ChainPart) -> String) -> String {
    let mut file = ChainFile::default();
    for (place, part) in parts.iter().enumerate() {
        let (source, settings) = (called(place, part), part.settings.iter().cloned().collect());
        let told = |weight| PartFile { source, weight, settings };
        match part.role {
            Role::Filter => file.filter.push(told(None)),
            Role::Score { weight_permille } => {
                file.scorer.push(told(Some(f64::from(weight_permille) / 1e3)));
            }
            Role::Pick => file.picker = Some(told(None)),
        }
    }
    toml::to_string(&file).expect("names, numbers and texts can be written")
}

impl ChainFile {
    fn parts(self) -> Result<Vec<(Role, PartFile)>, String> {
        let Self { filter, scorer, picker } = self;
        let pick = || PartFile { source: "pick".into(), weight: None, settings: BTreeMap::new() };
        let picker = picker.unwrap_or_else(pick);
        let unfit = |part: &&PartFile| printable(&part.source, SOURCE_BYTES) != part.source;
        if let Some(part) = filter.iter().chain(&scorer).chain([&picker]).find(unfit) {
            let source = printable(&part.source, SOURCE_BYTES);
            return Err(format!(
                "`{source}` is no source; it is too long, or has characters that do not print"
            ));
        }
        if let Some(part) = filter.iter().chain([&picker]).find(|part| part.weight.is_some()) {
            return Err(format!("`{}` has a weight, which only scorers have", part.source));
        }
        let mut parts: Vec<_> = filter.into_iter().map(|part| (Role::Filter, part)).collect();
        for part in scorer {
            let weight = part.weight.unwrap_or(1.0);
            if !(0.0..=WEIGHT_MAX).contains(&weight) {
                return Err(format!("`{}` has the weight {weight}; take 0 to {WEIGHT_MAX}", part.source));
            }
            parts.push((Role::Score { weight_permille: (weight * 1e3).round() as u32 }, part));
        }
        parts.push((Role::Pick, picker));
        Ok(parts)
    }
}
