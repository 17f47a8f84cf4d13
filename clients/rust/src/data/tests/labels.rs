//! Blocks with labels: whatever lies under a key, only the block that was asked for is loaded.

use super::*;

const SIZE: u32 = 70_000;

/// Pieces of memory of the test's own.
fn pieces(memory: &mut [Vec<u8>]) -> Arc<Plan> {
    let each = memory.iter_mut().map(|piece| (piece.as_mut_ptr().expose_provenance(), piece.len()));
    #[expect(unsafe_code, reason = "what an engine does")]
    // SAFETY: the tests keep the pieces, and look at them by name only between calls that use the plan.
    Arc::new(unsafe { Plan::of_pieces(&each.collect::<Vec<_>>()) }.unwrap())
}

fn ours() -> Namespace {
    Namespace::new([7; 32])
}

/// What to say of block `n`: its key and size, and its label as `namespace` has it.
fn named(namespace: &Namespace, n: u64, payload: u32) -> (BlockMeta, Label) {
    // Always under our key.
    let key = ours().key(&n.to_le_bytes());
    (BlockMeta::single(key, payload + Label::BYTES), namespace.label(&n.to_le_bytes(), payload))
}

fn load(client: &Client, plan: &Plan, n: u64, block: usize, size: u32) -> Result<bool, ClientError> {
    let (meta, label) = named(&ours(), n, size);
    client.load_labelled(plan, &[(meta.key, block)], &[label], 0).unwrap().remove(0)
}

#[test]
fn blocks_of_many_sizes_come_back_by_their_labels() {
    let host = Host::small();
    for client in host.both() {
        let sizes = [SIZE, 1, 4096];
        let mut saved: Vec<Vec<u8>> = sizes.iter().map(|&size| bytes_of(size.into(), size)).collect();
        let plan = pieces(&mut saved);
        let (blocks, labels): (Vec<_>, Vec<_>) = (0..3)
            .map(|n| {
                let (meta, label) = named(&ours(), n as u64, sizes[n]);
                ((meta, n), label)
            })
            .unzip();
        let stored = client.save_labelled(&plan, &blocks, &labels).unwrap();
        assert!(stored.iter().all(|put| matches!(put, Ok(Put::Stored))), "{stored:?}");
        let whole = client.get(&[blocks[2].0.key], 0).unwrap();
        let bytes = whole[0].as_ref().unwrap().bytes().unwrap().to_vec();
        assert!(
            bytes[..4096] == saved[2] && &bytes[4096..4100] == b"KVLB",
            "the label is behind the payload"
        );
        drop(whole);

        let mut loaded: Vec<Vec<u8>> = sizes.iter().map(|&size| vec![0xee; size as usize]).collect();
        let plan = pieces(&mut loaded);
        let keys: Vec<_> = blocks.iter().map(|(meta, n)| (meta.key, *n)).collect();
        let found = client.load_labelled(&plan, &keys, &labels, 0).unwrap();
        assert!(found.iter().all(|found| matches!(found, Ok(true))), "{found:?}");
        assert!(loaded == saved);
        let few = client.load_labelled(&plan, &keys, &labels[..2], 0).unwrap_err();
        assert!(matches!(few, ClientError::Labels { labels: 2, blocks: 3 }), "{few}");
        client.remove(&keys.iter().map(|(key, _)| *key).collect::<Vec<_>>()).unwrap();
    }
}

#[test]
fn what_is_not_the_block_that_was_asked_for_is_not_loaded() {
    let host = Host::small();
    let theirs = Namespace::new([8; 32]);
    for endpoint in [host.unix(), host.tcp()] {
        // Whether checksums are compared changes nothing: those of these blocks are right.
        for verify in [true, false] {
            let client = Client::connect(&endpoint, Options { verify, ..options() }).unwrap();
            let mut memory = [bytes_of(3, SIZE), vec![0; SIZE as usize]];
            let plan = pieces(&mut memory);
            let save = |n, (meta, label): (BlockMeta, Label)| {
                let put = client.save_labelled(&plan, &[(meta, n)], &[label]).unwrap().remove(0);
                assert_eq!(put.unwrap(), Put::Stored);
            };
            save(0, named(&ours(), 1, SIZE));
            save(0, named(&theirs, 2, SIZE));
            save(0, (named(&ours(), 3, SIZE).0, named(&ours(), 1, SIZE).1));
            save(0, (named(&ours(), 4, SIZE).0, ours().label(&4_u64.to_le_bytes(), SIZE - 1)));
            // No label at all, of the right size and of the payload's.
            let bare = |n: u64, size| {
                let meta = BlockMeta { size, ..named(&ours(), n, SIZE).0 };
                assert_eq!(client.put(&meta, &bytes_of(n, size)).unwrap(), Put::Stored);
            };
            bare(5, SIZE + Label::BYTES);
            bare(6, SIZE);

            assert!(load(&client, &plan, 1, 1, SIZE).unwrap());
            assert!(!load(&client, &plan, 9, 1, SIZE).unwrap(), "it is not there");
            let faults = [LabelFault::Namespace, LabelFault::Hash, LabelFault::Length, LabelFault::Damaged];
            for (n, expected) in (2..).zip(faults) {
                let error = load(&client, &plan, n, 1, SIZE).unwrap_err();
                let ClientError::OtherLabel { fault, .. } = error else { panic!("{error}") };
                assert_eq!(fault, expected, "block {n}");
            }
            let error = load(&client, &plan, 6, 1, SIZE).unwrap_err();
            assert!(matches!(error, ClientError::OtherSize { size: SIZE, .. }), "{error}");
            assert_eq!(client.options.counts.label_failures.load(Ordering::Relaxed), 4);
            assert_eq!(client.checksum_failures(), 0);
            drop(plan);
            client.remove(&(1..7).map(|n| named(&ours(), n, 0).0.key).collect::<Vec<_>>()).unwrap();
        }
    }
    assert_eq!(host.store.metrics().leases, 0);
}

