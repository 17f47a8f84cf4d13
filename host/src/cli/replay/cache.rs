//! Mode cache: block slots and evictors, without bytes.

use super::{EngineKind, ReplayArgs, unknown_name};
use crate::policy::{Engine, PolicyConfig, Source};
use crate::replay::caches::{Keeper, OPTIMUM, Room, Table};
use crate::replay::pool;
use crate::replay::recorded::Recorded;
use crate::replay::tally::Split;
use crate::replay::tiers::{self, Tier, TierName};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use indicatif::ProgressBar;
use kvasir_default_policies::EVICTORS;
use std::path::Path;

/// What mode cache alone takes.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct CacheFlags {
    /// Mode cache: size of the cache in blocks; may be given several times, or as a list with commas.
    #[arg(long = "capacity-blocks", value_name = "N", value_delimiter = ',')]
    pub capacities: Vec<u32>,
    /// Mode cache: tiers in place of one pool, fastest first (hbm, dram, nvme, remote), each with its blocks. What a tier
    /// evicts goes to the next.
    #[arg(long, value_name = "TIER=N,...", value_delimiter = ',', value_parser = tier, conflicts_with = "capacities")]
    pub tiers: Vec<Tier>,
    /// Mode cache: requests at the beginning of the trace, as a number, a share (0.2) or per cent (20%), whose hits are
    /// told apart and not counted.
    #[arg(long, value_name = "COUNT|SHARE", value_parser = warm_up)]
    pub warm_up: Option<WarmUp>,
    /// Mode cache: tell the hits of each class or tenant too; may be given several times.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub by: Vec<By>,
    /// Mode cache: print comma-separated values, a line for each evictor, capacity and part of the trace.
    #[arg(long, conflicts_with = "json")]
    pub csv: bool,
}

/// What hits are told apart by.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// Class of the request: the one that the trace names, or turn and length (1 to 16).
    Class,
    /// Tenant that the trace names, or 0.
    Tenant,
}

/// How much of a trace warms a cache up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WarmUp {
    Requests(usize),
    /// Above 0 and below 1.
    Share(f64),
}

fn tier(text: &str) -> Result<Tier> {
    let parsed = text.split_once('=').and_then(|(name, blocks)| {
        Some(Tier { name: TierName::from_str(name, false).ok()?, capacity_blocks: blocks.parse().ok()? })
    });
    parsed.with_context(|| {
        format!("`{text}` is no tier with its blocks, such as dram=10000; tiers: hbm, dram, nvme, remote")
    })
}

fn warm_up(text: &str) -> Result<WarmUp> {
    let parsed = match text.strip_suffix('%') {
        Some(percent) => percent.parse().ok().map(|percent: f64| WarmUp::Share(percent / 100.0)),
        None if text.contains('.') => text.parse().ok().map(WarmUp::Share),
        None => text.parse().ok().map(WarmUp::Requests),
    };
    parsed
        .filter(|warm_up| !matches!(warm_up, WarmUp::Share(share) if !(*share > 0.0 && *share < 1.0)))
        .with_context(|| {
            format!("`{text}` is no number of requests, and no share between 0 and 1 such as 0.2 or 20%")
        })
}

impl CacheFlags {
    /// Whether any of them was given.
    pub(super) fn any(&self) -> bool {
        let Self { capacities, tiers, warm_up, by, csv } = self;
        *csv || warm_up.is_some() || !capacities.is_empty() || !tiers.is_empty() || !by.is_empty()
    }

    pub(super) const NAMES: &str = "--capacity-blocks, --tiers, --warm-up, --by, --csv";

