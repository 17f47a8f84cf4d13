//! Blocks that lie in many places, against a real host.

use super::*;

/// Lengths of runs: none, few bytes, more than is read ahead, more than is summed at once. 800,108 B in total.
const LENS: [usize; 7] = [1, 0, 100, 20_000, 480_000, 7, 300_000];
const SIZE: u32 = 800_108;

/// `bytes` in parts of these lengths; what they leave over is the last.
fn cut<'a>(mut bytes: &'a [u8], lens: &[usize]) -> Vec<&'a [u8]> {
    let mut parts: Vec<&[u8]> = lens.iter().map(|&len| bytes.split_off(..len).unwrap()).collect();
    parts.push(bytes);
    parts
}

fn cut_mut<'a>(mut bytes: &'a mut [u8], lens: &[usize]) -> Vec<&'a mut [u8]> {
    let mut parts: Vec<&mut [u8]> = lens.iter().map(|&len| bytes.split_off_mut(..len).unwrap()).collect();
    parts.push(bytes);
    parts
}

#[test]
fn gathered_and_scattered_blocks_are_those_that_were_stored() {
    let host = Host::small();
    for client in host.both() {
        let data = [bytes_of(1, SIZE), bytes_of(2, 50)];
        let runs = [cut(&data[0], &LENS), cut(&data[1], &[])];
        let metas = [BlockMeta::single(key(1), SIZE), BlockMeta::single(key(2), 50)];
        let stored = client.put_gathered(&[(metas[0], &runs[0]), (metas[1], &runs[1])]).unwrap();
        assert!(stored.iter().all(|put| matches!(put, Ok(Put::Stored))), "{stored:?}");
        let whole = client.get(&[key(1)], 0).unwrap();
        assert_eq!(whole[0].as_ref().unwrap().bytes().unwrap(), data[0]);
        assert_eq!(client.verify(&[key(1), key(2)]).unwrap(), [true, true], "by the host, too");

        // Cut elsewhere, with room left over in the last run of each.
        let mut buffers = vec![vec![0xee; SIZE as usize + 9]; 3];
        let cuts: [&[usize]; 3] = [&[400_000, 0, 3, 17_000], &[], &[11; 3]];
        let mut parts: Vec<Vec<&mut [u8]>> =
            buffers.iter_mut().zip(cuts).map(|(buffer, cut)| cut_mut(buffer, cut)).collect();
        let mut blocks: Vec<&mut [&mut [u8]]> = parts.iter_mut().map(Vec::as_mut_slice).collect();
        let found = client.get_scattered(&[key(1), key(9), key(2)], 0, &mut blocks).unwrap();
        assert_eq!(found, [Some(SIZE), None, Some(50)]);
        assert!(buffers[0][..SIZE as usize] == data[0] && buffers[2][..50] == data[1]);
        for (buffer, filled) in buffers.iter().zip([SIZE as usize, 0, 50]) {
            assert!(buffer[filled..].iter().all(|&byte| byte == 0xee), "nothing is written behind a block");
        }

        let small = client.get_scattered(&[key(2)], 0, &mut [&mut [&mut [0; 20], &mut [0; 29]]]).unwrap_err();
        assert!(matches!(small, ClientError::Buffer { size: 50, len: 49 }), "{small}");
        let short = client.put_gathered(&[(BlockMeta::single(key(3), 9), &[b"five", b"four"])]).unwrap_err();
        assert!(matches!(short, ClientError::Size { len: 8, size: 9 }), "{short}");
        assert_eq!(client.remove(&[key(1), key(2)]).unwrap(), [true, true], "the connection still works");
    }
}

