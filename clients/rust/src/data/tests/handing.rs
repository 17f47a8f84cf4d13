//! Prompts from engine to engine: each job is reported once, and a prompt is right or not there.

use super::jobs::wait;
use super::pair::{
    BLOCKS, Engine, LAYERS, LONG, NAMESPACE, Pair, SIZE, into, keys, layer_of, transfer, until,
};
use super::*;
use crate::data::{HandingError, HandingOptions, Incoming, Outgoing, Transfer};

/// A job that was good: all blocks, and their bytes.
fn good(done: &Done, blocks: usize) {
    assert!(done.ok && done.error.is_none(), "{done:?}");
    assert_eq!((&done.blocks[..], done.bytes), (&vec![true; blocks][..], blocks as u64 * SIZE));
}

/// A job that failed, and says of no block that it is here.
fn failed(done: &Done, expected: &str) {
    let text = done.error.as_ref().map(ToString::to_string).unwrap_or_default();
    assert!(text.contains(expected), "{text}, not {expected}: {done:?}");
    assert!(!done.ok && done.bytes == 0 && done.blocks.iter().all(|&here| !here), "{done:?}");
}

#[test]
fn a_prompt_goes_in_parts_whoever_begins_and_in_any_order_of_layers() {
    let pair = Pair::start();
    let [prefill, decode] = pair.engines();
    let parts: [&[u64]; 3] = [&[0, 1, 2], &[3], &[4, 5, 6, 7, 8]];
    let prompt: Vec<u64> = parts.concat();
    for receiver_first in [true, false] {
        let transfer = transfer();
        if receiver_first {
            decode.receive(100, &transfer, &prompt, 2, LONG);
        }
        let mut from = 0;
        for (job, part) in parts.iter().enumerate() {
            let job = job as u64;
            prefill.send(job, &transfer, from, part);
            [2, 0, 3, 1].iter().for_each(|&layer| prefill.compute(job, part, layer));
            from += part.len() as u32;
        }
        for (done, part) in wait(&prefill.jobs, 3).iter().zip(parts) {
            good(done, part.len());
        }
        if !receiver_first {
            decode.receive(100, &transfer, &prompt, 2, LONG);
        }
        good(&wait(&decode.jobs, 1)[0], prompt.len() - 2);
        for &n in &prompt {
            // Nothing lies where the first two would.
            assert_eq!(decode.has(into(n), n), n >= 2, "block {n}");
            (0..LAYERS).for_each(|layer| decode.fill(into(n), 99, layer));
        }
        let all = keys(&transfer, &prompt);
        until("nothing is left", || pair.is_clean(&all));
    }
}

#[test]
fn a_layer_is_there_before_the_next_is_computed() {
    let pair = Pair::start();
    let [prefill, decode] = pair.engines();
    let transfer = transfer();
    prefill.send(1, &transfer, 0, &[1, 2]);
    decode.receive(2, &transfer, &[1, 2], 0, LONG);
    for layer in 0..LAYERS {
        prefill.compute(1, &[1, 2], layer);
        until("the layer is there", || [1, 2].iter().all(|&n| decode.has_layer(into(n), n, layer)));
    }
    good(&wait(&prefill.jobs, 1)[0], 2);
    good(&wait(&decode.jobs, 1)[0], 2);
    assert!(!prefill.handing.layer_ready(1, 0) && !prefill.handing.abandon(1), "it has ended");
}

#[test]
fn threads_that_have_nothing_to_do_end_and_come_back() {
    let pair = Pair::start();
    let settings = || HandingOptions { idle: Duration::from_millis(1), ..HandingOptions::default() };
    let [prefill, decode] = pair.nodes.each_ref().map(|node| Engine::new(&node.host.unix(), settings()));
    for round in 0..2 {
        let transfer = transfer();
        prefill.send(1, &transfer, 0, &[round]);
        decode.receive(2, &transfer, &[round], 0, LONG);
        (0..LAYERS).for_each(|layer| prefill.compute(1, &[round], layer));
        good(&wait(&prefill.jobs, 1)[0], 1);
        good(&wait(&decode.jobs, 1)[0], 1);
        until("they end", || prefill.handing.threads() + decode.handing.threads() == 0);
    }
}