    /// What to replay the trace in, and the most blocks of one pool.
    fn rooms(&self) -> Result<(Vec<Room>, u32)> {
        if !self.tiers.is_empty() {
            tiers::check(&self.tiers)?;
            let largest = self.tiers.iter().map(|tier| tier.capacity_blocks).max();
            return Ok((vec![Room::Tiers(self.tiers.clone())], largest.unwrap_or(0)));
        }
        let Some(&largest) = self.capacities.iter().max() else {
            bail!("mode cache: give --capacity-blocks N, or --tiers")
        };
        self.capacities.iter().try_for_each(|&blocks| pool::check_capacity(blocks))?;
        Ok((self.capacities.iter().copied().map(Room::Blocks).collect(), largest))
    }

    /// `requests`: of the trace.
    fn split(&self, requests: usize) -> Result<Split> {
        let warm_up = match self.warm_up {
            None => 0,
            Some(WarmUp::Requests(count)) => count,
            Some(WarmUp::Share(share)) => (requests as f64 * share).round() as usize,
        };
        if warm_up >= requests && requests > 0 {
            bail!("a warm-up of {warm_up} requests leaves none of {requests} to count; give --warm-up less");
        }
        let (by_class, by_tenant) = (self.by.contains(&By::Class), self.by.contains(&By::Tenant));
        Ok(Split { warm_up, by_class, by_tenant })
    }
}

impl ReplayArgs {
    pub(super) fn cache(&self) -> Result<Table> {
        self.no_cluster("cache")?;
        if self.host.is_some() || self.cluster.speed.is_some() || self.trace_time {
            bail!(
                "mode cache needs no host and no time; leave out --host, --speed, --trace-time, or give --mode store"
            );
        }
        let (rooms, largest) = self.cache.rooms()?;
        let keepers = self.keepers(largest)?;
        let (trace, progress) = self.open()?;
        let trace = Recorded::read(trace, self.layout.block_size_tokens())?;
        progress.finish_and_clear();
        self.check_requests(trace.len() as u64)?;
        let split = self.cache.split(trace.len())?;
        let name = self.trace.display().to_string();
        let progress = replays_bar(Table::replays(&keepers, &rooms));
        let table = Table::fill((&name, &trace), &keepers, &rooms, split, || progress.inc(1))?;
        progress.finish_and_clear();
        Ok(table)
    }

    /// One evictor in one cache is told as ever; more of them as rows.
    pub(super) fn print_table(&self, table: &Table) -> Result<()> {
        match table.rows.as_slice() {
            _ if self.cache.csv => print!("{}", table.csv()),
            [report] if self.json => println!("{}", serde_json::to_string(report)?),
            _ if self.json => println!("{}", serde_json::to_string(table)?),
            [report] => print!("{}", report.text()),
            _ => print!("{}", table.text()),
        }
        Ok(())
    }

    /// `slots`: the most that one is asked to hold.
    fn keepers(&self, slots: u32) -> Result<Vec<Keeper>> {
        let config = PolicyConfig { evictor_slots: slots, ..PolicyConfig::unhurried() };
        let engine = Engine::new(&config, None)?;
        let names = self.evictor_names();
        let settings = settings_of(&names, &self.evictor_settings)?;
        let keeper = |(name, settings): (&&str, Vec<_>)| match *name {
            OPTIMUM if settings.is_empty() => Ok(Keeper::optimum()),
            OPTIMUM => bail!("the {OPTIMUM} has no settings; leave out --evictor-setting"),
            name => Ok(Keeper::evictor(&engine, &config, self.source(name)?, settings)?),
        };
        names.iter().zip(settings).map(keeper).collect()
    }

    fn evictor_names(&self) -> Vec<&str> {
        match self.evictors.as_slice() {
            [] => vec!["workload-aware"],
            named => named.iter().map(String::as_str).collect(),
        }
    }

    fn source(&self, name: &str) -> Result<Source> {
        let native = self.engine == EngineKind::Native;
        if Path::new(name).extension().is_some_and(|extension| extension == "wasm") {
            if native {
                bail!("{name} is a component and has no native twin; leave out --engine native");
            }
            return Ok(Source::File(name.into()));
        }
        let known = || EVICTORS.iter().map(|policy| policy.name);
        if !known().any(|known| known == name) {
            bail!(unknown_name("evictor", name, known().chain([OPTIMUM])));
        }
        Ok(if native { Source::Native(name.to_owned()) } else { Source::Builtin(name.to_owned()) })
    }
}

