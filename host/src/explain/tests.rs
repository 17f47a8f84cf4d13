use super::*;
use crate::conductor::{Conductor, Registration};
use crate::config;
use crate::fleet::{Ask, DecodeCost, DecodeSpec, PrefillCost, PrefillSpec, TransferCost};
use crate::policy::record::Player;
use crate::policy::{Engine, PolicyConfig, PolicyHost, Source, Wanted};
use kvasir_policy::scheduler::{DECODE_ROW, PREFILL_ROW};

const LIMITS: Limits = Limits { decisions: 4_096, memory_bytes: 64 << 20 };

fn registration() -> Registration {
    let transfer = TransferCost { fixed_ms: 2.0, ms_per_block: 1.0 };
    let cost = PrefillCost { fixed_ms: 10.0, ms_per_token: 1.0, ms_per_pair: 0.0 };
    let prefill = PrefillSpec { cost, transfer, capacity_blocks: 1 << 20 };
    let cost = DecodeCost { fixed_ms: 20.0, ms_per_sequence: 1.0, ms_per_context_token: 0.0 };
    let decode = DecodeSpec { cost, handover: transfer, capacity_blocks: 1 << 20 };
    Registration { prefill: Some(prefill), decode: Some(decode), ..Registration::default() }
}

fn wanted(scheduler: Source) -> Wanted {
    Wanted { scheduler: (scheduler, Vec::new()), ..Wanted::default() }
}

fn conductor(scheduler: Source, workers: u32, explain: &Arc<Explain>) -> (Conductor, Arc<PolicyHost>) {
    let policies = PolicyHost::open(&PolicyConfig::default(), wanted(scheduler), None).unwrap();
    let config = config::Conductor { workers, ..Default::default() };
    let conductor = Conductor::with_explain(&config, &policies, Arc::clone(explain), 0, 0);
    for n in 0..5 {
        let epoch = conductor.register(&format!("i{n}"), registration(), 0).unwrap();
        conductor.stored(&format!("i{n}"), epoch, 1, None, None, &(1..=n + 1).collect::<Vec<_>>()).unwrap();
    }
    (conductor, policies)
}

fn ask(n: u32) -> Ask {
    Ask {
        prompt_tokens: 512 * (1 + n % 7),
        output_tokens: 90,
        tenant: n % 3,
        session: (n % 4).into(),
        seed: n.into(),
        // Some are refused by the admitter.
        ttft_slo_ms: if n % 5 == 4 { 0.001 } else { f32::INFINITY },
        tbt_slo_ms: f32::INFINITY,
        ..Ask::default()
    }
}

fn player(slot: SlotKind, name: &str) -> Player {
    let config = PolicyConfig::default();
    let engine = Engine::new(&config, None).unwrap();
    Player::new(&engine, &config, slot, Source::Builtin(name.into()), Vec::new()).unwrap()
}

#[test]
fn the_component_that_decided_answers_its_records_bit_for_bit() {
    let explain = Explain::new(LIMITS);
    let (conductor, _policies) = conductor(Source::Builtin("mooncake".into()), 3, &explain);
    let mut decided = Vec::new();
    for n in 0..200u32 {
        if n % 50 == 49 {
            conductor.unregister(&format!("i{}", n / 50), u64::from(n / 50) + 1).unwrap();
        }
        let chain: Vec<u64> = (1..=u64::from(n % 7) + 1).collect();
        let scheduled = conductor.schedule(&ask(n), &chain, n % 9 == 0, u64::from(n) * 10).unwrap();
        decided.push((scheduled.decision_id, scheduled.result.is_ok()));
    }
    let (scheduler, admitter) = (player(SlotKind::Scheduler, "mooncake"), player(SlotKind::Admitter, "slo"));
    let mut refused = 0;
    for (id, booked) in decided {
        let found = explain.find(id).unwrap();
        let record = found.record(1);
        record.check().unwrap();
        let played = scheduler.play(&record, true).unwrap();
        assert_eq!((&played.answer, record.fallback.as_deref()), (&record.answer, None), "{id}");
        if !record.scores.is_empty() {
            assert_eq!(played.scores, record.scores, "{id}");
        }
        assert!(found.told().check_scores(&[]).is_ok());
        let admitted = found.admitter_record(1);
        let let_in = admitted.as_ref().is_some_and(|admitted| admitted.answer == [0]);
        assert_eq!(let_in, booked, "{id}");
        if let Some(admitted) = admitted {
            assert_eq!(admitter.play(&admitted, false).unwrap().answer, admitted.answer, "{id}");
        }
        refused += u32::from(!booked);
        let back = Found::of_record(&record).unwrap();
        assert_eq!((back.tables, back.question), (found.tables, found.question), "{id}");
        assert_eq!(back.decided.decision, found.decided.decision);
    }
    assert!(refused > 10);
}

