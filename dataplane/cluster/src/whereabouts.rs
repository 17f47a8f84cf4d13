//! Where this host is among NICs and memory, as it was last read. Peers are told, and told again when it changes.

use parking_lot::{Mutex, RwLock};
use std::sync::Arc;

use super::rails::{self, Rail};
use super::{Event, Shared};
use kvasir_net::topology::matrix::Matrix;
use kvasir_net::topology::model::Machine;
use kvasir_net::topology::{Change, Topology};

/// See the [module](self).
pub(super) struct Whereabouts {
    topology: Mutex<Option<Topology>>,
    now: RwLock<Arc<Found>>,
}

/// One reading.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Found {
    pub(super) matrix: Matrix,
    /// The matrix; empty if the machine was not read.
    pub(super) json: String,
    /// The NIC behind each rail.
    pub(super) nics: Vec<String>,
    /// Which machine it is, see [`rails::machine`].
    pub(super) machine: String,
    pub(super) revision: u32,
}

impl Whereabouts {
    pub(super) fn new(topology: Option<Topology>, rails: &[Rail]) -> Self {
        let found = look(topology.as_ref(), rails, 0);
        Self { topology: Mutex::new(topology), now: RwLock::new(Arc::new(found)) }
    }

    pub(super) fn now(&self) -> Arc<Found> {
        Arc::clone(&self.now.read())
    }

    /// Looks again. Returns what is different in the machine, if it matters here. A machine that cannot be read just now
    /// counts as unchanged.
    fn refresh(&self, rails: &[Rail]) -> Vec<Change> {
        let mut topology = self.topology.lock();
        let Some(changes) = topology.as_mut().and_then(|topology| topology.refresh().ok()) else {
            return Vec::new();
        };
        let before = self.now();
        // Addresses may move from one NIC to another while these stay.
        let found = look(topology.as_ref(), rails, before.revision);
        if found == *before {
            return Vec::new();
        }
        let found = Found { revision: before.revision.wrapping_add(1), ..found };
        *self.now.write() = Arc::new(found);
        changes
    }
}

fn look(topology: Option<&Topology>, rails: &[Rail], revision: u32) -> Found {
    let unknown = Machine::default();
    let machine = topology.map_or(&unknown, Topology::machine);
    Found {
        matrix: topology.map(|topology| topology.matrix().clone()).unwrap_or_default(),
        json: topology.map(|topology| topology.matrix().to_json()).unwrap_or_default(),
        nics: rails.iter().map(|rail| rail.nic(machine)).collect(),
        machine: rails::machine(),
        revision,
    }
}

impl Shared {
    /// Reads the machine from time to time, until the host stops.
    pub(super) fn follow_machine(&self) {
        while !self.is_stopping() {
            self.pause(self.config.topology_every);
            let before = self.ways.whereabouts.now().revision;
            let changes = self.ways.whereabouts.refresh(&self.ways.rails);
            if self.ways.whereabouts.now().revision == before {
                continue;
            }
            let what: Vec<String> = changes.iter().map(ToString::to_string).collect();
            let what = if what.is_empty() { "an address has moved".to_owned() } else { what.join(", ") };
            self.tell(Event::Topology { what });
            self.links.iter().for_each(|link| link.pair());
        }
    }
}