#[test]
fn jobs_with_labels_say_which_blocks_were_not_theirs() {
    let host = Host::small();
    let options = options();
    for endpoint in [host.unix(), host.tcp()] {
        let jobs = Jobs::start(&endpoint, &options, JobOptions::default()).unwrap();
        let mut memory: Vec<Vec<u8>> = (1..4).map(|n| bytes_of(n.into(), 1000 * n)).collect();
        let plan = pieces(&mut memory);
        let theirs = Namespace::new([8; 32]);
        let (blocks, labels): (Vec<_>, Vec<_>) = [ours(), theirs, ours()]
            .iter()
            .enumerate()
            .map(|(n, namespace)| {
                let (meta, label) = named(namespace, n as u64, 1000 * (n as u32 + 1));
                ((meta, n), label)
            })
            .unzip();
        let keys: Vec<_> = blocks.iter().map(|(meta, n)| (meta.key, *n)).collect();
        let refused = jobs.save_labelled(1, &plan, blocks.clone(), labels[1..].to_vec()).unwrap_err();
        assert_eq!(refused, JobError::Labels { labels: 2, blocks: 3 });
        jobs.save_labelled(2, &plan, blocks, labels).unwrap();
        let saved = super::jobs::wait(&jobs, 1).remove(0);
        assert!(saved.ok && saved.bytes == 6000, "{saved:?}");
        let expected = (0..3).map(|n| named(&ours(), n, 1000 * (n as u32 + 1)).1).collect();
        jobs.load_labelled(3, &plan, keys.clone(), expected).unwrap();
        let loaded = super::jobs::wait(&jobs, 1).remove(0);
        assert_eq!((loaded.ok, &loaded.blocks[..], loaded.bytes), (false, &[true, false, true][..], 4000));
        assert!(matches!(loaded.error, Some(ClientError::OtherLabel { fault: LabelFault::Namespace, .. })));
        drop((jobs, plan));
        assert_eq!(memory[2], bytes_of(3, 3000));
        let client = Client::connect(&endpoint, options.clone()).unwrap();
        client.remove(&keys.iter().map(|(key, _)| *key).collect::<Vec<_>>()).unwrap();
        assert_eq!(client.boot(), options.counts.boot.load(Ordering::Relaxed));
    }
    assert_eq!(options.counts.label_failures.load(Ordering::Relaxed), 2, "in both, with the same options");
    assert_eq!(options.counts.connections.load(Ordering::Relaxed), 6);
}

#[test]
fn jobs_that_are_closed_do_not_wait_for_a_host_that_says_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("half.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let mut memory = vec![vec![0; 10]];
    let plan = pieces(&mut memory);
    let endless = Duration::from_secs(3600);
    let patient = Options { timeout: endless, ..Options::default() };
    let times = JobOptions { load_threads: 1, load_time: endless, ..JobOptions::default() };
    let jobs = Jobs::start(&Endpoint::Unix(path), &patient, times).unwrap();
    jobs.load(1, &plan, vec![(key(1), 0)]).unwrap();
    // It lets the client in, takes its request, and leaves it there.
    let (mut stream, _) = listener.accept().unwrap();
    let (header, _) = super::liar::next(&mut stream).unwrap();
    let mut frame = Vec::new();
    super::liar::hello(false).encode(header.request, 0, &mut frame);
    stream.write_all(&frame).unwrap();
    super::liar::next(&mut stream).unwrap();
    jobs.close();
    assert!(!super::jobs::wait(&jobs, 1)[0].ok);
    assert_eq!(Arc::strong_count(&plan), 1);
}
