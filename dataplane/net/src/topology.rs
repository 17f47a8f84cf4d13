//! Which network devices are near which memory.
//!
//! [`probe`] reads a machine from sysfs into a [`model::Machine`]; [`matrix`] condenses it to *location → preferred
//! and secondary NICs*, the part that is sent to peers. The daemon holds a [`Topology`] and refreshes it when devices come
//! and go.

pub mod matrix;
pub mod model;
pub mod probe;

#[cfg(any(test, feature = "conformance"))]
pub mod fixture;
mod print;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::{Path, PathBuf};

use matrix::{Matrix, Overrides};
use model::{Machine, Nic};

use kvasir_memory::region::Location;

/// What can go wrong about topology.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path} while probing the machine: {source}", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} has no class and devices folders, so it is not a sysfs", path = path.display())]
    NotSysfs { path: PathBuf },
    #[error("no NIC is called {name:?} here, though the topology settings name it; there are: {known}")]
    UnknownNic { name: String, known: String },
    #[error("topology matrix of {bytes} B is longer than the {max} B that a peer may send")]
    MatrixTooLong { bytes: usize, max: usize },
    #[error("topology matrix cannot be read: {0}")]
    MatrixJson(#[from] serde_json::Error),
    #[error("topology matrix lists {found} {what}; the most is {max}")]
    MatrixTooMany { what: &'static str, found: usize, max: usize },
    #[error("topology matrix names NIC {name:?} for {location}, which is {problem}")]
    MatrixNic { location: Location, name: String, problem: &'static str },
}

/// The machine as it was when last read, and what follows for transfers.
#[derive(Clone, Debug)]
pub struct Topology {
    sysfs: PathBuf,
    overrides: Overrides,
    machine: Machine,
    matrix: Matrix,
}

impl Topology {
    /// Reads the machine below `sysfs`, which is `/sys` outside tests.
    ///
    /// # Errors
    /// `sysfs` cannot be read, or `overrides` name a NIC that is not there.
    pub fn probe(sysfs: &Path, overrides: Overrides) -> Result<Self, Error> {
        let machine = probe::probe(sysfs)?;
        overrides.check(&machine)?;
        let matrix = Matrix::of(&machine, &overrides);
        Ok(Self { sysfs: sysfs.to_owned(), overrides, machine, matrix })
    }

    /// Reads the machine again. If anything changed, the new matrix goes to peers and routes are chosen again.
    ///
    /// A NIC that the settings name may be gone by now; it is used again when it returns.
    ///
    /// # Errors
    /// The machine cannot be read; the previous result stays in use.
    pub fn refresh(&mut self) -> Result<Vec<Change>, Error> {
        let machine = probe::probe(&self.sysfs)?;
        let changes = changes(&self.machine, &machine);
        self.matrix = Matrix::of(&machine, &self.overrides);
        self.machine = machine;
        Ok(changes)
    }

    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    pub fn matrix(&self) -> &Matrix {
        &self.matrix
    }
}

/// One difference between two readings of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    NicAdded(String),
    NicRemoved(String),
    /// Its link came up, went down, or has another rate.
    NicLink {
        name: String,
        up: bool,
        rate_mbps: Option<u64>,
    },
    /// It is in another place of the machine, or has other network interfaces.
    NicMoved(String),
    /// GPUs or NUMA nodes differ. Their numbers shift when one goes, so all of them count as changed.
    Locations,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NicAdded(name) => write!(f, "NIC {name} added"),
            Self::NicRemoved(name) => write!(f, "NIC {name} removed"),
            Self::NicLink { name, up: false, rate_mbps: _ } => write!(f, "link of NIC {name} is down"),
            Self::NicLink { name, up: true, rate_mbps } => {
                write!(f, "link of NIC {name} is up at {}", print::rate(*rate_mbps))
            }
            Self::NicMoved(name) => write!(f, "NIC {name} has another place or other interfaces"),
            Self::Locations => write!(f, "GPUs or NUMA nodes changed"),
        }
    }
}

fn changes(old: &Machine, new: &Machine) -> Vec<Change> {
    let find = |machine: &'_ Machine, name: &str| machine.nics.iter().find(|nic| nic.name == name).cloned();
    let gone = old.nics.iter().filter(|nic| find(new, &nic.name).is_none());
    let mut changes: Vec<Change> = gone.map(|nic| Change::NicRemoved(nic.name.clone())).collect();
    for nic in &new.nics {
        match find(old, &nic.name) {
            None => changes.push(Change::NicAdded(nic.name.clone())),
            Some(before) => changes.extend(nic_change(&before, nic)),
        }
    }
    if (&old.numa, &old.gpus) != (&new.numa, &new.gpus) {
        changes.push(Change::Locations);
    }
    changes
}

fn nic_change(old: &Nic, new: &Nic) -> Option<Change> {
    if old == new {
        return None;
    }
    let name = new.name.clone();
    if (old.up, old.rate_mbps) != (new.up, new.rate_mbps) {
        return Some(Change::NicLink { name, up: new.up, rate_mbps: new.rate_mbps });
    }
    Some(Change::NicMoved(name))
}
