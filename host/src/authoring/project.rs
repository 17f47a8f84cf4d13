//! A policy's folder, and what its manifest says.

use super::{Error, Language, MissingTool, Trial};
use crate::policy::{PolicyConfig, SlotKind, description};
use crate::text::{printable, printable_lines};
use kvasir_dataplane::units::{Size, Span};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Name of the manifest in a project's folder.
pub const MANIFEST: &str = "kvasir-policy.toml";

/// The least memory of an instance: a page, as a host has it.
pub const MEMORY_MIN: Size = Size(1 << 16);
/// How often a host looks at a running call: a shorter deadline would not be kept.
pub const DEADLINE_MIN: Duration = Duration::from_millis(1);

/// Endings of sources in all languages.
const SOURCES: [&str; 10] = ["rs", "c", "h", "cpp", "hpp", "go", "zig", "js", "ts", "py"];
/// Folders that hold no sources of a policy.
const NOT_SOURCES: [&str; 5] = ["sdk", "target", "node_modules", "__pycache__", "vectors"];

/// A policy with its sources.
#[derive(Debug)]
pub struct Project {
    /// Its folder.
    pub dir: PathBuf,
    pub name: String,
    pub version: String,
    pub language: &'static Language,
    pub slot: SlotKind,
    /// The folder `sdk`.
    pub(super) sdk: PathBuf,
    /// Memory that one instance may take, and CPU time that a call may take, where a host's defaults are too little.
    memory: Option<Size>,
    deadline: Option<Span>,
    /// Values that it is tried with.
    pub settings: Vec<(String, String)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    name: String,
    version: String,
    language: String,
    slot: String,
    #[serde(default = "vendored")]
    sdk: PathBuf,
    memory: Option<Size>,
    deadline: Option<Span>,
    #[serde(default)]
    settings: BTreeMap<String, toml::Value>,
}

fn vendored() -> PathBuf {
    "sdk".into()
}

impl Project {
    /// Reads the manifest in `dir`.
    ///
    /// # Errors
    /// There is none, or it is not as it should be.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let path = dir.join(MANIFEST);
        let text = std::fs::read_to_string(&path)
            .map_err(|source| Error::NoManifest { path: path.clone(), source })?;
        Self::parse(dir, &text)
    }

    /// As [`Project::open`], of what the manifest in `dir` has in it.
    ///
    /// # Errors
    /// It is not as it should be.
    pub fn parse(dir: &Path, text: &str) -> Result<Self, Error> {
        let bad = |reason: String| Error::Manifest { path: dir.join(MANIFEST), reason };
        let manifest: Manifest = toml::from_str(text).map_err(|e| bad(printable_lines(&e.to_string())))?;
        let Manifest { name, version, language, slot, sdk, memory, deadline, settings } = manifest;
        if !description::is_name(&name) {
            let name = printable(&name, 64);
            return Err(bad(format!("`name` is `{name}`; a host takes 1 to 64 of a-z 0-9 -")));
        }
        if !description::is_version(&version) {
            let version = printable(&version, 64);
            return Err(bad(format!("`version` is `{version}`; a host takes such as 1.2.3 or 1.2.3-rc.1")));
        }
        let too_little = |key: &str, least: String| bad(format!("`{key}` must be {least} or more"));
        if memory.is_some_and(|memory| memory < MEMORY_MIN) {
            return Err(too_little("memory", MEMORY_MIN.to_string()));
        }
        if deadline.is_some_and(|deadline| deadline.0 < DEADLINE_MIN) {
            return Err(too_little("deadline", format!("{DEADLINE_MIN:?}")));
        }
        Ok(Self {
            language: Language::find(&language).map_err(|e| bad(e.to_string()))?,
            slot: slot.parse().map_err(|e: crate::policy::UnknownSlot| bad(e.to_string()))?,
            sdk: dir.join(sdk),
            settings: settings.into_iter().map(|(name, value)| (name, plain(value))).collect(),
            dir: dir.to_owned(),
            name,
            version,
            memory,
            deadline,
        })
    }

    /// Where `build` puts the component unless it is told otherwise.
    pub fn component(&self) -> PathBuf {
        self.dir.join(format!("{}.wasm", self.name))
    }

    /// A source that was changed after the component was made, as far as file times tell.
    pub fn source_changed(&self) -> Option<PathBuf> {
        let built = modified(&self.component())?;
        newer_source(&self.dir, built)
    }

    /// Where its answers are recorded unless it is said otherwise, in the worlds of that seed.
    pub fn vectors_of(&self, seed: u64) -> PathBuf {
        self.dir.join("vectors").join(format!("seed-{seed}.jsonl"))
    }

    /// The first tool that building it needs and that is not here.
    pub fn missing_tool(&self) -> Option<MissingTool> {
        self.language.missing_tool(&self.language.search_path(&self.sdk, &self.dir))
    }

    /// What it is tried with: the settings of its manifest, and its recordings.
    ///
    /// # Errors
    /// The folder of recordings cannot be read.
    pub fn trial(&self) -> Result<Trial, Error> {
        Ok(Trial {
            config: self.limits(),
            settings: self.settings.clone(),
            seed: 0,
            vectors: self.vectors()?,
            record_to: None,
            called: Some((self.slot, self.name.clone(), self.version.clone())),
        })
    }

    /// `vectors/*.jsonl`, sorted.
    fn vectors(&self) -> Result<Vec<PathBuf>, Error> {
        let folder = self.dir.join("vectors");
        let entries = match std::fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(Error::File { action: "look into", path: folder, source }),
        };
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        let mut files: Vec<_> =
            paths.filter(|path| path.extension().is_some_and(|end| end == "jsonl")).collect();
        files.sort();
        Ok(files)
    }

    /// The settings of a host for it: the defaults, but with the memory and the deadline that the manifest names.
    pub fn limits(&self) -> PolicyConfig {
        let defaults = PolicyConfig::unhurried();
        let memory_bytes = self.memory.map_or(defaults.memory_bytes, |size| size.0 as usize);
        let hot_deadline = self.deadline.map_or(defaults.hot_deadline, |span| span.0);
        PolicyConfig { memory_bytes, hot_deadline, ..defaults }
    }
}

fn modified(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

/// In `folder` or below, but for what others wrote: tools, the SDK and tests.
fn newer_source(folder: &Path, built: SystemTime) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.filter_map(Result::ok);
    entries.filter(|entry| !entry.file_name().to_string_lossy().starts_with('.')).find_map(|entry| {
        let (path, name) = (entry.path(), entry.file_name());
        let (stem, ending) = (path.file_stem()?.to_string_lossy(), path.extension().and_then(OsStr::to_str));
        if entry.file_type().ok()?.is_dir() {
            return if NOT_SOURCES.iter().any(|other| name == *other) {
                None
            } else {
                newer_source(&path, built)
            };
        }
        let is_source = ending.is_some_and(|ending| SOURCES.contains(&ending));
        let is_test = stem.starts_with("test") || stem.ends_with("test");
        (is_source && !is_test && modified(&path)? > built).then_some(path)
    })
}

/// A value as an operator would write it behind `--setting NAME=`.
fn plain(value: toml::Value) -> String {
    match value {
        toml::Value::String(text) => text,
        other => other.to_string(),
    }
}
