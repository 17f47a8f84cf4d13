use super::*;
use crate::policy::chain::Role;
use crate::policy::slot::ChainPart;
use crate::policy::{Engine, PolicyConfig, Source};
use kvasir_policy::admitter::{BLOCK_WORDS, Block, Forecast, Load};
use kvasir_policy::evictor::{Event, EventKind, Layout as Pool, NO_SLOT};
use kvasir_policy::scheduler::{Column, DecodeRow, HEAD_WORDS, Layout, PrefillRow, Question, Request};

fn record(slot: SlotKind, pushed: Vec<Push>, asked: Call) -> Record {
    Record {
        record: FORMAT,
        slot: slot.to_string(),
        id: u64::MAX,
        at_ms: 1_700_000_000_000,
        policy: PolicyOf { name: "any".into(), version: "1.0.0".into(), ..PolicyOf::default() },
        pushed,
        asked,
        answer: vec![0; if slot == SlotKind::Scheduler { 8 } else { 1 }],
        scores: vec![f32::INFINITY.to_bits()],
        fallback: None,
        ns: 250,
    }
}

fn push(name: &str, words: Vec<u32>) -> Push {
    (name.to_owned(), words)
}

fn call(name: &str, scalars: Vec<u64>, lists: Vec<Vec<u32>>) -> Call {
    Call { name: name.to_owned(), scalars, lists }
}

/// Three instances of each kind, of which the second holds a prefix.
fn scheduling() -> Record {
    let prefill = (0..3).flat_map(|slot| {
        let row = PrefillRow {
            slot,
            available: true,
            cost_per_token: 0.5,
            transfer_per_block: 10.0,
            ..PrefillRow::default()
        };
        bits(&row.encode())
    });
    let decode = (0..3).flat_map(|slot| {
        let row = DecodeRow { slot, available: true, free_blocks: 10_000, ..DecodeRow::default() };
        bits(&row.encode())
    });
    let request = Request { prompt_tokens: 640, seed: 7, ..Request::default() };
    let question = Question::new(5.5, &request, 3, 3).with(Column::Prefix, &[0, 30, 0]);
    let pushed = vec![
        push("open", Layout::of(3, 3, 16).encode().to_vec()),
        push("update-prefill", prefill.collect()),
        push("update-decode", decode.collect()),
        push("set-thresholds", bits(&[1.5])),
    ];
    let now = u64::from(question.now().to_bits());
    record(SlotKind::Scheduler, pushed, call("schedule", vec![now], vec![question.words().to_vec()]))
}

fn eviction() -> Record {
    let mut words = halves(1_000).to_vec();
    for slot in 0..8 {
        let event = Event {
            kind: EventKind::Insert,
            replayed: true,
            class: 0,
            slot,
            parent_or_uses: NO_SLOT,
            depth: 0,
            size_bytes: 4096,
            time_ms: 1_000 + u64::from(slot),
            identity: u64::from(slot) << 40,
            tenant: 0,
        };
        event.encode(1_000, &mut words);
    }
    let chosen = [halves(1_500).as_slice(), &[1]].concat();
    let pushed = vec![
        push("open", Pool::of(8).encode().to_vec()),
        push("update-tiers", bits(&[2.0, 64.0, 1.0, 0.0, 0.0, 1.0])),
        push("on-events", words),
        push("select-victims", chosen),
    ];
    record(SlotKind::Evictor, pushed, call("select-victims", vec![2_000, 3], vec![]))
}

fn admissions() -> [Record; 2] {
    let request = Request { ttft_slo: 100.0, ..Request::default() }.encode();
    let words = [&request[..], &[0]].concat();
    let forecast = Forecast { ttft: 200.0, ..Forecast::default() };
    let load = || vec![push("update-load", bits(&Load::default().encode()))];
    let block = Block { class: 1, uses: 2, depth: 3, size_bytes: 4, last_offer_ms: None, tenant: 0 };
    let asked = [
        call("admit-request", vec![], vec![words, bits(&forecast.encode())]),
        call("admit-blocks", vec![3, BLOCK_WORDS as u64], vec![block.encode().to_vec()]),
    ];
    asked.map(|asked| record(SlotKind::Admitter, load(), asked))
}