#[test]
fn the_same_prompt_goes_twice_at_once() {
    let pair = Pair::start();
    let [prefill, decode] = pair.engines();
    let both = [transfer(), transfer()];
    for (job, transfer) in (0..).zip(&both) {
        prefill.send(job, transfer, 0, &[1, 2]);
        let blocks = if job == 0 { vec![10, 11] } else { vec![20, 21] };
        let (transfer, keys) = (transfer.clone(), keys(transfer, &[1, 2]));
        let prompt = Incoming { transfer, keys, first: 0, blocks, layers: LAYERS, time: LONG };
        decode.handing.arrive(job, &decode.plan, prompt).unwrap();
    }
    for layer in 0..LAYERS {
        (0..2).for_each(|job| prefill.compute(job, &[1, 2], layer));
    }
    wait(&prefill.jobs, 2).iter().for_each(|done| good(done, 2));
    wait(&decode.jobs, 2).iter().for_each(|done| good(done, 2));
    assert!([10, 20].iter().all(|&at| decode.has(at, 1) && decode.has(at + 1, 2)));
}

#[test]
fn a_receiver_that_comes_when_the_hosts_have_forgotten_finds_the_blocks() {
    // Hosts forget after it; long enough for a reader on a busy machine.
    let dram = DramConfig { lease_ttl: Duration::from_secs(2), ..DramConfig::default() };
    let pair = Pair::with(dram);
    let [prefill, decode] = pair.engines();
    let transfer = transfer();
    for (job, part) in [(0, [0, 1]), (2, [2, 3])] {
        prefill.send(job, &transfer, job as u32, &part);
        (0..LAYERS).for_each(|layer| prefill.compute(job, &part, layer));
        good(&wait(&prefill.jobs, 1)[0], 2);
    }
    // Another hand-over makes the host look what it may forget.
    prefill.send(7, &transfer, 4, &[4, 5]);
    let forgotten = Client::connect(&pair.nodes[1].host.unix(), options()).unwrap();
    until("it is forgotten", || {
        let asked = forgotten.arrivals(transfer.request(0), Duration::ZERO).map(drop);
        matches!(asked, Err(ClientError::NotArrived { .. }))
    });
    decode.receive(100, &transfer, &[0, 1, 2, 3, 4, 5], 1, LONG);
    (0..LAYERS).for_each(|layer| prefill.compute(7, &[4, 5], layer));
    good(&wait(&decode.jobs, 1)[0], 5);
    assert!((1..6).all(|n| decode.has(into(n), n)));
}

#[test]
fn a_part_of_more_blocks_than_hosts_take_at_once() {
    const MANY: u64 = 2500;
    let pair = Pair::start();
    let [prefill, decode] = pair.engines();
    let names: Vec<u64> = (0..MANY).collect();
    let transfer = transfer();
    let mut memory = vec![0_u8; 2 * MANY as usize * 8];
    let base = memory.as_mut_ptr().expose_provenance();
    let plan = |from: usize| {
        let at = base + from * MANY as usize * 8;
        let layer = |layer: usize| Run { addr: at + layer * 4, len: 4, stride: 8 };
        #[expect(unsafe_code, reason = "what an engine does")]
        // SAFETY: each plan has one half of `memory`, which is touched through them alone until the engines are dropped.
        Arc::new(unsafe { Plan::new(&[layer(0), layer(1)], MANY as usize) }.unwrap())
    };
    let [source, target] = [0, 1].map(plan);
    for n in names.iter().copied() {
        for (half, mut place) in (0_u32..).zip(source.places(n as usize).unwrap()) {
            place.copy_in(Shared::from(&(n as u32 * 2 + half).to_le_bytes()[..]));
        }
    }
    let all = keys(&transfer, &names);
    let blocks = all.iter().copied().zip(0..).collect();
    let (peer, from) = ("host-1".to_owned(), 0);
    let part = Outgoing { transfer: transfer.clone(), from, peer, blocks, layers: 2 };
    prefill.handing.hand_over(1, &source, part).unwrap();
    let (keys, blocks) = (all.clone(), (0..MANY as usize).collect());
    let prompt = Incoming { transfer, keys, first: 0, blocks, layers: 2, time: LONG };
    decode.handing.arrive(1, &target, prompt).unwrap();
    (0..2).for_each(|layer| assert!(prefill.handing.layer_ready(1, layer)));
    for engine in [&prefill, &decode] {
        let done = wait(&engine.jobs, 1).remove(0);
        assert!(done.ok && done.bytes == 8 * MANY, "{:?}", done.error);
    }
    for n in 0..MANY as usize {
        let bytes: Vec<u8> = target.parts(n).unwrap().flat_map(|part| part.to_vec()).collect();
        assert_eq!(bytes, ((n as u64 * 2) | ((n as u64 * 2 + 1) << 32)).to_le_bytes());
    }
    until("nothing is left", || pair.is_clean(&all[..1024]));
    drop((prefill, decode));
}

