//! Devices, keys, writes and reads.

use kvasir_net::transport::Access;
use kvasir_net::transport::rdma::qp::{Request, Verb};
use kvasir_net::transport::rdma::{Error, Failure, MemoryRegion, device_names};

use crate::side::{Side, join, pair, pattern};

const MIB: u64 = 1 << 20;
const MEMORY: usize = 1 << 20;

#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn devices_are_found_and_speak_roce_v2_over_ipv4() {
    let names = device_names().unwrap();
    for (n, name) in std::env::var("RDMA_DEVICES").unwrap().split_whitespace().enumerate() {
        assert!(names.iter().any(|found| found == name), "{name} is not of {names:?}");
        let device = Side::new(n, 4096, None).device;
        let index: u32 = std::env::var("RDMA_GID_INDEX").unwrap().parse().unwrap();
        assert_eq!(device.gid_index().unwrap(), index, "of the IPv4 address");
        println!("{name}: {:?}", device.limits());
    }
}

#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn writes_and_reads_move_every_byte() {
    let [(a, to_b), (b, _to_a)] = pair(4 * MEMORY, Some(Access::ReadWrite));
    // Inline, one packet, one more than a packet, many packets.
    for (seed, len) in [1, 64, 4096, 4097, 65_536, MIB as u32].into_iter().enumerate() {
        let data = pattern(len as usize, seed);
        a.fill(0, &data);
        let write = a.request(Verb::Write, vec![a.piece(0, len)], &b.region, 2 * MIB + 5);
        assert_eq!(a.run(&to_b, write), Ok(()), "write of {len} B");
        assert_eq!(b.bytes(2 * MIB + 5, len.into()), data, "write of {len} B");

        let read = a.request(Verb::Read, vec![a.piece(MIB, len)], &b.region, 2 * MIB + 5);
        assert_eq!(a.run(&to_b, read), Ok(()), "read of {len} B");
        assert_eq!(a.bytes(MIB, len.into()), data, "read of {len} B");
    }
}

#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn several_pieces_are_gathered_and_scattered() {
    let [(a, to_b), (b, _to_a)] = pair(MEMORY, Some(Access::ReadWrite));
    a.fill(0, &pattern(MIB as usize / 2, 1));
    let pieces = [(0, 10), (5000, 70_000), (100_000, 1), (200_001, 4096)];
    let local: Vec<_> = pieces.iter().map(|&(offset, len)| a.piece(offset, len)).collect();
    let whole: Vec<u8> = pieces.iter().flat_map(|&(offset, len)| a.bytes(offset, len.into())).collect();

    assert_eq!(a.run(&to_b, a.request(Verb::Write, local, &b.region, 77)), Ok(()));
    assert_eq!(b.bytes(77, whole.len() as u64), whole);

    let elsewhere: Vec<_> = pieces.iter().map(|&(offset, len)| a.piece(MIB / 2 + offset, len)).collect();
    assert_eq!(a.run(&to_b, a.request(Verb::Read, elsewhere, &b.region, 77)), Ok(()));
    let scattered: Vec<u8> =
        pieces.iter().flat_map(|&(offset, len)| a.bytes(MIB / 2 + offset, len.into())).collect();
    assert_eq!(scattered, whole);
}

/// What a device's driver could not hand to its network interface. Only Soft-RoCE counts it under this name.
fn refused_packets(side: &Side) -> u64 {
    let path = format!("/sys/class/infiniband/{}/ports/1/hw_counters/send_err", side.device.name());
    std::fs::read_to_string(path).map_or(0, |count| count.trim().parse().unwrap())
}

/// After a packet that is lost Soft-RoCE does nothing for as long as an acknowledgement may take.
#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn the_network_takes_all_packets_of_long_reads() {
    const LEN: u32 = 4 << 20;
    let [(a, to_b), (b, _to_a)] = pair(LEN as usize, Some(Access::Read));
    b.fill(0, &pattern(LEN as usize, 4));
    let before = refused_packets(&b);
    let read = |_| a.request(Verb::Read, vec![a.piece(0, LEN)], &b.region, 0);
    to_b.queue.post((0..4).map(read).collect()).map_err(|refused| refused.error).unwrap();
    assert!(a.finish(&to_b, 4).iter().all(|done| done.result == Ok(())));
    assert!(a.bytes(0, LEN.into()) == pattern(LEN as usize, 4));
    assert_eq!(refused_packets(&b) - before, 0, "raise net.core.netdev_max_backlog");
}