#[test]
fn an_engines_blocks_are_saved_and_loaded_by_their_numbers() {
    const BLOCKS: usize = 4;
    /// Of K and of V, in each of three layers.
    const RUN: usize = 3000;
    let host = Host::small();
    for client in host.both() {
        let mut memory = bytes_of(5, (6 * BLOCKS * RUN) as u32);
        let before = memory.clone();
        let base = memory.as_mut_ptr().expose_provenance();
        let runs: Vec<Run> =
            (0..6).map(|layer| Run { addr: base + layer * BLOCKS * RUN, len: RUN, stride: RUN }).collect();
        let size = 6 * RUN as u32;
        let meta = |n| BlockMeta::single(key(n), size);
        let block = |memory: &[u8], n: usize| -> Vec<u8> {
            (0..6).flat_map(|layer| memory[(layer * BLOCKS + n) * RUN..][..RUN].to_vec()).collect()
        };
        // Looked at through its address alone while there is a plan of it.
        #[expect(unsafe_code, reason = "what an engine does")]
        // SAFETY: the runs lie in `memory`, which lives longer than the plan and is used by its name after that only.
        let plan = unsafe { Plan::new(&runs, BLOCKS) }.unwrap();
        let saved = client.save(&plan, &[(meta(1), 1), (meta(3), 3)]).unwrap();
        assert!(saved.iter().all(|put| matches!(put, Ok(Put::Stored))), "{saved:?}");
        put(&client, 7, size - 1).unwrap();
        put(&client, 8, size + 1).unwrap();

        let loaded = client.load(&plan, &[(key(3), 0), (key(9), 1), (key(7), 2), (key(8), 2)], 0).unwrap();
        assert!(matches!(loaded[..2], [Ok(true), Ok(false)]), "{loaded:?}");
        for (loaded, size) in loaded[2..].iter().zip([size - 1, size + 1]) {
            let error = loaded.as_ref().unwrap_err().to_string();
            assert!(error.contains(&format!("stored with {size} B")), "{error}");
        }
        assert_eq!(host.store.metrics().leases, 0, "given back at once");
        assert!(matches!(client.load(&plan, &[(key(1), 4)], 0), Err(ClientError::NoBlock { block: 4, .. })));
        assert!(matches!(client.save(&plan, &[(meta(4), 4)]), Err(ClientError::NoBlock { .. })));
        let other = client.save(&plan, &[(BlockMeta::single(key(4), size - 1), 0)]).unwrap_err();
        assert!(matches!(other, ClientError::Size { .. }), "{other}");
        drop(plan);

        assert!(block(&memory, 0) == block(&before, 3), "block 3 lies in the place of block 0 now");
        assert!(block(&memory, 1) == block(&before, 1) && block(&memory, 3) == block(&before, 3));
        let stored = client.get(&[key(1)], 0).unwrap();
        assert_eq!(stored[0].as_ref().unwrap().bytes().unwrap(), block(&before, 1));
        client.release(stored.into_iter().flatten()).unwrap();
        client.remove(&[1, 3, 7, 8].map(key)).unwrap();
    }
}

#[test]
fn damaged_bytes_are_no_hit_wherever_they_were_copied_to() {
    let host = Host::small();
    for client in host.both() {
        put(&client, 1, 70_000).unwrap();
        let slot = host.store.list(0, 1).0[0];
        let lookup = host.store.get(host.store.new_owner(), &[slot.key], 0, 0).unwrap()[0];
        let kvasir_store::dram::Lookup::Hit(lease) = lookup else { panic!("{lookup:?}") };
        assert!(host.store.pool().mapping().write(lease.offset + 69_999, b"!"));
        let mut buffer = vec![0; 70_000];
        let mut runs = cut_mut(&mut buffer, &[10, 60_000]);
        assert_eq!(client.get_scattered(&[key(1)], 0, &mut [&mut runs]).unwrap(), [None]);
        assert_eq!(client.checksum_failures(), 1);
        assert_eq!(client.exists(&[key(1)]).unwrap(), [false], "the host dropped it");
    }
    assert_eq!(host.store.metrics().checksum_failures, 2);
}