#[test]
fn jobs_beyond_the_threads_wait_for_one() {
    let pair = Pair::start();
    let settings = HandingOptions { send_threads: 1, receive_threads: 1, ..HandingOptions::default() };
    let [prefill, decode] =
        pair.nodes.each_ref().map(|node| Engine::new(&node.host.unix(), settings.clone()));
    let all: Vec<Transfer> = (0..5).map(|_| transfer()).collect();
    for (job, transfer) in (0..).zip(&all) {
        decode.receive(job, transfer, &[job], 0, LONG);
        prefill.send(job, transfer, 0, &[job]);
        // Before it runs.
        (0..LAYERS).for_each(|layer| prefill.compute(job, &[job], layer));
    }
    wait(&prefill.jobs, 5).iter().for_each(|done| good(done, 1));
    wait(&decode.jobs, 5).iter().for_each(|done| good(done, 1));
    assert!((0..5).all(|n| decode.has(into(n), n)));
}

#[test]
fn other_tokens_are_refused_and_other_namespaces_never_meet() {
    let pair = Pair::start();
    let [prefill, decode] = pair.engines();
    let ours = transfer();
    prefill.send(1, &ours, 0, &[1, 2, 3]);
    // The third differs, or there are fewer than were sent.
    decode.receive(1, &ours, &[1, 2, 4], 0, LONG);
    failed(&wait(&decode.jobs, 1)[0], "block 2 of the transfer is another one");
    decode.receive(2, &ours, &[1, 2], 0, LONG);
    failed(&wait(&decode.jobs, 1)[0], "block 2 of the transfer is another one");
    let prompt = Incoming {
        transfer: ours.clone(),
        keys: keys(&ours, &[1, 2, 3]),
        first: 0,
        blocks: vec![1, 2, 3],
        layers: 2,
        time: LONG,
    };
    decode.handing.arrive(3, &decode.plan, prompt).unwrap();
    failed(&wait(&decode.jobs, 1)[0], "it comes in 4 layers and a block of 4000 B, not in 2");
    let other = Transfer::new(b"cmpl-0", &Namespace::new([8; 32])).unwrap();
    decode.receive(4, &other, &[1, 2, 3], 0, Duration::from_millis(50));
    failed(&wait(&decode.jobs, 1)[0], "0 of 3 blocks came in 50 ms");
    assert!(!(0..BLOCKS).any(|at| (1..4).any(|n| decode.has_layer(at, n, 0))), "nothing was copied");
}

#[test]
fn damaged_bytes_fail_both_jobs() {
    let pair = Pair::start();
    let [prefill, decode] = pair.engines();
    let transfer = transfer();
    prefill.send(1, &transfer, 0, &[1, 2]);
    decode.receive(1, &transfer, &[1, 2], 0, LONG);
    prefill.compute(1, &[1, 2], 0);
    until("a layer is there", || decode.has_layer(into(2), 2, 0));
    let witness = Client::connect(&pair.nodes[1].host.unix(), options()).unwrap();
    let place = witness.arrivals(transfer.request(0), LONG).unwrap().blocks()[1].offset;
    assert!(pair.nodes[1].host.store.pool().mapping().write(place + 5, b"x"));
    (1..LAYERS).for_each(|layer| prefill.compute(1, &[1, 2], layer));
    failed(&wait(&prefill.jobs, 1)[0], "did not arrive with the checksum given");
    failed(&wait(&decode.jobs, 1)[0], "did not arrive with the checksum");
    until("nothing is left", || pair.is_clean(&keys(&transfer, &[1, 2])));
}

#[test]
fn a_prompt_that_is_there_is_not_good_before_its_checksums_are() {
    let pair = Pair::start();
    let [_, decode] = pair.engines();
    let transfer = transfer();
    // A sender that takes its time between the last layer and its last word, and errs in that.
    let sender = Client::connect(&pair.nodes[0].host.unix(), options()).unwrap();
    let meta = BlockMeta::single(keys(&transfer, &[1])[0], SIZE as u32);
    let mut handing = sender.hand_over(transfer.request(0), "host-1", &[meta], LAYERS).unwrap();
    decode.receive(1, &transfer, &[1], 0, LONG);
    for layer in 0..LAYERS {
        handing.fill(0, layer, &layer_of(1, layer)).unwrap();
        handing.layer_done(layer).unwrap();
    }
    until("all of it is there", || decode.has(into(1), 1));
    assert!(handing.finish(&[4711]).is_err());
    failed(&wait(&decode.jobs, 1)[0], "did not arrive with the checksum");
}

