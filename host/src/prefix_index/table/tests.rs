use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

/// A hash by the upper half of what it is mixed to: hashes of neighbouring tags share lines, equal ones differ below.
fn hash(tag: u32, below: u32) -> u64 {
    /// 0x9e37_79b9_7f4a_7c15 times this is 1, modulo 2^64.
    const INVERSE: u64 = 0xf1de_83e1_9937_733d;
    let mixed = ((u64::from(tag) << 32) | u64::from(below)).wrapping_mul(INVERSE);
    mixed ^ (mixed >> 32)
}

#[derive(Clone, Debug)]
enum Op {
    Insert(u64),
    Remove(u64),
}

fn op() -> impl Strategy<Value = Op> {
    // Few shards, in which some homes are far more popular than others.
    let tag = (0..2u32, 0..40u32, prop_oneof![Just(0u32), 0..3u32]);
    let hash =
        (tag, 0..4u32).prop_map(|((shard, line, tag), below)| hash(shard << 24 | line << 18 | tag, below));
    prop_oneof![3 => hash.clone().prop_map(Op::Insert), 2 => hash.prop_map(Op::Remove)]
}

proptest! {
    #[test]
    fn agrees_with_a_map(ops in prop::collection::vec(op(), 1..600)) {
        let (mut table, mut model, mut hashes) = (Table::default(), HashMap::new(), Vec::new());
        for op in ops {
            match op {
                Op::Insert(hash) => {
                    let value = hashes.len() as u32;
                    hashes.push(hash);
                    let new = table.insert(hash, value, |value| hashes[value as usize] == hash);
                    prop_assert_eq!(new, !model.contains_key(&hash));
                    model.entry(hash).or_insert(value);
                }
                Op::Remove(hash) => {
                    if let Some(value) = model.remove(&hash) {
                        table.remove(hash, value);
                    }
                    table.remove(hash, u32::MAX);
                }
            }
            prop_assert_eq!(table.len(), model.len());
        }
        for &hash in &hashes {
            let found = match table.probe(hash, |value| hashes[value as usize] == hash) {
                Probe::Found(value, _) => Some(value),
                Probe::Vacant(_) => None,
            };
            prop_assert_eq!(found, model.get(&hash).copied());
        }
    }
}

#[test]
fn its_load_stays_the_same_while_it_grows() {
    let mut table = Table::default();
    for i in 0..1u32 << 17 {
        table.insert(hash(i.wrapping_mul(0x9e37_79b9), i), i, |_| false);
        if i > 1 << 14 && i.is_multiple_of(1 << 10) {
            let bytes = table.bytes() as f64 / table.len() as f64;
            assert!((12.0..16.0).contains(&bytes), "{i}: {bytes}");
        }
    }
}

#[test]
fn hashes_are_made_as_the_test_means_it() {
    assert_eq!(tag(hash(0x1234_5678, 0x9abc_def0)), 0x1234_5678);
}
