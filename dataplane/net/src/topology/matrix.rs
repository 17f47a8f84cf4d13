//! For each place of memory the NICs to use and the NICs to fall back on. Peers exchange it as JSON:
//!
//! ```json
//! {"cpu:0": [["mlx5_0"], ["mlx5_1"]], "cuda:0": [["mlx5_0"], ["mlx5_1"]]}
//! ```
//!
//! The shape is that of Mooncake's transfer engine, so that its topology files can be used as overrides.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::Error;
use super::model::{Link, Machine, Nic};
use kvasir_memory::region::Location;

/// The longest matrix that is read.
pub const JSON_BYTES_MAX: usize = 256 << 10;
const LOCATIONS_MAX: usize = 1024;
const NICS_MAX: usize = 256;
/// The kernel's bound on names of RDMA devices (`IB_DEVICE_NAME_MAX`); those of interfaces are shorter.
const NAME_BYTES_MAX: usize = 64;
/// A NIC with less than this share of the fastest one's rate is a management port, not a rail.
const SLOW: u64 = 4;

/// NICs for one place of memory, each list best first.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(into = "[Vec<String>; 2]", from = "[Vec<String>; 2]")]
pub struct Rails {
    /// Equally near, and nearer than all others: traffic is spread over them.
    pub preferred: Vec<String>,
    /// Used when all preferred ones have failed.
    pub secondary: Vec<String>,
}

impl From<Rails> for [Vec<String>; 2] {
    fn from(rails: Rails) -> Self {
        [rails.preferred, rails.secondary]
    }
}

impl From<[Vec<String>; 2]> for Rails {
    fn from([preferred, secondary]: [Vec<String>; 2]) -> Self {
        Self { preferred, secondary }
    }
}

impl Rails {
    /// Preferred, then secondary.
    pub fn all(&self) -> impl Iterator<Item = &String> {
        self.preferred.iter().chain(&self.secondary)
    }
}

/// What an operator knows better than the probe does.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Overrides {
    /// Use these NICs and no others. Default: all whose link is up.
    pub only: Vec<String>,
    /// Never use these, for instance storage or management networks. Default empty.
    pub exclude: Vec<String>,
    /// These locations get exactly these NICs. By default empty, which means what the probe finds.
    pub locations: BTreeMap<Location, Rails>,
}

impl Overrides {
    /// # Errors
    /// [`Error::UnknownNic`]: a name is not one of `machine`, so it is probably a typing error.
    pub fn check(&self, machine: &Machine) -> Result<(), Error> {
        let in_locations = self.locations.values().flat_map(Rails::all);
        match self
            .only
            .iter()
            .chain(&self.exclude)
            .chain(in_locations)
            .find(|name| machine.nic(name).is_none())
        {
            None => Ok(()),
            Some(name) => {
                let names: Vec<_> = machine.nics.iter().map(|nic| nic.name.as_str()).collect();
                let known = if names.is_empty() { "none".into() } else { names.join(", ") };
                Err(Error::UnknownNic { name: name.clone(), known })
            }
        }
    }

    fn allows(&self, machine: &Machine, nic: &Nic) -> bool {
        let names =
            |list: &[String]| list.iter().any(|name| machine.nic(name).is_some_and(|n| n.name == nic.name));
        nic.up && (self.only.is_empty() || names(&self.only)) && !names(&self.exclude)
    }

    /// `rails` with names of interfaces replaced by those of their NICs, and without NICs that cannot be used.
    fn usable(&self, machine: &Machine, rails: &Rails) -> Rails {
        let resolve = |names: &[String]| {
            let nics = names.iter().filter_map(|name| machine.nic(name));
            nics.filter(|nic| self.allows(machine, nic)).map(|nic| nic.name.clone()).collect()
        };
        Rails { preferred: resolve(&rails.preferred), secondary: resolve(&rails.secondary) }
    }
}

/// Location → NICs, of one machine.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Matrix(BTreeMap<Location, Rails>);

