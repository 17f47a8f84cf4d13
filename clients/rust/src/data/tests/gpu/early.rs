//! What must not happen too early.

use super::*;

#[test]
#[ignore = "needs a CUDA device"]
fn a_save_waits_for_what_the_engine_computes() {
    let host = Host::small();
    for endpoint in [host.unix(), host.tcp()] {
        let (mut gpu, jobs) = (Gpu::new(8), started(&endpoint, &options()));
        let plan = gpu.plan();
        // The threads are connected, and everything is as quick as it gets.
        is_all(&save(&jobs, gpu.ready(&plan), 50..51, 0), 1);
        let computed: Vec<_> = (0..8).map(|n| bytes_of(n, SIZE)).collect();
        gpu.compute(&computed);
        is_all(&save(&jobs, gpu.ready(&plan), 0..8, 0), 8);
        let client = Client::connect(&endpoint, options()).unwrap();
        let keys: Vec<_> = (0..8).map(|n| named(n).0.key).collect();
        for (n, block) in client.get(&keys, 0).unwrap().into_iter().enumerate() {
            let bytes = block.unwrap().bytes().unwrap().to_vec();
            assert!(bytes[..SIZE as usize] == computed[n], "block {n} was read before it was computed");
        }
        client.remove(&[&keys[..], &[named(50).0.key]].concat()).unwrap();
    }
}

/// A request that has ended may still be computed in blocks that are another's by now.
#[test]
#[ignore = "needs a CUDA device"]
fn a_load_waits_for_what_the_engine_still_does_with_the_blocks() {
    let host = Host::small();
    for endpoint in [host.unix(), host.tcp()] {
        let (mut gpu, jobs) = (Gpu::new(8), started(&endpoint, &options()));
        let plan = gpu.plan();
        (0..8).for_each(|n| gpu.set(n, &bytes_of(n as u64, SIZE)));
        is_all(&save(&jobs, gpu.ready(&plan), 0..8, 0), 8);
        is_all(&load(&jobs, gpu.ready(&plan), 0..1, 0), 1);
        gpu.compute(&[]);
        is_all(&load(&jobs, gpu.ready(&plan), 0..8, 0), 8);
        gpu.late.clear();
        for n in 0..8 {
            assert!(gpu.get(n) == bytes_of(n as u64, SIZE), "block {n} was overwritten");
        }
        let client = Client::connect(&endpoint, options()).unwrap();
        client.remove(&(0..8).map(|n| named(n).0.key).collect::<Vec<_>>()).unwrap();
    }
}

/// A job is reported when its blocks are there, which is when the engine may give the GPU work on them.
#[test]
#[ignore = "needs a CUDA device"]
fn what_is_reported_is_there() {
    let host = Host::small();
    for endpoint in [host.unix(), host.tcp()] {
        let (gpu, jobs) = (Gpu::new(64), started(&endpoint, &options()));
        let plan = gpu.plan();
        (0..64).for_each(|n| gpu.set(n, &bytes_of(n as u64, SIZE)));
        is_all(&save(&jobs, gpu.ready(&plan), 0..64, 0), 64);
        for round in 0..4 {
            (0..64).for_each(|n| gpu.set(n, &bytes_of(99, SIZE)));
            is_all(&load(&jobs, gpu.ready(&plan), 0..64, 0), 64);
            for n in (0..64).rev() {
                assert!(gpu.get(n) == bytes_of(n as u64, SIZE), "block {n}, round {round}");
            }
        }
        let client = Client::connect(&endpoint, options()).unwrap();
        client.remove(&(0..64).map(|n| named(n).0.key).collect::<Vec<_>>()).unwrap();
    }
}

/// The host keeps blocks in place until the GPU has read them: their places are wanted by others all the while.
#[test]
#[ignore = "needs a CUDA device"]
fn what_is_lent_is_lent_until_the_gpu_has_read_it() {
    const BLOCKS: usize = 128;
    let host = Host::small();
    let (gpu, jobs) = (Gpu::new(BLOCKS), started(&host.unix(), &options()));
    let plan = gpu.plan();
    let client = Client::connect(&host.unix(), options()).unwrap();
    (0..BLOCKS).for_each(|n| gpu.set(n, &bytes_of(n as u64, SIZE)));
    for half in [0, BLOCKS / 2] {
        let names = half as u64..(half + BLOCKS / 2) as u64;
        is_all(&save(&jobs, gpu.ready(&plan), names, half), BLOCKS / 2);
    }
    // Nothing else is free.
    let other = vec![0xee; (SIZE + Label::BYTES) as usize];
    let mut others = 1000..;
    let mut put = || {
        let meta = BlockMeta::single(key(others.next().unwrap()), other.len() as u32);
        client.put(&meta, &other).is_ok()
    };
    while put() {}
    let keys: Vec<_> = loads(0..BLOCKS as u64, 0).0.into_iter().map(|(key, _)| key).collect();
    // One that is over before it was seen on its way says nothing, and what is not lent yet may be removed.
    let is_caught = || {
        (0..BLOCKS).for_each(|n| gpu.set(n, &bytes_of(99, SIZE)));
        let (blocks, labels) = loads(0..BLOCKS as u64, 0);
        jobs.load_labelled(1, gpu.ready(&plan), blocks, labels).unwrap();
        loop {
            if host.store.metrics().leases == BLOCKS as u64 {
                return true;
            }
            if let [done] = &jobs.drain()[..] {
                is_all(done, BLOCKS);
                return false;
            }
        }
    };
    assert!((0..1_000).any(|_| is_caught()), "no load was seen on its way");
    client.remove(&keys).unwrap();
    let mut done = Vec::new();
    while done.is_empty() {
        put();
        done = jobs.drain();
    }
    is_all(&done[0], BLOCKS);
    for n in 0..BLOCKS {
        assert!(gpu.get(n) == bytes_of(n as u64, SIZE), "block {n} was another's when it was read");
    }
    // Now they can have them.
    host.until(|host| host.store.metrics().leases == 0);
    assert!(put());
}