/// Rows of hosts before and after this one: what is not known here is skipped, and what is missing is unknown.
#[test]
fn a_record_with_rows_of_another_length_is_read() {
    let explain = Explain::new(LIMITS);
    let (conductor, _policies) = conductor(Source::Native("mooncake".into()), 1, &explain);
    conductor.schedule(&ask(0), &[1], false, 5).unwrap();
    let found = explain.find(1).unwrap();
    let record = found.record(1);
    let with_rows_of = |prefill: usize, decode: usize| {
        let mut record = record.clone();
        for (name, words) in &mut record.pushed {
            let (known, wanted) = match name.as_str() {
                "open" => {
                    (words[3], words[4]) = (prefill as u32, decode as u32);
                    continue;
                }
                "update-prefill" => (PREFILL_ROW, prefill),
                "update-decode" => (DECODE_ROW, decode),
                _ => continue,
            };
            let row = |row: &[u32]| row.iter().copied().chain([7; 9]).take(wanted).collect::<Vec<_>>();
            *words = words.chunks(known).flat_map(row).collect();
        }
        Found::of_record(&record).unwrap().tables
    };
    let longer = with_rows_of(PREFILL_ROW + 2, DECODE_ROW + 1);
    assert_eq!((longer.prefill, longer.decode), (found.tables.prefill.clone(), found.tables.decode.clone()));
    let mut earlier = found.tables.prefill.clone();
    earlier.chunks_mut(PREFILL_ROW).for_each(|row| row[17..].fill(-1.0));
    assert_eq!(with_rows_of(17, 19).prefill, earlier);
    let unavailable = with_rows_of(1, DECODE_ROW).prefill;
    assert!(unavailable.chunks(PREFILL_ROW).all(|row| row[1] == 0.0), "too little to be a row");
}

#[test]
fn another_instance_of_the_policy_gives_the_scores_and_says_if_it_decides_otherwise() {
    for (name, same) in [("mooncake", true), ("round-robin", false)] {
        let explain = Explain::new(LIMITS);
        let (conductor, policies) = conductor(Source::Builtin(name.into()), 1, &explain);
        for n in 0..4 {
            conductor.schedule(&ask(n), &[1], false, 5).unwrap();
        }
        let before = policies.status(SlotKind::Scheduler).counters;
        let (_, last) = explain.range().unwrap();
        let found = explain.find(last).unwrap();
        let again = policies.ask_again(&found.record(1), found.decided.generation).unwrap();
        assert_eq!(again.same, same, "{name}");
        assert_eq!(again.scores.is_empty(), name == "round-robin", "{name}");
        let after = policies.status(SlotKind::Scheduler).counters;
        assert_eq!(
            (before.calls, before.traps),
            (after.calls, after.traps),
            "nothing that decides was asked"
        );
        policies.load(SlotKind::Scheduler, Source::Native("random".into()), Vec::new()).unwrap();
        assert_eq!(policies.ask_again(&found.record(1), found.decided.generation), None, "it serves no more");
    }
}