#[test]
fn an_engine_that_gives_up_leaves_nothing() {
    let pair = Pair::start();
    let [prefill, decode] = pair.engines();
    for sender in [true, false] {
        let transfer = transfer();
        prefill.send(1, &transfer, 0, &[1, 2]);
        decode.receive(1, &transfer, &[1, 2], 0, LONG);
        prefill.compute(1, &[1, 2], 0);
        until("a layer is there", || decode.has_layer(into(2), 2, 0));
        if sender {
            assert!(prefill.handing.abandon(1) && !prefill.handing.layer_ready(1, 1));
            failed(&wait(&prefill.jobs, 1)[0], "it was given up");
            failed(&wait(&decode.jobs, 1)[0], "broke off");
        } else {
            assert!(decode.handing.abandon(1));
            failed(&wait(&decode.jobs, 1)[0], "it was given up");
            (1..LAYERS).for_each(|layer| prefill.compute(1, &[1, 2], layer));
            good(&wait(&prefill.jobs, 1)[0], 2);
        }
        until("the places are back", || pair.nodes.iter().all(|node| node.reservations() == 0));
        (0..LAYERS).for_each(|layer| decode.fill(into(2), 99, layer));
    }
    assert!(!prefill.handing.abandon(77) && !prefill.handing.layer_ready(77, 0));
    // One that waits for a prompt that never comes.
    decode.receive(5, &transfer(), &[1], 0, LONG);
    assert!(decode.handing.abandon(5));
    failed(&wait(&decode.jobs, 1)[0], "it was given up");
}

#[test]
fn time_is_over_where_nobody_says_anything() {
    let pair = Pair::start();
    let short = Duration::from_millis(200);
    let settings = HandingOptions { send_time: short, send_threads: 1, ..HandingOptions::default() };
    let prefill = Engine::new(&pair.nodes[0].host.unix(), settings);
    let [_, decode] = pair.engines();
    let (begun, queued) = (transfer(), transfer());
    prefill.send(1, &begun, 0, &[1]);
    prefill.send(2, &queued, 0, &[2]);
    prefill.compute(1, &[1], 0);
    prefill.compute(1, &[1], 2);
    let ended = wait(&prefill.jobs, 2);
    failed(&ended[0], "layer");
    failed(&ended[1], "layer 0 of 4 was not ready in its time of 200 ms");
    decode.receive(1, &transfer(), &[1], 0, short);
    failed(&wait(&decode.jobs, 1)[0], "0 of 1 blocks came in 200 ms");
    decode.receive(2, &transfer(), &[1], 0, Duration::ZERO);
    failed(&wait(&decode.jobs, 1)[0], "0 of 1 blocks came in 0 ms");
    until("the places are back", || pair.nodes.iter().all(|node| node.reservations() == 0));
}

#[test]
fn a_host_that_is_gone_between_two_layers_fails_the_jobs() {
    for dies in 0..2 {
        let mut pair = Pair::start();
        let [prefill, decode] = pair.engines();
        let transfer = transfer();
        prefill.send(1, &transfer, 0, &[1, 2]);
        decode.receive(1, &transfer, &[1, 2], 0, LONG);
        prefill.compute(1, &[1, 2], 0);
        until("a layer is there", || decode.has_layer(into(2), 2, 0));
        pair.nodes[dies].stop();
        for layer in 1..LAYERS {
            // It may have failed by now.
            prefill.handing.layer_ready(1, layer);
        }
        failed(&wait(&prefill.jobs, 1)[0], "");
        failed(&wait(&decode.jobs, 1)[0], "");
        prefill.send(2, &transfer, 0, &[1, 2]);
        failed(&wait(&prefill.jobs, 1)[0], "");
    }
}

