//! Puts the layers of settings on top of each other, one value at a time, so that every error can name
//! the place it comes from.

use super::Config;
use crate::text::{printable, printable_lines};
use std::fmt;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layer {
    File(PathBuf),
    Variable(String),
    Flag(String),
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Variable(name) => write!(f, "environment variable {name}"),
            Self::Flag(text) => write!(f, "--set {text}"),
        }
    }
}

/// Settings that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the configuration {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is not valid TOML: {reason}", path.display())]
    Syntax { path: PathBuf, reason: String },
    #[error("{layer}: unknown key `{key}`; {hint}")]
    UnknownKey { layer: Layer, key: String, hint: String },
    #[error("{layer}: `{key}` cannot be {value}: {why}")]
    Value { layer: Layer, key: String, value: String, why: String },
    #[error("{layer}: write it as section.key=value")]
    NotAnAssignment { layer: Layer },
    #[error(transparent)]
    Setting(#[from] kvasir_dataplane::config::ConfigError),
}

const PREFIX: &str = "KVASIR__";

pub(super) struct Layers {
    /// The settings so far, as a table with every key present.
    table: Table,
    config: Config,
}

impl Default for Layers {
    fn default() -> Self {
        let config = Config::default();
        let table = Table::try_from(&config).expect("settings are plain tables, text and numbers");
        Self { table, config }
    }
}

impl Layers {
    pub(super) fn file(&mut self, path: &Path) -> Result<(), Error> {
        let text =
            std::fs::read_to_string(path).map_err(|source| Error::Read { path: path.into(), source })?;
        self.text(path, &text)
    }

    /// What the file in `path` has in it.
    pub(super) fn text(&mut self, path: &Path, text: &str) -> Result<(), Error> {
        let wrong =
            |e: toml::de::Error| Error::Syntax { path: path.into(), reason: printable_lines(&e.to_string()) };
        let table: Table = text.parse().map_err(wrong)?;
        let mut leaves = Vec::new();
        flatten(&table, &mut Vec::new(), &mut leaves);
        let layer = Layer::File(path.into());
        leaves.into_iter().try_for_each(|(key, value)| self.put(&layer, &key, value))
    }