/// A setting as flags give it: name and value.
type Setting = (String, String);

/// The settings of each evictor: `NAME=VALUE` where there is only one, `EVICTOR:NAME=VALUE` among several.
fn settings_of(evictors: &[&str], given: &[Setting]) -> Result<Vec<Vec<Setting>>> {
    let mut settings = vec![Vec::new(); evictors.len()];
    for (name, value) in given {
        let (of, setting) = match (name.rsplit_once(':'), evictors) {
            (Some(named), _) => named,
            (None, [only]) => (*only, name.as_str()),
            (None, _) => bail!(
                "several evictors, and no word whose setting `{name}` is; give --evictor-setting EVICTOR:{name}={value}"
            ),
        };
        if !evictors.contains(&of) {
            bail!(
                "--evictor-setting {name}={value}: `{of}` is not among the evictors {}",
                evictors.join(", ")
            );
        }
        let its_own = evictors.iter().zip(&mut settings).filter(|(evictor, _)| **evictor == of);
        its_own.for_each(|(_, settings)| settings.push((setting.to_owned(), value.clone())));
    }
    Ok(settings)
}

/// Shown on a terminal, where there is more than one to wait for.
fn replays_bar(replays: usize) -> ProgressBar {
    use indicatif::ProgressStyle;
    use std::io::IsTerminal;
    if replays < 2 || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {pos} of {len} replays, {elapsed} ({eta} left)");
    ProgressBar::new(replays as u64).with_style(style.expect("the template is constant"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warm_up_is_a_number_a_share_or_per_cent() {
        for (text, expected) in [
            ("0", WarmUp::Requests(0)),
            ("20", WarmUp::Requests(20)),
            ("0.2", WarmUp::Share(0.2)),
            ("20%", WarmUp::Share(0.2)),
        ] {
            assert_eq!(warm_up(text).unwrap(), expected);
        }
        for bad in ["", "-1", "1.0", "0.0", "0%", "100%", "NaN%", "x"] {
            assert!(warm_up(bad).unwrap_err().to_string().contains("no share between 0 and 1"), "{bad}");
        }
        let split =
            |warm_up, requests| CacheFlags { warm_up: Some(warm_up), ..Default::default() }.split(requests);
        assert_eq!(split(WarmUp::Share(0.25), 10).unwrap().warm_up, 3);
        for (warm_up, requests) in [(WarmUp::Requests(10), 10), (WarmUp::Share(0.99), 10)] {
            let error = split(warm_up, requests).unwrap_err().to_string();
            assert!(error.contains("a warm-up of 10 requests leaves none of 10"), "{error}");
        }
    }

    #[test]
    fn settings_say_whose_they_are() {
        let settings = |evictors: &[&str], given: &[(&str, &str)]| {
            let given: Vec<_> =
                given.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
            settings_of(evictors, &given)
        };
        let one = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
        assert_eq!(settings(&["lru"], &[("a", "1")]).unwrap(), [one("a", "1")]);
        assert_eq!(settings(&["lru"], &[("lru:a", "1")]).unwrap(), [one("a", "1")]);
        let two = settings(&["lru", "./b:c.wasm"], &[("./b:c.wasm:a", "1"), ("lru:b", "2")]).unwrap();
        assert_eq!(two, [one("b", "2"), one("a", "1")]);
        let rows = [
            ("a", "no word whose setting `a` is; give --evictor-setting EVICTOR:a=1"),
            ("arc:a", "`arc` is not among the evictors lru, fifo"),
        ];
        for (name, expected) in rows {
            let error = settings(&["lru", "fifo"], &[(name, "1")]).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
