//! Two hosts in network namespaces, two rails between them, and networks as bad as the kernel makes them: delay, loss,
//! reordering, slow rails, links that go down amid a transfer, and partitions of one direction.
//!
//! Whatever the network does, each transfer ends complete and bit-exact, or with the exact error, and what it calls valid
//! is. `cargo xtask test --rdma` runs these in its machine, whose kernel has `sch_netem`; elsewhere, as root:
//! `cargo test -p kvasir-net --test netem -- --ignored --test-threads=1`.

#[path = "netem/hosts.rs"]
mod hosts;

use std::io::Write;
use std::time::Duration;

use hosts::{Ends, Hosts, MIB};
use kvasir_net::transfer::TransferError;
use kvasir_net::transport::Direction;

const LONG: Duration = Duration::from_secs(60);
const BOTH: [Direction; 2] = [Direction::Read, Direction::Write];

/// Says so where the kernel cannot do it.
fn with_netem(test: impl FnOnce(Hosts)) {
    let hosts = Hosts::new();
    if hosts.has_netem() {
        test(hosts);
    } else {
        // Past the test harness, which shows nothing of a test that passes.
        let _ = writeln!(std::io::stderr(), "SKIPPED: this kernel has no sch_netem");
    }
}

/// Everything arrives, both ways.
fn all_arrives(hosts: &Hosts, bytes: u64) {
    for direction in BOTH {
        let ends = hosts.transfer(direction, bytes, LONG).wait();
        assert!(ends.iter().all(|end| end.error.is_none()), "{direction:?}: {ends:?}");
    }
}

#[test]
#[ignore = "needs root, network namespaces and sch_netem: cargo xtask test --rdma"]
fn delay_loss_and_reordering_cost_only_time() {
    with_netem(|hosts| {
        for netem in
            ["delay 10ms 4ms", "loss 2%", "delay 5ms reorder 25% 50%", "duplicate 5%", "corrupt 0.5%"]
        {
            (0..2).for_each(|rail| hosts.netem(rail, netem));
            all_arrives(&hosts, MIB);
        }
    });
}

#[test]
#[ignore = "needs root, network namespaces and sch_netem: cargo xtask test --rdma"]
fn the_faster_rail_carries_more() {
    with_netem(|hosts| {
        hosts.netem(0, "rate 40mbit");
        hosts.netem(1, "rate 4mbit");
        let carried = || -> Vec<u64> { hosts.peer.rails().iter().map(|rail| rail.delivered_bytes).collect() };
        // Nobody knows the rates yet.
        all_arrives(&hosts, 2 * MIB);
        let before = carried();
        all_arrives(&hosts, 4 * MIB);
        let carried: Vec<u64> = carried().iter().zip(before).map(|(now, before)| now - before).collect();
        assert!(carried[0] > 2 * carried[1], "bytes by rail: {carried:?}");
    });
}

#[test]
#[ignore = "needs root, network namespaces and sch_netem: cargo xtask test --rdma"]
fn a_silent_rail_is_left_amid_a_transfer() {
    with_netem(|hosts| {
        for direction in BOTH {
            (0..2).for_each(|rail| hosts.netem(rail, "rate 40mbit"));
            let transfer = hosts.transfer(direction, 4 * MIB, LONG);
            hosts.until_delivered(MIB);
            hosts.netem(1, "loss 100%");
            let ends = transfer.wait();
            assert!(ends.iter().all(|end| end.error.is_none()), "{direction:?}: {ends:?}");
            hosts.netem(1, "loss 0%");
            hosts.until_usable();
        }
    });
}

/// Answers get lost, questions do not: all bytes of a write may have arrived, and nobody knows.
#[test]
#[ignore = "needs root, network namespaces and sch_netem: cargo xtask test --rdma"]
fn a_partition_of_one_direction_is_a_dead_peer() {
    with_netem(|hosts| {
        for (to_client, direction) in [(true, BOTH[0]), (true, BOTH[1]), (false, BOTH[0]), (false, BOTH[1])] {
            (0..2).for_each(|rail| hosts.netem_one_way(rail, to_client, "loss 100%"));
            let ends = hosts.transfer(direction, MIB, LONG).wait();
            check_errors(&ends, |error| {
                matches!(error, TransferError::PeerDown { .. } | TransferError::Op { .. })
            });
            // It is known by now, so this is refused at once.
            let ends = hosts.transfer(direction, MIB, LONG).wait();
            check_errors(&ends, |error| matches!(error, TransferError::PeerDown { .. }));
            (0..2).for_each(|rail| hosts.netem(rail, "loss 0%"));
            hosts.until_usable();
            all_arrives(&hosts, MIB);
        }
    });
}

/// A deadline shorter than it takes to notice silence holds, for begun writes too.
#[test]
#[ignore = "needs root, network namespaces and sch_netem: cargo xtask test --rdma"]
fn deadlines_hold_in_dead_silence() {
    with_netem(|hosts| {
        for direction in BOTH {
            (0..2).for_each(|rail| hosts.netem(rail, "rate 8mbit"));
            let transfer = hosts.transfer(direction, 4 * MIB, hosts.silence() / 4);
            hosts.until_delivered(64 << 10);
            (0..2).for_each(|rail| hosts.netem(rail, "loss 100%"));
            check_errors(&transfer.wait(), |error| *error == TransferError::TimedOut);
            (0..2).for_each(|rail| hosts.netem(rail, "loss 0%"));
            hosts.until_usable();
            all_arrives(&hosts, MIB);
        }
    });
}

/// No netem needed: the link itself goes down, and comes back.
#[test]
#[ignore = "needs root and network namespaces: cargo xtask test --rdma"]
fn links_go_down_and_come_back() {
    let hosts = Hosts::new();
    for direction in BOTH {
        let transfer = hosts.transfer(direction, 16 * MIB, LONG);
        hosts.set_link(0, false);
        let ends = transfer.wait();
        assert!(ends.iter().all(|end| end.error.is_none()), "{direction:?}: {ends:?}");
        hosts.set_link(0, true);
        hosts.until_usable();
        all_arrives(&hosts, MIB);
    }
}

/// Every entry that did not arrive says why, and some did not.
fn check_errors(ends: &Ends, expected: impl Fn(&TransferError) -> bool) {
    let errors: Vec<&TransferError> = ends.iter().filter_map(|end| end.error.as_ref()).collect();
    assert!(!errors.is_empty() && errors.iter().all(|error| expected(error)), "{errors:?}");
}
