//! The corpus of `tests/corpus/policy-0.1`: recorded inputs of every slot, which each default policy, as component and
//! natively, must answer as it did when they were recorded.
//!
//! A policy that is to answer otherwise from now on, or a new one, gets its answers written by
//! `KVASIR_WRITE_CORPUS=1 cargo test -p kvasir-tests --test scenarios corpus`; look at the difference before it is committed. The inputs
//! follow from a seed and stay as they are.

use kvasir::policy::record::{Call, FORMAT, Player, PolicyOf, Push, Record, Records};
use kvasir::policy::{Engine, PolicyConfig, SlotKind, Source, builtin_names};
use kvasir_policy::admitter::{BLOCK_WORDS, Block, Forecast, Load};
use kvasir_policy::evictor::{Event, EventKind, Layout as Pool, NO_SLOT, TierRow};
use kvasir_policy::scheduler::{Column, DecodeRow, Layout, Link, PrefillRow, Question, Request};
use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;

/// Inputs of each slot.
const INPUTS: u64 = 24;
/// Those recorded first, when rows and the layout were shorter and the later columns not there: policies go on answering them.
const INPUTS_AT_FIRST: u64 = 14;
/// How long the rows of the two tables and the layout were then.
const LENGTHS_AT_FIRST: [usize; 3] = [17, 19, 8];
/// Those recorded before a prefill row told what sending costs, and how long it was.
const INPUTS_WITHOUT_SENDING: u64 = 20;
const WITHOUT_SENDING: usize = 19;

fn file(slot: SlotKind) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus/policy-0.1");
    folder.join(format!("{slot}.jsonl"))
}