#[test]
fn closing_reports_all_that_was_taken() {
    let pair = Pair::start();
    let settings = HandingOptions { send_threads: 2, receive_threads: 2, ..HandingOptions::default() };
    let [prefill, decode] =
        pair.nodes.each_ref().map(|node| Engine::new(&node.host.unix(), settings.clone()));
    for job in 0..5 {
        let transfer = transfer();
        prefill.send(job, &transfer, 0, &[job]);
        decode.receive(job, &transfer, &[job], 0, LONG);
        prefill.compute(job, &[job], 0);
    }
    until("two are under way", || [0, 1].iter().all(|&n| decode.has_layer(into(n), n, 0)));
    // In this order: a sender that closes breaks what the receiver waits for.
    for engine in [&decode, &prefill] {
        engine.handing.close();
        wait(&engine.jobs, 5).iter().for_each(|done| failed(done, "it was closed in the middle"));
        let late = Incoming {
            transfer: transfer(),
            keys: keys(&transfer(), &[1]),
            first: 0,
            blocks: vec![0],
            layers: LAYERS,
            time: LONG,
        };
        assert_eq!(engine.handing.arrive(9, &engine.plan, late), Err(JobError::Closed));
        assert!(!engine.handing.layer_ready(0, 1), "it has ended");
        // The jobs beside go on.
        engine.jobs.load(1, &engine.plan, vec![]).unwrap();
        assert!(wait(&engine.jobs, 1)[0].ok);
    }
    until("the places are back", || pair.nodes.iter().all(|node| node.reservations() == 0));
}

#[test]
fn what_makes_no_sense_is_refused() {
    let pair = Pair::start();
    let [prefill, decode] = pair.engines();
    let transfer = transfer();
    let key = keys(&transfer, &[1])[0];
    let out = |blocks: Vec<(BlockKey, usize)>, layers, from| {
        let (transfer, peer) = (transfer.clone(), "host-1".to_owned());
        prefill.handing.hand_over(1, &prefill.plan, Outgoing { transfer, from, peer, blocks, layers })
    };
    let layers = |layers| Err(JobError::Layers { layers, runs: 8 });
    assert_eq!([0, 3, 16].map(|count| out(vec![(key, 0)], count, 0)), [0, 3, 16].map(layers));
    assert_eq!(out(vec![(key, BLOCKS)], 4, 0), Err(JobError::NoBlock { block: BLOCKS, blocks: BLOCKS }));
    assert!(matches!(out(vec![], 4, 0), Err(JobError::Numbers { .. })));
    assert!(matches!(out(vec![(key, 0)], 4, u32::MAX), Err(JobError::Part { .. })));
    let into = |keys: Vec<BlockKey>, first, blocks| {
        let (transfer, time) = (transfer.clone(), LONG);
        let prompt = Incoming { transfer, keys, first, blocks, layers: LAYERS, time };
        decode.handing.arrive(1, &decode.plan, prompt)
    };
    for (count, first, blocks) in [(0, 0, vec![]), (2, 1, vec![1, 2]), (1, 2, vec![]), (2, 0, vec![1])] {
        assert!(matches!(into(vec![key; count], first, blocks), Err(JobError::Numbers { .. })));
    }
    into(vec![key], 0, vec![0]).unwrap();
    assert_eq!(into(vec![key], 0, vec![1]), Err(JobError::Twice { job: 1 }));
    assert!(!decode.handing.layer_ready(1, 0), "it has none");
    assert!(decode.handing.abandon(1));
    failed(&wait(&decode.jobs, 1)[0], "it was given up");

    let peer = Outgoing {
        transfer: transfer.clone(),
        from: 0,
        peer: "host-9".to_owned(),
        blocks: vec![(key, 0)],
        layers: LAYERS,
    };
    prefill.handing.hand_over(1, &prefill.plan, peer.clone()).unwrap();
    failed(&wait(&prefill.jobs, 1)[0], "no peer is called host-9; there are: host-1");
    let alone = Host::small();
    for (endpoint, expected) in [
        (alone.unix(), "this host knows no others"),
        (alone.tcp(), "hand-overs need the host's Unix socket"),
        (Endpoint::Unix(alone.dir.path().join("none")), "no Kvasir host"),
    ] {
        let engine = Engine::new(&endpoint, HandingOptions::default());
        engine.handing.hand_over(1, &engine.plan, peer.clone()).unwrap();
        failed(&wait(&engine.jobs, 1)[0], expected);
        engine.receive(2, &transfer, &[1], 0, LONG);
        failed(&wait(&engine.jobs, 1)[0], expected);
    }
    let error = ClientError::from(HandingError::Abandoned);
    assert!(!error.retryable() && NAMESPACE.len() == 32);
}