fn balancing() -> Record {
    let lists = vec![bits(&[50.0, 1.0, 9.0]), bits(&[10.0, -1.0]), bits(&[2.5])];
    record(SlotKind::Balancer, Vec::new(), call("tick", vec![12_345], lists))
}

fn all() -> Vec<Record> {
    let [request, blocks] = admissions();
    vec![scheduling(), eviction(), request, blocks, balancing()]
}

fn line(record: &Record) -> String {
    let mut line = Vec::new();
    record.write(&mut line).unwrap();
    String::from_utf8(line).unwrap()
}

#[test]
fn records_survive_their_lines() {
    let text: String = all().iter().map(|record| line(record) + "\n").collect();
    let read: Result<Vec<_>, _> = Records::new(text.as_bytes()).collect();
    assert_eq!(read.unwrap(), all());
}

#[test]
fn every_builtin_answers_a_record_the_same_natively_and_in_wasm() {
    let config = PolicyConfig::unhurried();
    let engine = Engine::new(&config, None).unwrap();
    for record in all() {
        let slot = record.slot_kind().unwrap();
        for name in crate::policy::builtin_names(slot) {
            let play = |source| {
                let player = Player::new(&engine, &config, slot, source, Vec::new()).unwrap();
                assert_eq!(player.describe().unwrap().name, name);
                player.play(&record, true).unwrap()
            };
            let native = play(Source::Native(name.to_owned()));
            assert_eq!(native, play(Source::Builtin(name.to_owned())), "{slot} {name}");
            assert!(!native.answer.is_empty() || slot == SlotKind::Balancer, "{slot} {name}");
        }
    }
}

#[test]
fn a_prefix_and_what_was_chosen_before_count_in_a_play() {
    let config = PolicyConfig::unhurried();
    let engine = Engine::new(&config, None).unwrap();
    let play = |record: &Record, name: &str| {
        let slot = record.slot_kind().unwrap();
        let player = Player::new(&engine, &config, slot, Source::Native(name.into()), Vec::new()).unwrap();
        player.play(record, true).unwrap()
    };
    let played = play(&scheduling(), "mooncake");
    assert_eq!((played.answer[0], played.scores.len()), (1, 3), "the instance with the prefix");
    assert_eq!(play(&eviction(), "lru").answer, [1, 2, 3], "0 went before");
}

/// Each part is asked by the chain, which has to find the columns for it.
#[test]
fn a_chain_hears_the_columns_of_a_record() {
    let config = PolicyConfig::unhurried();
    let engine = Engine::new(&config, None).unwrap();
    let part =
        |role, name: &str| ChainPart { role, source: Source::Builtin(name.into()), settings: Vec::new() };
    let parts = vec![part(Role::Score { weight_permille: 1_000 }, "mooncake"), part(Role::Pick, "pick")];
    let source = Source::Chain { name: "two".into(), parts };
    let player = Player::new(&engine, &config, SlotKind::Scheduler, source, Vec::new()).unwrap();
    let played = player.play(&scheduling(), true).unwrap();
    let scores: Vec<f32> = played.scores.iter().copied().map(f32::from_bits).collect();
    assert_eq!(played.answer[0], 1, "the instance with the prefix");
    assert!(scores[1] < scores[0] && scores[1] < scores[2], "{scores:?}");
}

