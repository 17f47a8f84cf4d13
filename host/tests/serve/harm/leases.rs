//! A client that uses the names of what others were lent.

use super::{Peace, Raw, key};
use crate::process::{Host, Transport};
use crate::replicas::metric;
use kvasir_dataplane::wire::{Outcome, Request};

#[test]
fn nobody_ends_the_leases_and_places_of_others() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start(dir.path());
    let peace = Peace::new(&host);
    let mut victim = Raw::connect(host.addr("socket"), false);
    let lease = victim.lease(7).unwrap();
    let (reservation, _) = victim.reserve(2_000).unwrap();
    let held = metric(&host, "kvasir_leases", "");

    let mut thief = Raw::connect(host.addr("socket"), false);
    let guesses = |id: u64| (id.wrapping_sub(256)..id.wrapping_add(256)).collect::<Vec<u64>>();
    let gone = thief.outcomes(&Request::Release(guesses(lease)));
    assert!(gone.iter().all(|&outcome| outcome == Outcome::LeaseGone), "{gone:?}");
    let none = |outcomes: Vec<Outcome>| {
        let refused = |outcome: &Outcome| !matches!(outcome, Outcome::Done | Outcome::AlreadyStored);
        assert!(outcomes.iter().all(refused), "{outcomes:?}");
    };
    none(thief.outcomes(&Request::Abort(guesses(reservation))));
    none(thief.outcomes(&Request::Commit(guesses(reservation).into_iter().map(|id| (id, 0)).collect())));
    // Along with a read, where outcomes are not told.
    thief.call(&Request::Get { class: 0, release: guesses(lease), keys: vec![key(7)] }).unwrap();
    drop(thief);

    assert!(metric(&host, "kvasir_leases", "") >= held, "a lease of another has ended");
    let operator = host.client(Transport::Unix);
    assert!(operator.evict(&[key(7)]).unwrap()[0].is_err(), "it is being read");
    assert_eq!(victim.outcomes(&Request::Release(vec![lease])), [Outcome::Done]);
    assert_eq!(victim.outcomes(&Request::Abort(vec![reservation])), [Outcome::Done]);
    drop(victim);
    peace.holds("a thief of leases");
}
