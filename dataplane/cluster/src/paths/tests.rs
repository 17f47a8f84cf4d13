use super::*;
use kvasir_net::topology::Topology;
use kvasir_net::topology::fixture::{self, HGX, TWO_SOCKETS};

const CPU: [Location; 2] = [Location::Cpu(0), Location::Cpu(1)];

fn probed(text: &str) -> Matrix {
    let sysfs = fixture::build(text);
    Topology::probe(sysfs.path(), Default::default()).unwrap().matrix().clone()
}

fn welcome(machine: &str, rails: &[(Kind, &str)]) -> Welcome {
    let rail = |n: usize| (rails[n].0.name().to_owned(), format!("there-{n}"));
    Welcome {
        rails: (0..rails.len()).map(rail).collect(),
        nics: rails.iter().map(|(_, nic)| (*nic).to_owned()).collect(),
        machine: machine.to_owned(),
        ..Welcome::default()
    }
}

fn paired(kinds: &[Kind], own: &[(Kind, &str)], theirs: &Welcome) -> Vec<Pair> {
    let own: Vec<(Kind, String)> = own.iter().map(|(kind, nic)| (*kind, (*nic).to_owned())).collect();
    of_kinds(kinds, &own, "this", theirs)
}

/// The pairs of each set, best first, as `rail here>rail there`.
fn sets(pairs: &[Pair], own: &Matrix, theirs: &Matrix, from: Location, to: Location) -> String {
    let ranks = ranks(pairs, own, theirs, from, to);
    let mut distinct = ranks.clone();
    distinct.sort();
    distinct.dedup();
    let name = |pair: &Pair| format!("{}>{}", pair.rail, pair.address.trim_start_matches("there-"));
    let set = |rank: &Rank| {
        let here = pairs.iter().zip(&ranks).filter(|(_, other)| *other == rank);
        here.map(|(pair, _)| name(pair)).collect::<Vec<_>>().join(" ")
    };
    distinct.iter().map(set).collect::<Vec<_>>().join(" | ")
}

use Kind::{Rdma, Shm, Tcp};
const ALL: [Kind; 3] = [Rdma, Shm, Tcp];

#[test]
fn the_best_kind_that_both_have_goes_first() {
    let none = Matrix::default();
    let check = |own: &[Kind], machine: &str, theirs: &[Kind], expected: &str| {
        let rails = |kinds: &[Kind]| kinds.iter().map(|&kind| (kind, "")).collect::<Vec<_>>();
        let pairs = paired(&ALL, &rails(own), &welcome(machine, &rails(theirs)));
        assert_eq!(sets(&pairs, &none, &none, CPU[0], CPU[0]), expected, "{own:?} {machine} {theirs:?}");
    };
    check(&ALL, "this", &ALL, "1>1 | 0>0 | 2>2");
    check(&ALL, "that", &ALL, "0>0 | 2>2");
    check(&ALL, "", &ALL, "0>0 | 2>2");
    check(&[Shm, Tcp], "that", &ALL, "1>2");
    check(&ALL, "this", &[Tcp], "2>0");
    check(&[Rdma], "this", &[Tcp], "");
}

#[test]
fn rails_on_one_position_go_together_and_others_wait_for_a_failure() {
    let none = Matrix::default();
    let check = |own: usize, theirs: usize, expected: &str| {
        let rails = |count| vec![(Tcp, ""); count];
        let pairs = paired(&ALL, &rails(own), &welcome("that", &rails(theirs)));
        assert_eq!(sets(&pairs, &none, &none, CPU[0], CPU[0]), expected, "{own} to {theirs}");
    };
    check(1, 1, "0>0");
    check(2, 2, "0>0 1>1 | 0>1 1>0");
    check(1, 2, "0>0 0>1");
    check(3, 1, "0>0 2>0 1>0");
}