#[test]
fn what_cannot_be_played_names_its_line_and_its_field() {
    let check = |record: Record, expected: &str| {
        let text = format!("{}\n{}", line(&scheduling()), line(&record));
        let mut records = Records::new(text.as_bytes());
        assert!(records.next().unwrap().is_ok());
        let error = records.next().unwrap().unwrap_err().to_string();
        assert!(error.starts_with("line 3 of the recording: ") && error.contains(expected), "{error}");
        assert!(records.next().is_none(), "nothing behind an error");
    };
    let changed = |change: &dyn Fn(&mut Record)| {
        let mut record = scheduling();
        change(&mut record);
        record
    };
    check(changed(&|r| r.record = 2), "field `record` is 2; this kvasir reads format 1");
    check(changed(&|r| r.slot = "sched\u{1b}".into()), r"unknown slot `sched\u{1b}`");
    check(changed(&|r| r.pushed[1].0 = "tick".into()), "field `pushed[1]` names `tick`");
    check(changed(&|r| r.pushed[0].1.truncate(2)), "field `pushed[0]`: 2 words for `open`; at least 8");
    check(changed(&|r| r.pushed[0].1[0] = 1 << 20), "field `pushed[0]`: a table of 1048576 slots");
    check(changed(&|r| r.pushed[0].1[3] = 0), "field `pushed[0]`: rows of no values");
    check(changed(&|r| r.pushed[0].1[6] = 257), "257 domains; at most 256");
    check(changed(&|r| r.pushed.push(push("adopt", vec![9, 0]))), "field `pushed[4]`: 1 words for 9 bytes");
    check(changed(&|r| r.pushed = vec![push("open", vec![0; 8]); PUSHES_MAX + 1]), "`pushed` holds 4097");
    check(changed(&|r| r.pushed[1].1 = vec![0; WORDS_MAX + 1]), "at most 1048576 are read");
    check(changed(&|r| r.asked.name = "admit-request".into()), "field `asked.name`");
    check(changed(&|r| r.asked.scalars.clear()), "field `asked.scalars`: 0 for `schedule`, which has 1");
    check(changed(&|r| r.asked.lists.push(vec![])), "field `asked.lists`: 2 for `schedule`");
    check(changed(&|r| r.asked.lists[0].truncate(HEAD_WORDS - 1)), "field `asked.lists[0]`: 18 words");
    check(changed(&|r| r.answer.truncate(7)), "field `answer`: 7 for `schedule`, which has 8");
    let mut pool = eviction();
    pool.asked.scalars[1] = 257;
    check(pool, "field `asked.scalars[1]`: 257 victims wanted");
    let [_, mut blocks] = admissions();
    blocks.asked.scalars[1] = 6;
    check(blocks, "field `asked.scalars[1]`: records of 6 words");
}

#[test]
fn lines_that_are_no_records_are_refused() {
    let check = |text: &[u8], expected: &str| {
        let error = Records::new(text).next().unwrap().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(error.len() < 400, "{} bytes", error.len());
    };
    assert!(Records::new(&b"\n \n\r\n"[..]).next().is_none());
    check(b"\n{}", "line 2 of the recording: not a record: missing field `record`");
    check(br#"{"record":1,"slot":7}"#, "expected a string, column");
    check(b"\xff\n", "invalid utf-8");
    check(br#"{"record":1,"colour":1}"#, "unknown field `colour`");
    check(&[b'['; 1 << 20], "not a record");
    check(&[b' '; LINE_BYTES_MAX + 1], "line 1 of the recording has more than");
    let floats = line(&balancing()).replace("12345", "12345.5");
    check(floats.as_bytes(), "12345.5");
}

#[test]
fn another_slot_is_not_asked() {
    let config = PolicyConfig::unhurried();
    let engine = Engine::new(&config, None).unwrap();
    let source = Source::Native("lru".into());
    let player = Player::new(&engine, &config, SlotKind::Evictor, source, Vec::new()).unwrap();
    let error = player.play(&scheduling(), false).unwrap_err().to_string();
    assert!(error.contains("of slot `scheduler`, the policy of slot `evictor`"), "{error}");
}

#[test]
fn bytes_survive_their_words() {
    for len in 0..9u8 {
        let bytes: Vec<u8> = (1..=len).collect();
        let words = packed(&bytes);
        assert_eq!((words[0], words.len() - 1), (u32::from(len), usize::from(len).div_ceil(4)));
        assert_eq!(play::unpacked(&words), bytes);
    }
}
