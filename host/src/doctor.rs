//! `kvasir doctor`: what on this machine keeps a host from running well, and what to do about it.
//!
//! [`facts`] looks, [`examine`] judges; so the judgement can be tested on machines that are not there.

mod checks;
pub mod facts;

use crate::config::Config;
use facts::Facts;
use serde::Serialize;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Ok,
    /// Not there, and not needed by these settings.
    Note,
    /// A host runs, but slower or shorter than it could.
    Warning,
    /// A host does not start, or does not do what its settings say.
    Broken,
}

impl Level {
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Broken => "broken",
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What it is about, such as `limits` or `rdma`.
    pub area: &'static str,
    pub level: Level,
    pub found: String,
    /// What to do; empty where there is nothing to do.
    pub advice: String,
}

/// Judges `facts` by what `config` needs. The order is that of the areas, not of their weight.
pub fn examine(config: &Config, facts: &Facts) -> Vec<Finding> {
    let checks = [
        checks::versions,
        checks::host,
        checks::limits,
        checks::memory,
        checks::ports,
        checks::data_dir,
        checks::sockets,
        checks::clock,
        checks::kernel,
        checks::rdma,
        checks::cuda,
    ];
    checks.iter().flat_map(|check| check(config, facts)).collect()
}

/// A finding about `config` itself, where it cannot be used.
pub fn bad_settings(error: &crate::config::Error) -> Finding {
    Finding {
        area: "settings",
        level: Level::Broken,
        found: error.to_string(),
        advice: "correct it; the other findings are for the default settings".to_owned(),
    }
}

#[cfg(test)]
mod tests;
