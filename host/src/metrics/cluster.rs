//! Copies on other hosts, and those hosts.

use super::page::Page;
use kvasir_dataplane::cluster::{Cluster, Kind, LinkState, PeerView};

pub(super) fn replicas(page: &mut Page, cluster: &Cluster) {
    let s = cluster.stats();
    page.gauge("kvasir_replicated_blocks", "Replicated blocks that this host knows of").is(s.blocks);
    page.gauge("kvasir_replicas_own", "Replicated blocks of which this host holds a copy").is(s.own);
    page.gauge("kvasir_replicas_short", "Replicated blocks held by fewer hosts than requested").is(s.short);
    let copies =
        [("taken", s.copied - s.had), ("had", s.had), ("no_room", s.no_room), ("failed", s.copy_failed)];
    for (outcome, count) in copies {
        page.counter(
            "kvasir_copies_total",
            "Copies that peers were asked to take, by outcome; had: the peer had the block already",
        )
        .by("outcome", outcome, count);
    }
    page.counter("kvasir_copy_bytes_total", "Bytes of copies that arrived intact, by direction")
        .by("direction", "out", s.copied_bytes)
        .by("direction", "in", s.taken_bytes);
    page.histogram(
        "kvasir_copy_seconds",
        "How long a batch of copies took, from its offer to a peer until the peer's answer",
    )
    .times(&[], &s.copy_times);
    page.counter(
        "kvasir_copy_resumed_bytes_total",
        "Bytes not sent again when a broken transfer was resumed",
    )
    .is(s.resumed_bytes);
    page.counter("kvasir_peer_reads_total", "Blocks read from peers for a reader here, by outcome")
        .by("outcome", "hit", s.read_hits)
        .by("outcome", "miss", s.read_misses);
    page.counter("kvasir_peer_read_bytes_total", "Bytes of the blocks read from peers for a reader here")
        .is(s.read_bytes);
    page.counter("kvasir_peer_read_failovers_total", "Times a read moved on to the next holder of a block")
        .is(s.failovers);
    page.counter("kvasir_blocks_lent_total", "Blocks lent to peers for reading").is(s.lent);
    page.counter(
        "kvasir_peer_corrupt_total",
        "Blocks from peers that were damaged or wrong; they were not used",
    )
    .is(s.corrupt);
    page.counter("kvasir_repairs_total", "Attempts to fetch a damaged block again from a peer, by outcome")
        .by("outcome", "repaired", s.repaired)
        .by("outcome", "failed", s.not_repaired);
    let dropped = [("too_many", s.trimmed), ("evicted", s.let_go), ("removed", s.removed)];
    for (why, count) in dropped {
        page.counter("kvasir_replicas_dropped_total", "Copies that this host no longer holds, by reason")
            .by("why", why, count);
    }
    page.counter("kvasir_replicas_refused_total", "Blocks whose copies are not tracked, by reason").by(
        "why",
        "table_full",
        s.table_full,
    );
    page.counter(
        "kvasir_targets_restored_total",
        "Copies that this host held before its last start and still knew of",
    )
    .is(s.targets_restored);
    page.gauge(
        "kvasir_targets_unkept",
        "Changes to this host's copies not yet safe on disk: a crash would forget how many copies are wanted",
    )
    .is(s.targets_unkept);
    page.gauge("kvasir_removals_kept", "Removals kept in mind for hosts that were away").is(s.removals_kept);
    page.counter(
        "kvasir_removals_late_total",
        "Blocks dropped here because a peer told of their removal later, and removals forgotten because there were too many",
    )
    .by("outcome", "told", s.removals_told_late)
    .by("outcome", "forgotten", s.removals_forgotten);
    page.counter(
        "kvasir_cluster_strangers_total",
        "Connections refused at the cluster's port, such as for a wrong secret or an unknown name",
    )
    .is(s.strangers);
    page.gauge("kvasir_transfer_endpoints", "Connections to peers for transfers, open now").is(s.endpoints);
    page.counter(
        "kvasir_transfer_endpoint_failures_total",
        "Transfer connections that could not be made or broke",
    )
    .is(s.endpoint_failures);
    page.counter(
        "kvasir_transfer_endpoints_evicted_total",
        "Transfer connections closed to make room for others",
    )
    .is(s.endpoints_evicted);
    cluster.peers().iter().for_each(|of| peer(page, of));
}

fn peer(page: &mut Page, peer: &PeerView) {
    let name = peer.name.as_str();
    let up = if peer.state == LinkState::Up { 1 } else { 0 };
    page.gauge("kvasir_peer_up", "1 while the peer answers and all its copies are known, else 0")
        .with(&[("peer", name), ("rack", &peer.rack)], up);
    page.gauge("kvasir_peer_free_bytes", "Free bytes of the peer's pool").by(
        "peer",
        name,
        peer.status.free_bytes,
    );
    page.gauge("kvasir_peer_load", "Blocks that the peer is copying or lending, plus copies queued there")
        .by("peer", name, peer.status.load);
    page.gauge("kvasir_peer_queued_copies", "Copies waiting to be sent to the peer").by(
        "peer",
        name,
        peer.queued,
    );
    if let Some(ago) = peer.last_seen {
        page.gauge("kvasir_peer_last_seen_age_seconds", "Time since the peer was last heard").by(
            "peer",
            name,
            ago.as_secs_f64(),
        );
    }
    page.counter("kvasir_peer_copied_total", "Copies that the peer took from this host").by(
        "peer",
        name,
        peer.copied,
    );
    page.counter("kvasir_peer_read_blocks_total", "Blocks that this host read from the peer")
        .by("peer", name, peer.read);
    page.counter("kvasir_peer_failed_calls_total", "Calls to the peer that failed").by(
        "peer",
        name,
        peer.failed,
    );
    page.counter("kvasir_peer_lost_total", "Times the connection to the peer was lost")
        .by("peer", name, peer.lost);
    for kind in [Kind::Rdma, Kind::Shm, Kind::Tcp] {
        let bytes: u64 = peer.rails.iter().filter(|rail| rail.kind == kind).map(|rail| rail.bytes).sum();
        page.counter(
            "kvasir_peer_transfer_bytes_total",
            "Bytes read from the peer and written to it, by transport",
        )
        .with(&[("peer", name), ("transport", kind.name())], bytes);
    }
}