/// SplitMix64: the corpus must not change with a library.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ x >> 31) % u64::from(limit.max(1))) as u32
    }

    fn chance(&mut self, one_in: u32) -> bool {
        self.below(one_in) == 0
    }

    fn float(&mut self, limit: u32) -> f32 {
        self.below(limit * 256) as f32 / 256.0
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn push(name: &str, words: Vec<u32>) -> Push {
    (name.to_owned(), words)
}

fn call(name: &str, scalars: Vec<u64>, lists: Vec<Vec<u32>>) -> Call {
    Call { name: name.to_owned(), scalars, lists }
}

/// Tables of up to eight instances, some of them on both sides, over three domains. `lengths` of the rows and the layout.
fn tables(random: &mut Random, lengths: [usize; 3]) -> (Vec<Push>, u32, u32) {
    let amended = lengths != LENGTHS_AT_FIRST;
    let [prefill_row, decode_row, layout_len] = lengths;
    let (prefill, decode) = (1 + random.below(8), 1 + random.below(8));
    let peers = random.below(prefill.min(decode) + 1);
    let peer = |slot: u32| (slot < peers).then_some(slot as u16);
    let mut prefill_rows = Vec::new();
    for slot in 0..prefill {
        let row = PrefillRow {
            slot: slot as u16,
            available: !random.chance(6),
            busy_until: 1_000.0 + random.float(2_000),
            cost_fixed: 1.0 + random.float(10),
            cost_per_token: 0.01 + random.float(1) / 8.0,
            cost_per_pair: random.float(1) / 1e6,
            transfer_fixed: random.float(4),
            transfer_per_block: random.float(16),
            queued: random.below(9),
            free_blocks: random.below(4_000),
            capacity_blocks: 4_000,
            reported_at: random.float(1_000),
            identity: slot + 1,
            peer: peer(slot),
            host: (!random.chance(3)).then(|| random.below(4)),
            domain: random.below(3),
            waiting: random.chance(2).then(|| random.below(9)),
            adapters: amended.then(|| random.below(3)),
            adapters_max: (amended && random.chance(2)).then(|| 1 + random.below(2)),
            send_per_block: if prefill_row > WITHOUT_SENDING { random.float(16) } else { 0.0 },
        };
        prefill_rows.extend(&row.encode()[..prefill_row]);
    }
    let mut decode_rows = Vec::new();
    for slot in 0..decode {
        let row = DecodeRow {
            slot: slot as u16,
            available: !random.chance(6),
            sequences: random.below(64),
            context_tokens: random.below(200_000).into(),
            free_blocks: random.below(4_000),
            capacity_blocks: 4_000,
            step_fixed: 5.0 + random.float(20),
            step_per_sequence: random.float(1),
            step_per_token: random.float(1) / 4_096.0,
            arriving_sequences: random.below(4),
            arriving_tokens: random.below(20_000).into(),
            reported_at: random.float(1_000),
            identity: slot + 100,
            peer: peer(slot),
            host: None,
            domain: random.below(3),
            waiting: None,
            handover_fixed: random.float(4),
            handover_per_block: random.float(8),
            adapters: amended.then(|| random.below(3)),
            adapters_max: (amended && random.chance(2)).then(|| 1 + random.below(2)),
        };
        decode_rows.extend(&row.encode()[..decode_row]);
    }
    let link = Link { fixed: random.float(5), factor: 1.0 + random.float(3), under_way: random.below(3) };
    let layout = Layout {
        domains: 3,
        prefill_row: prefill_row as u32,
        decode_row: decode_row as u32,
        run: 7,
        ..Layout::of(prefill, decode, 512)
    };
    let mut pushed = vec![
        push("open", layout.encode()[..layout_len].to_vec()),
        push("update-prefill", bits(&prefill_rows)),
        push("update-decode", bits(&decode_rows)),
        push("update-links", bits(&[link.encode(0, 1), link.encode(2, 0)].concat())),
    ];
    if random.chance(2) {
        pushed.push(push("set-thresholds", bits(&[1.0 + random.float(2)])));
    }
    (pushed, prefill, decode)
}

fn question(random: &mut Random, prefill: u32, decode: u32, amended: bool) -> Question {
    let blocks = 1 + random.below(32);
    let slo = |random: &mut Random| if random.chance(2) { f32::INFINITY } else { random.float(4_000) };
    let request = Request {
        prompt_tokens: blocks * 512 - random.below(512),
        output_tokens: random.below(500),
        class: random.below(4),
        tenant: random.below(4),
        priority: random.below(3),
        hints: random.below(4),
        session: u64::from(random.below(3)) << 40,
        seed: u64::from(random.below(u32::MAX)) << 13,
        ttft_slo: slo(random),
        tbt_slo: slo(random),
        model: random.below(2),
        adapter: random.below(2),
        session_memo: u64::from(random.below(9)),
        tenant_memo: u64::from(random.below(50_000)) << 20,
    };
    let mut question =
        Question::new(1_000.0 + random.float(1_000), &request, prefill as usize, decode as usize);
    let slots = |column| match column {
        Column::PrefixAtDecode
        | Column::EligibleDecode
        | Column::PrefixAtDecodeInHbm
        | Column::PrefixAtDecodeInDram => decode,
        _ => prefill,
    };
    for column in [
        Column::Prefix,
        Column::PrefixInHbm,
        Column::PrefixInDram,
        Column::EligiblePrefill,
        Column::PrefixAtDecode,
        Column::EligibleDecode,
        Column::PrefixAtDecodeInHbm,
        Column::PrefixAtDecodeInDram,
    ] {
        let later = matches!(column, Column::PrefixAtDecodeInHbm | Column::PrefixAtDecodeInDram);
        if later && !amended || random.chance(3) {
            continue;
        }
        let limit =
            if matches!(column, Column::EligiblePrefill | Column::EligibleDecode) { 3 } else { blocks + 1 };
        let values: Vec<u32> = (0..slots(column)).map(|_| random.below(limit)).collect();
        question = question.with(column, &values);
    }
    question
}

fn scheduling(random: &mut Random, n: u64) -> (Vec<Push>, Call) {
    let amended = n >= INPUTS_AT_FIRST;
    let now = Layout::default();
    let prefill_row = if n < INPUTS_WITHOUT_SENDING { WITHOUT_SENDING } else { now.prefill_row as usize };
    let lengths = [prefill_row, now.decode_row as usize, now.encode().len()];
    let (mut pushed, prefill, decode) = tables(random, if amended { lengths } else { LENGTHS_AT_FIRST });
    // Decisions before this one, for policies that remember them.
    for _ in 0..random.below(4) {
        let before = question(random, prefill, decode, amended);
        pushed.push(push("schedule", [&[before.now().to_bits()], before.words()].concat()));
    }
    let asked = question(random, prefill, decode, amended);
    (pushed, call("schedule", vec![asked.now().to_bits().into()], vec![asked.words().to_vec()]))
}

fn eviction(random: &mut Random, n: u64) -> (Vec<Push>, Call) {
    let slots = 8 + random.below(40);
    let tier = |tier, cost| TierRow {
        tier,
        capacity_mib: 1_024.0,
        used_mib: 512.0,
        load_fixed_ms: cost,
        load_ms_per_mib: cost / 2.0,
        takes_copies: true,
    };
    let rows = [tier(2, 0.0).encode(), tier(3, 0.5).encode(), tier(4, 8.0).encode()].concat();
    let mut pushed = vec![push("open", Pool::of(slots).encode().to_vec()), push("update-tiers", bits(&rows))];
    let mut words = vec![1_000, 0];
    let mut time_ms = 1_000;
    for slot in 0..slots {
        time_ms += u64::from(random.below(400));
        let parent = if slot % 4 == 0 { NO_SLOT } else { slot - 1 };
        event(EventKind::Insert, slot, parent, time_ms).encode(1_000, &mut words);
    }
    pushed.push(push("on-events", words));
    let hits = random.below(60);
    pushed.push(uses(random, slots, hits, 30_000));
    if n >= INPUTS_AT_FIRST {
        let (mut more, can_go) = comings_and_goings(random, slots);
        pushed.append(&mut more);
        return (pushed, call("select-victims", vec![90_000, u64::from(1 + random.below(can_go))], vec![]));
    }
    let chosen = random.below(slots / 2);
    pushed.push(push("select-victims", vec![60_000, 0, chosen]));
    let hits = random.below(9);
    pushed.push(uses(random, slots, hits, 70_000));
    (pushed, call("select-victims", vec![90_000, u64::from(1 + random.below(slots - chosen))], vec![]))
}

/// Every kind of event, to a pool of so many blocks of which a policy then has to choose all but the pinned. Returns as well how many
/// can be chosen afterwards.
fn comings_and_goings(random: &mut Random, slots: u32) -> (Vec<Push>, u32) {
    let pinned: Vec<bool> = (0..slots).map(|_| random.chance(5)).collect();
    let of_slots = |from_ms: u64, kind: &mut dyn FnMut(u32) -> Option<EventKind>| {
        let mut words = vec![1_000, 0];
        for slot in 0..slots {
            let Some(kind) = kind(slot) else { continue };
            let parent_or_uses = if kind == EventKind::Insert { NO_SLOT } else { 1 };
            event(kind, slot, parent_or_uses, from_ms + u64::from(slot)).encode(1_000, &mut words);
        }
        push("on-events", words)
    };
    let mut stays = pinned.clone();
    let pins = of_slots(40_000, &mut |slot| pinned[slot as usize].then_some(EventKind::Pin));
    let all =
        push("select-victims", vec![50_000, 0, pinned.iter().filter(|pinned| !**pinned).count() as u32]);
    let back = of_slots(60_000, &mut |slot| {
        let back = [None, Some(EventKind::Insert), Some(EventKind::Hit), Some(EventKind::Keep)];
        let kind = back[random.below(4) as usize].filter(|_| !pinned[slot as usize]);
        stays[slot as usize] |= kind.is_some();
        kind
    });
    let left = of_slots(70_000, &mut |slot| {
        let leaves = random.chance(6) && std::mem::take(&mut stays[slot as usize]);
        leaves.then_some(EventKind::Remove)
    });
    let unpinned: Vec<bool> = pinned.iter().map(|pinned| *pinned && random.chance(2)).collect();
    let unpins = of_slots(80_000, &mut |slot| {
        (unpinned[slot as usize] && stays[slot as usize]).then_some(EventKind::Unpin)
    });
    let can_go = (0..slots as usize).filter(|&slot| stays[slot] && (!pinned[slot] || unpinned[slot]));
    (vec![pins, all, back, left, unpins], can_go.count() as u32)
}

fn event(kind: EventKind, slot: u32, parent_or_uses: u32, time_ms: u64) -> Event {
    Event {
        kind,
        replayed: false,
        class: (slot % 3) as u16,
        slot,
        parent_or_uses,
        depth: slot % 4,
        size_bytes: 4_096 << (slot % 3),
        time_ms,
        identity: u64::from(slot % 29) << 33 | 5,
        tenant: slot % 2,
    }
}

/// Uses of any blocks from a time on.
fn uses(random: &mut Random, slots: u32, hits: u32, from_ms: u64) -> Push {
    let mut words = vec![1_000, 0];
    for hit in 0..hits {
        event(EventKind::Hit, random.below(slots), 1, from_ms + u64::from(hit) * 100)
            .encode(1_000, &mut words);
    }
    push("on-events", words)
}

fn admission(random: &mut Random) -> (Vec<Push>, Call) {
    let load = Load {
        prefill_queue_mean_ms: random.float(900),
        prefill_queue_least_ms: random.float(100),
        decode_step_ms: random.float(80),
        decode_step_forecast_ms: random.float(90),
        admitted_per_second: random.float(9),
        decode_memory_used: random.float(1),
    };
    let pushed = vec![push("update-load", bits(&load.encode()))];
    if random.chance(2) {
        let block = |random: &mut Random| Block {
            class: random.below(4) as u16,
            uses: random.below(5) as u16,
            depth: random.below(64),
            size_bytes: random.below(1 << 20),
            last_offer_ms: random.chance(2).then(|| random.below(90_000)),
            tenant: random.below(3),
        };
        let blocks = (0..random.below(9)).flat_map(|_| block(random).encode()).collect();
        let tier = u64::from(3 + random.below(2));
        return (pushed, call("admit-blocks", vec![tier, BLOCK_WORDS as u64], vec![blocks]));
    }
    let forecast = Forecast {
        ttft: random.float(4_000),
        tbt: random.float(90),
        tenant_share: random.float(2),
        queue: random.float(900),
        prefill: random.float(900),
        transfer: random.float(90),
        cached_tokens: random.below(9_000) as f32,
        handover: random.float(9),
    };
    let request = question(random, 0, 0, false);
    (pushed, call("admit-request", vec![], vec![request.request_words().to_vec(), bits(&forecast.encode())]))
}

fn balancing(random: &mut Random, n: u64) -> (Vec<Push>, Call) {
    let column = |random: &mut Random| -> Vec<f32> {
        (0..random.below(9)).map(|_| if random.chance(5) { -1.0 } else { random.float(500) }).collect()
    };
    let mut cluster = vec![random.float(100), random.below(20) as f32, random.below(200) as f32];
    let columns = [(); 2].map(|()| bits(&column(random)));
    let now = random.below(1 << 30).into();
    // What was added later comes last, and a host without it is heard, too.
    if !n.is_multiple_of(4) {
        cluster.extend([random.float(100), random.float(100)]);
    }
    (Vec::new(), call("tick", vec![now], [vec![bits(&cluster)], columns.into()].concat()))
}

/// The `n`th input of a slot, as it is asked of a policy.
fn input(slot: SlotKind, n: u64, policy: &str) -> Record {
    let mut random = Random((slot as u64) << 32 | n);
    let (pushed, asked) = match slot {
        SlotKind::Scheduler => scheduling(&mut random, n),
        SlotKind::Evictor => eviction(&mut random, n),
        SlotKind::Admitter => admission(&mut random),
        SlotKind::Balancer => balancing(&mut random, n),
    };
    Record {
        record: FORMAT,
        slot: slot.to_string(),
        id: n,
        at_ms: 0,
        policy: PolicyOf { name: policy.to_owned(), ..PolicyOf::default() },
        pushed,
        asked,
        answer: Vec::new(),
        scores: Vec::new(),
        fallback: None,
        ns: 0,
    }
}

/// Answers as the native policies give them now.
fn write(slot: SlotKind, engine: &Engine, config: &PolicyConfig) {
    let mut text = Vec::new();
    for policy in builtin_names(slot) {
        let player = Player::new(engine, config, slot, Source::Native(policy.into()), Vec::new()).unwrap();
        for n in 0..INPUTS {
            let mut record = input(slot, n, policy);
            let played = player.play(&record, true).unwrap();
            (record.answer, record.scores) = (played.answer, played.scores);
            record.write(&mut text).unwrap();
        }
    }
    std::fs::write(file(slot), text).unwrap();
}

#[test]
fn every_policy_answers_the_corpus_as_it_was_recorded() {
    let config = PolicyConfig { evictor_slots: 1 << 10, ..PolicyConfig::unhurried() };
    let engine = Engine::new(&config, None).unwrap();
    for slot in SlotKind::ALL {
        if std::env::var_os("KVASIR_WRITE_CORPUS").is_some() {
            write(slot, &engine, &config);
        }
        let records = Records::new(BufReader::new(File::open(file(slot)).unwrap()));
        let records: Vec<Record> = records.collect::<Result<_, _>>().unwrap();
        for policy in builtin_names(slot) {
            let own: Vec<&Record> = records.iter().filter(|record| record.policy.name == policy).collect();
            assert_eq!(own.len() as u64, INPUTS, "{slot} {policy}");
            for source in [Source::Native(policy.to_owned()), Source::Builtin(policy.to_owned())] {
                let player = Player::new(&engine, &config, slot, source.clone(), Vec::new()).unwrap();
                for record in &own {
                    let played = player.play(record, true).unwrap();
                    assert_eq!(
                        (&played.answer, &played.scores),
                        (&record.answer, &record.scores),
                        "{slot} {source:?}, record {}",
                        record.id
                    );
                }
            }
        }
        assert_eq!(records.len() as u64, INPUTS * builtin_names(slot).len() as u64, "{slot}: no others");
    }
}

/// Weights that the corpus, which is without settings, leaves at rest.
#[test]
fn a_prefix_by_tiers_is_weighed_alike_natively_and_as_a_component() {
    let config = PolicyConfig::unhurried();
    let engine = Engine::new(&config, None).unwrap();
    let weights = [("dram-weight", "0.5"), ("below-weight", "0.25")];
    let settings: Vec<_> = weights.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
    let player = |source: fn(String) -> Source, settings: &[(String, String)]| {
        let source = source("overlap-cost".into());
        Player::new(&engine, &config, SlotKind::Scheduler, source, settings.to_vec()).unwrap()
    };
    let players = [player(Source::Native, &settings), player(Source::Builtin, &settings)];
    let alike = player(Source::Native, &[]);
    let mut weighed = 0;
    for n in INPUTS..INPUTS + 100 {
        let record = input(SlotKind::Scheduler, n, "overlap-cost");
        let [native, component] = players.each_ref().map(|player| player.play(&record, true).unwrap());
        assert_eq!((&native.answer, &native.scores), (&component.answer, &component.scores), "record {n}");
        weighed += usize::from(native.scores != alike.play(&record, true).unwrap().scores);
    }
    assert!(weighed > 10, "{weighed} of 100 say anything of tiers");
}
