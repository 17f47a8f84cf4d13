//! The index beside a map.

use crate::index::Index;
use kvasir_protocol::block::BlockKey;
use proptest::prelude::*;
use std::collections::HashMap;

#[derive(Clone, Copy, Debug)]
enum Step {
    Insert(u8),
    Show(u8),
    Remove(u8),
}

const SLOTS: usize = 24;

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => any::<u8>().prop_map(Step::Insert),
        2 => any::<u8>().prop_map(Step::Show),
        2 => any::<u8>().prop_map(Step::Remove),
    ]
}

proptest! {
    /// As a map does, also when it is full and hashes are the same.
    #[test]
    fn it_agrees_with_a_map(
        steps in prop::collection::vec(step(), 0..300), homes in prop::collection::vec(any::<u32>(), 5),
    ) {
        let index = Index::new(SLOTS);
        let mut map: HashMap<u8, (u32, bool)> = HashMap::new();
        let mut free: Vec<u32> = (0..SLOTS as u32).collect();
        let key = |n: u8| BlockKey(u128::from(n) << 64 | 7);
        let hash = |n: u8| u64::from(homes[usize::from(n) % homes.len()]);
        for step in steps {
            match step {
                Step::Insert(n) => if let (false, Some(local)) = (map.contains_key(&n), free.pop()) {
                    index.insert(hash(n), key(n), local);
                    map.insert(n, (local, false));
                },
                Step::Show(n) => if let Some((local, shown)) = map.get_mut(&n) {
                    index.show(hash(n), *local);
                    *shown = true;
                },
                Step::Remove(n) => if let Some((local, _)) = map.remove(&n) {
                    index.remove(hash(n), local);
                    free.push(local);
                },
            }
            for n in 0..=255 {
                let is = map.get(&n);
                prop_assert_eq!(index.find(hash(n), key(n)), is.map(|(local, _)| *local));
                let shown = is.filter(|(_, shown)| *shown).map(|(local, _)| *local);
                prop_assert_eq!(index.shown(hash(n), key(n)), Ok(shown));
            }
        }
    }
}