/// Two hosts with 8 RDMA devices each, memory on either socket.
#[test]
fn nics_near_the_memory_on_both_sides_go_first() {
    let hgx = probed(HGX);
    let nics: Vec<String> = (0..8).map(|n| format!("mlx5_{n}")).collect();
    let mut rails: Vec<(Kind, &str)> = nics.iter().map(|nic| (Rdma, nic.as_str())).collect();
    rails.push((Tcp, "eno3"));
    let pairs = paired(&ALL, &rails, &welcome("that", &rails));
    let near = sets(&pairs, &hgx, &hgx, CPU[0], CPU[0]);
    assert!(near.starts_with("0>0 1>1 2>2 3>3 | "), "{near}");
    assert!(near.ends_with(" | 8>8"), "TCP over the slow port is the last resort: {near}");
    let far = sets(&pairs, &hgx, &hgx, CPU[1], CPU[1]);
    assert!(far.starts_with("4>4 5>5 6>6 7>7 | "), "{far}");
    let gpu = sets(&pairs, &hgx, &hgx, Location::Cuda(2), Location::Cuda(2));
    assert!(gpu.starts_with("2>2 | "), "{gpu}");
}

/// Hosts of two kinds: what is near differs between them, and one has a NIC that is down.
#[test]
fn what_is_near_is_looked_up_on_each_side() {
    let (hgx, sockets) = (probed(HGX), probed(TWO_SOCKETS));
    let own = [(Tcp, "mlx5_0"), (Tcp, "mlx5_4")];
    let theirs = welcome("that", &[(Tcp, "mlx5_2"), (Tcp, "mlx5_0"), (Tcp, "mlx5_3")]);
    let pairs = paired(&[Tcp], &own, &theirs);
    // Of the 8 NICs 0 is near the first socket there, of the 4 NICs 0 is as well, 2 is not, and 3 is down.
    let near = sets(&pairs, &hgx, &sockets, CPU[0], CPU[0]);
    assert!(near.starts_with("0>1 | "), "{near}");
    assert!(near.ends_with("0>2 1>2") || near.ends_with("1>2"), "{near}");
    assert!(sets(&pairs, &hgx, &sockets, CPU[1], CPU[1]).starts_with("1>0 | "));
    assert!(sets(&pairs, &hgx, &sockets, CPU[0], CPU[1]).starts_with("0>0 | "));
    // A peer that says nothing of its NICs: the near side decides.
    let blind = sets(&pairs, &hgx, &Matrix::default(), CPU[0], CPU[0]);
    assert!(blind.starts_with("0>0 0>1 0>2 | "), "{blind}");
}

#[test]
fn what_was_moved_stays_with_its_rail() {
    let none = Matrix::default();
    let metrics = |bytes: u64, usable| RailMetrics {
        transport: "tcp",
        address: String::new(),
        usable,
        queued_bytes: 0,
        rate_bytes_per_second: 1,
        delivered_bytes: bytes,
        slices: 0,
        failures: 1,
    };
    let mut tally = Tally::default();
    let two = welcome("that", &[(Tcp, ""), (Tcp, "")]);
    assert!(tally.set(paired(&ALL, &[(Tcp, "")], &two)));
    assert!(!tally.set(paired(&ALL, &[(Tcp, "")], &two)), "nothing new");
    tally.add(&[metrics(5, true), metrics(7, true)]);
    let order = order(&tally.pairs, &none, &none, CPU[0], CPU[0]);
    let now = tally.view(Some(&[metrics(10, true), metrics(20, false)]), order);
    assert_eq!((now[0].state, now[0].bytes, now[0].failures), (RailState::InUse, 15, 2));
    assert_eq!((now[1].state, now[1].bytes), (RailState::Down, 27));
    // The first rail there goes away.
    let one = Welcome { rails: two.rails[1..].to_vec(), ..two };
    assert!(tally.set(paired(&ALL, &[(Tcp, "")], &one)));
    let now = tally.view(None, order);
    assert_eq!((now.len(), now[0].bytes, now[0].state), (1, 7, RailState::Idle));
}