#[test]
fn decisions_of_a_native_twin_and_rejections_are_kept_and_told_apart() {
    let explain = Explain::new(LIMITS);
    let policies = PolicyHost::open(
        &PolicyConfig::default(),
        wanted(Source::Bytes { name: "bad".into(), bytes: kvasir_tests::guest("scheduler").to_vec() }),
        None,
    );
    // Without a mode it decides; without instances it can only reject.
    let config = config::Conductor { workers: 1, ..Default::default() };
    let policies = policies.unwrap();
    let conductor = Conductor::with_explain(&config, &policies, Arc::clone(&explain), 0, 0);
    let rejected = conductor.schedule(&ask(0), &[], false, 5).unwrap();
    let second = conductor.schedule(&ask(1), &[], false, 6).unwrap();
    assert_eq!((rejected.request_id, rejected.result.is_err()), (0, true));
    assert!(second.decision_id > rejected.decision_id, "an id of its own");
    let found = explain.find(rejected.decision_id).unwrap();
    let said = words::summary(&found, &[], &|_, slot| format!("slot {slot}"));
    assert!(said.contains("rejected it: no instance is available for it"), "{said}");
    assert!(found.admitter_record(1).is_none());
    assert!(words::prefill(&found).rows.is_empty());
}

#[test]
fn a_choice_is_told_with_its_standing_among_the_scores() {
    let explain = Explain::new(LIMITS);
    let (conductor, _policies) = conductor(Source::Native("mooncake".into()), 1, &explain);
    let scheduled = conductor.schedule(&ask(6), &[1, 2, 3, 4, 5, 6, 7], true, 5).unwrap();
    let found = explain.find(scheduled.decision_id).unwrap();
    let name = |prefill: bool, slot: u32| format!("{}{slot}", if prefill { "p" } else { "d" });
    let said = words::summary(&found, &found.scores, &name);
    assert!(said.starts_with("`mooncake` chose p4 for the prefill and d"), "{said}");
    assert!(
        said.contains("the best of 5 scores") && said.contains("5 of 7 blocks of the prompt are there"),
        "{said}"
    );
    let table = words::prefill(&found);
    assert_eq!((table.rows.len(), table.rows[4].values[0], &table.rows[4].barred), (5, 5.0, &None));
}

#[test]
fn nothing_is_kept_where_nothing_is_wanted() {
    let explain = Explain::off();
    let (conductor, _policies) = conductor(Source::Native("mooncake".into()), 1, &explain);
    let scheduled = conductor.schedule(&ask(0), &[1], false, 5).unwrap();
    assert_eq!(scheduled.decision_id, scheduled.request_id);
    assert_eq!((explain.find(1).is_none(), explain.range(), explain.memory_bytes()), (true, None, 0));
    assert!(!explain.takes(1) && explain.written().is_none());
}

#[test]
fn all_decisions_are_written_where_all_are_sampled() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("all.jsonl");
    let sampling = Sampling { file: file.clone(), file_bytes_max: 64 << 20, share: 1.0 };
    let explain = Explain::sampled(LIMITS, &sampling, Clock::start()).unwrap();
    let (conductor, policies) = conductor(Source::Native("mooncake".into()), 2, &explain);
    for n in 0..100 {
        conductor.schedule(&ask(n), &[1], false, 5).unwrap();
    }
    drop((conductor, policies, explain)); // which writes what waits
    let read = std::fs::read(&file).unwrap();
    let records: Vec<Record> =
        crate::policy::record::Records::new(&read[..]).collect::<Result<_, _>>().unwrap();
    let of = |slot: &str| records.iter().filter(|record| record.slot == slot).count();
    assert_eq!((of("scheduler"), of("admitter") > 0), (100, true));
    let missing = Sampling { file: folder.path().join("no/such/folder"), ..sampling };
    assert!(Explain::sampled(LIMITS, &missing, Clock::start()).is_err());
}
