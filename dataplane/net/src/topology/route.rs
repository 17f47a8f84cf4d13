//! Which pairs of NICs to use between two machines, from the matrices of both.
//!
//! Planning caches the answer per (peer, from, to) until a matrix changes, and spreads slices over the routes of the
//! lowest cost by their load; a slice that fails goes to the next route.

use super::matrix::{Matrix, Rails};
use kvasir_memory::region::Location;

/// One pair of NICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route<'a> {
    pub local: &'a str,
    pub remote: &'a str,
    /// How many of the two ends use a NIC that is not preferred there: 0 to 2.
    pub cost: u8,
}

/// All routes from memory at `from` on this machine to memory at `to` on the peer, best first.
///
/// Within one cost those on one rail come first: clusters wire the NICs of one name, or one position, to the same
/// switch, so that such a pair meets no second switch. What follows are pairs one position apart, then two, so that
/// between machines of one kind the first *n* routes of a cost use *n* different NICs on both sides.
///
/// A location that a machine does not list, such as a GPU that its probe cannot see, may use all its NICs. The answer
/// is empty only if one side has none.
pub fn routes<'a>(local: &'a Matrix, from: Location, remote: &'a Matrix, to: Location) -> Vec<Route<'a>> {
    let (mine, theirs) = (local.nics(), remote.nics());
    let rails = mine.len().max(theirs.len());
    let mut found = Vec::with_capacity(mine.len() * theirs.len());
    for (local_rail, local_cost, local) in candidates(local, from, &mine) {
        for (remote_rail, remote_cost, remote) in candidates(remote, to, &theirs) {
            let apart = if local == remote { 0 } else { 1 + (remote_rail + rails - local_rail) % rails };
            let cost = local_cost + remote_cost;
            found.push(((cost, apart, local_rail), Route { local, remote, cost }));
        }
    }
    found.sort_by_key(|(key, _)| *key);
    found.into_iter().map(|(_, route)| route).collect()
}

/// Position, cost and name of each NIC that `location` may use. `nics` are those of the machine.
fn candidates<'a>(
    matrix: &'a Matrix,
    location: Location,
    nics: &[&'a str],
) -> impl Iterator<Item = (usize, u8, &'a str)> {
    nics.iter()
        .enumerate()
        .filter_map(move |(rail, &name)| Some((rail, nic_cost(matrix, location, name)?, name)))
}

/// What it costs memory at `location` to use this NIC: nothing if it is preferred there or the machine does not list
/// the location, 1 if it is secondary. `None` means that it must not be used.
pub fn nic_cost(matrix: &Matrix, location: Location, nic: &str) -> Option<u8> {
    let listed = |list: &[String]| list.iter().any(|name| name == nic);
    match matrix.rails(location) {
        None => Some(0),
        Some(Rails { preferred, .. }) if listed(preferred) => Some(0),
        Some(Rails { secondary, .. }) if listed(secondary) => Some(1),
        Some(_) => None,
    }
}