#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn a_full_queue_of_mostly_unsignalled_requests_completes_in_order() {
    let [(a, to_b), (b, _to_a)] = pair(MEMORY, Some(Access::ReadWrite));
    a.fill(0, &pattern(128 * 8, 3));
    let request = |n: u64| Request {
        token: n,
        ..a.request(Verb::Write, vec![a.piece(n * 8, 8)], &b.region, (127 - n) * 8)
    };
    to_b.queue.post((0..128).map(request).collect()).map_err(|refused| refused.error).unwrap();
    let done = a.finish(&to_b, 128);
    assert!(done.iter().all(|done| done.result == Ok(())));
    assert!(done.iter().map(|done| done.request.token).eq(0..128));
    for n in 0..128 {
        assert_eq!(b.bytes((127 - n) * 8, 8), a.bytes(n * 8, 8));
    }
    assert_eq!(to_b.queue.room(), 128);
}

#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn keys_ranges_and_rights_are_enforced_by_the_peer() {
    let a = Side::new(0, MEMORY, Some(Access::ReadWrite));
    let b = Side::new(1, MEMORY, Some(Access::ReadWrite));
    b.fill(0, &pattern(4096, 4));
    let read_only = MemoryRegion::new(&b.device, &b.memory, Some(Access::Read)).unwrap();
    let local_only = MemoryRegion::new(&b.device, &b.memory, None).unwrap();
    let dead = MemoryRegion::new(&b.device, &b.memory, Some(Access::ReadWrite)).unwrap();
    let (dead_address, dead_key) = (dead.address(), dead.remote_key());
    drop(dead);

    let ok = a.request(Verb::Read, vec![a.piece(0, 4096)], &b.region, 0);
    let check = |name: &str, request: Request| {
        // A refused request ends its connection, so each has one of its own.
        let (_to_a, to_b) = join(&a, &b);
        assert_eq!(a.run(&to_b, ok.clone()), Ok(()), "before: {name}");
        assert_eq!(a.run(&to_b, request), Err(Failure::RemoteAccess), "{name}");
        let refused = to_b.queue.post(vec![ok.clone()]).unwrap_err();
        assert!(matches!(refused.error, Error::Broken), "after: {name}");
        assert_eq!(refused.requests.len(), 1);
    };
    let write = |region, at| a.request(Verb::Write, vec![a.piece(0, 4096)], region, at);
    let read = |region, at| a.request(Verb::Read, vec![a.piece(0, 4096)], region, at);
    let (key, b_region) = (b.region.remote_key(), &b.region);
    check("write, wrong key", Request { remote_key: key ^ 0x55, ..write(b_region, 0) });
    check("read, wrong key", Request { remote_key: key ^ 0x55, ..read(b_region, 0) });
    check("write past the end", write(b_region, MIB - 4095));
    check("read past the end", read(b_region, MIB - 4095));
    check("write before the start", Request { remote_address: b_region.address() - 1, ..write(b_region, 0) });
    check("write, read-only region", write(&read_only, 0));
    check("read, local region", read(&local_only, 0));
    check(
        "read, revoked region",
        Request { remote_address: dead_address, remote_key: dead_key, ..read(b_region, 0) },
    );
    assert_eq!(b.bytes(0, 4096), pattern(4096, 4), "refused writes change nothing");
}

#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn what_cannot_be_posted_is_handed_back() {
    let [(a, to_b), (b, _to_a)] = pair(MEMORY, Some(Access::ReadWrite));
    let request = |local| a.request(Verb::Read, local, &b.region, 0);
    let check = |requests: Vec<Request>, expected: &str| {
        let count = requests.len();
        let refused = to_b.queue.post(requests).unwrap_err();
        assert_eq!(refused.requests.len(), count);
        assert!(refused.error.to_string().contains(expected), "{}", refused.error);
    };
    check(vec![request(vec![])], "0 pieces");
    check(vec![request(vec![a.piece(0, 1); 17])], "17 pieces; 1 to 16");
    check(vec![request(vec![a.piece(0, 0)])], "0 B");
    check(vec![request(vec![a.piece(MIB, 1)])], "outside the registered");
    check(vec![request(vec![a.piece(u64::MAX, 1)])], "outside the registered");
    check(vec![request(vec![b.piece(0, 1)])], "not registered with");
    check(vec![request(vec![a.piece(0, 1)]); 129], "do not fit");
    assert_eq!(a.run(&to_b, request(vec![a.piece(0, 4096)])), Ok(()), "none of it broke the connection");
}

#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn closing_returns_every_request() {
    let [(a, to_b), (b, _to_a)] = pair(MEMORY, Some(Access::ReadWrite));
    let request = |n| Request { token: n, ..a.request(Verb::Read, vec![a.piece(0, 1 << 19)], &b.region, 0) };
    to_b.queue.post((0..32).map(request).collect()).map_err(|refused| refused.error).unwrap();
    let done = to_b.queue.close();
    assert!(done.iter().map(|done| done.request.token).eq(0..32));
    let failed: Vec<_> = done.iter().filter_map(|done| done.result.err()).collect();
    assert!(failed.iter().all(|&failure| failure == Failure::Flushed));
    assert!(matches!(to_b.queue.post(vec![request(0)]).unwrap_err().error, Error::Broken));
}