impl Matrix {
    /// The preferred NICs are the nearest ones that are not management ports; all others are secondary, nearest first.
    pub fn of(machine: &Machine, overrides: &Overrides) -> Self {
        let usable: Vec<&Nic> = machine.nics.iter().filter(|nic| overrides.allows(machine, nic)).collect();
        let rails = |location| match overrides.locations.get(&location) {
            Some(rails) => overrides.usable(machine, rails),
            None => nearest(machine, location, &usable),
        };
        let overridden = overrides.locations.keys().copied();
        let locations: BTreeSet<_> = machine.locations().chain(overridden).collect();
        Self(locations.into_iter().map(|location| (location, rails(location))).collect())
    }

    /// Reads the matrix of a peer or a file.
    ///
    /// # Errors
    /// It is not a matrix, or it is larger than that of any machine.
    pub fn from_json(json: &[u8]) -> Result<Self, Error> {
        if json.len() > JSON_BYTES_MAX {
            return Err(Error::MatrixTooLong { bytes: json.len(), max: JSON_BYTES_MAX });
        }
        let matrix: Self = serde_json::from_slice(json)?;
        bounded("locations", matrix.0.len(), LOCATIONS_MAX)?;
        for (&location, rails) in &matrix.0 {
            bounded("NICs for a location", rails.all().count(), NICS_MAX)?;
            let mut seen = BTreeSet::new();
            for name in rails.all() {
                let problem = match name.as_str() {
                    _ if !well_named(name) => "not a device name",
                    name if !seen.insert(name) => "there twice",
                    _ => continue,
                };
                let name = name.chars().take(NAME_BYTES_MAX).collect();
                return Err(Error::MatrixNic { location, name, problem });
            }
        }
        Ok(matrix)
    }

    /// The text that is sent to peers.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("a map of names to lists of names is JSON")
    }

    pub fn iter(&self) -> impl Iterator<Item = (Location, &Rails)> {
        self.0.iter().map(|(&location, rails)| (location, rails))
    }

    /// The NICs for memory at `location`, if the machine has such a place.
    pub fn rails(&self, location: Location) -> Option<&Rails> {
        self.0.get(&location)
    }

    /// What it costs memory at `location` to use this NIC: nothing if it is preferred there or the machine does not list
    /// the location, 1 if it is secondary. `None` means that it must not be used.
    pub fn nic_cost(&self, location: Location, nic: &str) -> Option<u8> {
        let listed = |list: &[String]| list.iter().any(|name| name == nic);
        match self.rails(location) {
            None => Some(0),
            Some(Rails { preferred, .. }) if listed(preferred) => Some(0),
            Some(Rails { secondary, .. }) if listed(secondary) => Some(1),
            Some(_) => None,
        }
    }
}

fn bounded(what: &'static str, found: usize, max: usize) -> Result<(), Error> {
    if found > max { Err(Error::MatrixTooMany { what, found, max }) } else { Ok(()) }
}

fn well_named(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic())
}

fn nearest(machine: &Machine, location: Location, usable: &[&Nic]) -> Rails {
    let fastest = usable.iter().filter_map(|nic| nic.rate_mbps).max().unwrap_or(0);
    let rank = |nic: &Nic| -> (bool, Link) {
        let slow = nic.rate_mbps.is_some_and(|rate| rate.saturating_mul(SLOW) < fastest);
        (slow, machine.link(location, nic))
    };
    let mut ranked: Vec<_> = usable.iter().map(|nic| (rank(nic), nic.name.clone())).collect();
    ranked.sort_by_key(|(rank, _)| *rank); // stable: equals stay in order of name
    let first = ranked.first().map(|(rank, _)| *rank);
    let (preferred, secondary): (Vec<_>, Vec<_>) =
        ranked.into_iter().partition(|(rank, _)| Some(*rank) == first);
    let names = |list: Vec<(_, String)>| list.into_iter().map(|(_, name)| name).collect();
    Rails { preferred: names(preferred), secondary: names(secondary) }
}