    pub(super) fn environment(
        &mut self,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<(), Error> {
        for (name, text) in variables {
            let Some(path) = name.strip_prefix(PREFIX) else { continue };
            let key: Vec<_> = path.split("__").map(str::to_ascii_lowercase).collect();
            self.put_text(&Layer::Variable(name.clone()), &key, &text)?;
        }
        Ok(())
    }

    pub(super) fn set(&mut self, assignments: &[String]) -> Result<(), Error> {
        for text in assignments {
            let layer = Layer::Flag(text.clone());
            let Some((path, value)) = text.split_once('=') else {
                return Err(Error::NotAnAssignment { layer });
            };
            let key: Vec<_> = path.split('.').map(|part| part.trim().to_owned()).collect();
            self.put_text(&layer, &key, value.trim())?;
        }
        Ok(())
    }

    pub(super) fn finish(self) -> Config {
        self.config
    }

    /// A value written as text takes the type of the key's value.
    fn put_text(&mut self, layer: &Layer, key: &[String], text: &str) -> Result<(), Error> {
        let plain = Value::String(text.to_owned());
        let value = match self.place(layer, key)? {
            Some(Value::Integer(_)) => text.parse().map(Value::Integer).unwrap_or(plain),
            Some(Value::Float(_)) => text.parse().map(Value::Float).unwrap_or(plain),
            Some(Value::Boolean(_)) => text.parse().map(Value::Boolean).unwrap_or(plain),
            // A list is written as in a file, even if the key could take text.
            Some(Value::Array(_) | Value::String(_)) if text.starts_with('[') => format!("list = {text}")
                .parse::<Table>()
                .ok()
                .and_then(|mut table| table.remove("list"))
                .unwrap_or(plain),
            _ => plain,
        };
        self.put(layer, key, value)
    }

    fn put(&mut self, layer: &Layer, key: &[String], value: Value) -> Result<(), Error> {
        let value = match (self.place(layer, key)?, value) {
            (Some(Value::Table(_)), Value::Table(_)) => return Ok(()), // `flatten` left it whole: it is empty
            (Some(Value::Table(_)), value) => {
                let why = "it is a section; set the keys in it".to_owned();
                let (layer, key) = (layer.clone(), shown_key(key));
                return Err(Error::Value { layer, key, value: shown(&value), why });
            }
            (Some(Value::Float(_)), Value::Integer(whole)) => Value::Float(whole as f64),
            // Settings of policies are text to the host; a file may write numbers and booleans plainly.
            (None, value @ (Value::Integer(_) | Value::Float(_) | Value::Boolean(_))) => {
                Value::String(value.to_string())
            }
            (_, value) => value,
        };
        let shown = shown(&value);
        let (last, sections) = key.split_last().expect("`place` refuses an empty key");
        let mut table = &mut self.table;
        for section in sections {
            let inner = table.get_mut(section).and_then(Value::as_table_mut);
            table = inner.expect("`place` has walked there");
        }
        table.insert(last.clone(), value);
        self.config = self.table.clone().try_into().map_err(|e: toml::de::Error| Error::Value {
            layer: layer.clone(),
            key: shown_key(key),
            value: shown,
            why: printable(e.message(), SHOWN_BYTES),
        })?;
        Ok(())
    }

    /// The present value of `key`; `None` in sections whose keys are not known beforehand.
    fn place(&self, layer: &Layer, key: &[String]) -> Result<Option<&Value>, Error> {
        let mut table = &self.table;
        for (depth, part) in key.iter().enumerate() {
            let last = depth + 1 == key.len();
            if free_form(&key[..depth]) && last {
                return Ok(None);
            }
            match table.get(part) {
                Some(value) if last => return Ok(Some(value)),
                Some(Value::Table(inner)) => table = inner,
                _ => return Err(self.unknown(layer, key, depth, table)),
            }
        }
        unreachable!("a key has at least one part, and the last one returns")
    }

    fn unknown(&self, layer: &Layer, key: &[String], depth: usize, table: &Table) -> Error {
        let section = shown_key(&key[..depth]);
        let place = if section.is_empty() { "sections".to_owned() } else { format!("keys of `{section}`") };
        let known: Vec<_> = table.keys().map(String::as_str).collect();
        let hint =
            format!("{}{place}: {}", did_you_mean(&key[depth], known.iter().copied()), known.join(", "));
        Error::UnknownKey { layer: layer.clone(), key: shown_key(key), hint }
    }
}

/// The most of a key or a value that goes into an error.
const SHOWN_BYTES: usize = 512;

fn shown_key(key: &[String]) -> String {
    printable(&key.join("."), SHOWN_BYTES)
}

fn shown(value: &Value) -> String {
    printable(&value.to_string(), SHOWN_BYTES)
}

/// A policy's own settings, which the host does not know, and the places of memory of this machine.
fn free_form(section: &[String]) -> bool {
    match section {
        [policy, _, settings] => policy == "policy" && settings == "settings",
        [topology, locations] => topology == "topology" && locations == "locations",
        _ => false,
    }
}

/// "did you mean `x`? ", or nothing when no known name is close.
pub(crate) fn did_you_mean<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> String {
    // Names are short. The distance to a long text takes long to compute, and no name is near it.
    if name.len() > 64 {
        return String::new();
    }
    let distance = |known: &str| strsim::damerau_levenshtein(known, name);
    let nearest =
        known.min_by_key(|known| distance(known)).filter(|near| distance(near) <= 1 + near.len() / 3);
    nearest.map_or(String::new(), |near| format!("did you mean `{near}`? "))
}

/// Every value of a table with its path; an empty section is listed itself.
fn flatten(table: &Table, at: &mut Vec<String>, leaves: &mut Vec<(Vec<String>, Value)>) {
    for (key, value) in table {
        at.push(key.clone());
        match value {
            Value::Table(inner) if !inner.is_empty() => flatten(inner, at, leaves),
            _ => leaves.push((at.clone(), value.clone())),
        }
        at.pop();
    }
}
