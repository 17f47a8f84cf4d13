use super::*;
use crate::explain::words::{Row, Table};
use crate::policy::scheduler::NativeScheduler;
use crate::policy::{PolicyConfig, PolicyHost, Wanted};
use kvasir_policy::Scheduler;
use kvasir_policy::scheduler::{Candidates, Cluster, DecodeRow, PrefillRow, Request};
use std::path::Path;

/// Says always the same.
struct Says(Vec<f32>);

impl Scheduler for Says {
    fn describe(&self) -> Description {
        Description::scheduler("says", "1.0.0")
    }

    fn schedule(&mut self, _: &Cluster, _: &Request, _: Candidates<'_>) -> Decision {
        Decision::run(0, 0)
    }

    fn explain(&self, _: &Cluster, _: &Request, candidates: Candidates<'_>) -> Vec<f32> {
        assert!(candidates.column(Column::ScorePrefill).is_none(), "only the picker hears scores");
        self.0.clone()
    }
}

fn part(role: Role, policy: impl Scheduler + 'static) -> Part {
    let engine: Box<dyn SchedulerEngine> = Box::new(NativeScheduler::new(Box::new(policy)));
    Part { name: "says".into(), role, engine }
}

fn scorer(weight: f32, says: &[f32]) -> Part {
    part(Role::Score { weight_permille: (weight * 1e3) as u32 }, Says(says.into()))
}

fn filter(says: &[f32]) -> Part {
    part(Role::Filter, Says(says.into()))
}

fn picker() -> Part {
    let pick = (kvasir_default_policies::SCHEDULERS.iter().find(|d| d.name == "pick").unwrap().native)();
    let engine: Box<dyn SchedulerEngine> = Box::new(NativeScheduler::new(pick));
    Part { name: "pick".into(), role: Role::Pick, engine }
}

const PREFILL: u32 = 3;
const DECODE: u32 = 2;

fn chain(parts: Vec<Part>, picker: Part) -> Chain {
    let mut chain = Chain::new("test", parts, picker);
    chain.open(&Layout::of(PREFILL, DECODE, 16).encode()).unwrap();
    for slot in 0..PREFILL as u16 {
        chain
            .update_prefill(&PrefillRow { slot, available: true, ..PrefillRow::default() }.encode())
            .unwrap();
    }
    for slot in 0..DECODE as u16 {
        chain.update_decode(&DecodeRow { slot, available: true, ..DecodeRow::default() }.encode()).unwrap();
    }
    chain
}

fn question() -> Question {
    Question::new(
        1.0,
        &Request { prompt_tokens: 100, ..Request::default() },
        PREFILL as usize,
        DECODE as usize,
    )
}

#[test]
fn weights_count_from_the_best_to_the_worst_whatever_the_unit() {
    // In milliseconds and in shares: the second one's weight decides.
    let mut chain = chain(
        vec![
            scorer(1.0, &[9_000.0, 1_000.0, 5_000.0, 1.0, 2.0]),
            scorer(3.0, &[0.1, 0.3, 0.2]),
            scorer(0.0, &[5.0, 0.0, 9.0]),
        ],
        picker(),
    );
    let scores = chain.explain(&question()).unwrap();
    assert_eq!(scores.len(), 5);
    for (score, expected) in scores.iter().zip([1.0, 3.0, 2.0, 0.0, 1.0]) {
        assert!((score - expected).abs() < 1e-5, "{scores:?}");
    }
    assert_eq!(chain.schedule(&question()), Ok(Decision::run(0, 0)));
}

#[test]
fn what_a_filter_takes_out_is_not_weighed_and_not_chosen() {
    let out = f32::INFINITY;
    let mut chain =
        chain(vec![filter(&[0.0, out, 0.0, out, 0.0]), scorer(1.0, &[4.0, 0.0, 2.0, 0.0, 1.0])], picker());
    assert_eq!(chain.schedule(&question()), Ok(Decision::run(2, 1)));
    assert_eq!(chain.explain(&question()).unwrap(), [1.0, out, 0.0, out, 0.0]);
    // A picker that does not look.
    let mut careless =
        super::tests::chain(vec![filter(&[out, 0.0, 0.0])], part(Role::Pick, Says(Vec::new())));
    let fault = careless.schedule(&question()).unwrap_err();
    assert_eq!(fault, Fault::Invalid("`says` chose what a filter of the chain took out".into()));
}

#[test]
fn a_filter_narrows_what_the_host_says_and_never_widens_it() {
    let question = question()
        .with(Column::Prefix, &[1, 2, 3])
        .with(Column::EligiblePrefill, &[0, 1, 2])
        .with(Column::PrefixAtDecode, &[7, 8]);
    let out = f32::INFINITY;
    let mut chain = chain(vec![filter(&[0.0, out, 0.0])], picker());
    chain.ask_parts(&question, |_, _| {}).unwrap();
    let seen = chain.question.candidates();
    assert_eq!(seen.prefix(), Some(&[1, 2, 3][..]));
    assert_eq!(seen.eligible_prefill(), Some(&[0, 0, 2][..]));
    assert_eq!(seen.prefix_at_decode(), Some(&[7, 8][..]));
    assert_eq!((seen.eligible_decode(), seen.column(Column::ScoreDecode)), (None, None));
    assert_eq!(chain.question.now(), 1.0);
    assert_eq!(chain.question.request_words()[..18], question.request_words()[..18]);
    // The next question does not hear of the last.
    chain.schedule(&super::tests::question()).unwrap();
    assert_eq!(chain.question.candidates().prefix(), None);
}

#[test]
fn nobody_left_is_a_rejection_without_asking_the_picker() {
    let out = f32::INFINITY;
    let mut all = chain(vec![filter(&[out; 3])], part(Role::Pick, Says(Vec::new())));
    assert_eq!(all.schedule(&question()), Ok(Decision::reject(Reason::NoInstance, RETRY_MS)));
}

#[test]
fn a_part_that_says_nonsense_is_named() {
    for says in [&[f32::NAN, 0.0, 0.0][..], &[f32::NEG_INFINITY, 0.0, 0.0], &[1.0], &[0.0; 6]] {
        let mut chain = chain(vec![scorer(1.0, says)], picker());
        let fault = chain.schedule(&question()).unwrap_err();
        assert!(matches!(&fault, Fault::Invalid(why) if why.starts_with("`says`: ")), "{fault}");
    }
}

fn write(folder: &Path, name: &str, text: &str) -> std::path::PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn the_bad_forms_of_a_file_are_refused_with_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |name: &str, text: &str| {
        let path = write(folder.path(), name, text);
        let parts = read(&path).and_then(|(name, parts)| check(SlotKind::Scheduler, &name, &parts));
        parts.unwrap_err().to_string()
    };
    for (text, why) in [
        ("", "1 parts, where 2 to 5 can be"),
        ("[[scorer]]\nsource = \"netkv\"\nweight = -1", "has the weight -1; take 0 to 1000000"),
        ("[[scorer]]\nsource = \"netkv\"\nweight = nan", "has the weight NaN"),
        ("[[filter]]\nsource = \"netkv\"\nweight = 1", "has a weight, which only scorers have"),
        ("[[filter]]\nsauce = \"netkv\"", "unknown field `sauce`"),
        ("[[picker]]\nsource = \"pick\"", "invalid type"),
        ("source = 1", "unknown field `source`"),
        (&"[[filter]]\nsource = \"netkv\"\n".repeat(8), "9 parts, where 2 to 5 can be"),
        (&"#".repeat(70_000), "70000 bytes, where a chain has at most 65536"),
    ] {
        let error = refused("chain.toml", text);
        assert!(error.contains(why), "{error} lacks {why}");
    }
    let error = refused("My Chain.toml", "[[filter]]\nsource = \"netkv\"");
    assert!(error.contains("take a-z, 0-9 and - only"), "{error}");
    let missing = read(&folder.path().join("none.toml")).unwrap_err().to_string();
    assert!(missing.contains("none.toml"), "{missing}");
}

fn host(state: Option<(kvasir_state_db::Db, &Path)>) -> std::sync::Arc<PolicyHost> {
    PolicyHost::open(&PolicyConfig::default(), Wanted::default(), state).unwrap()
}

#[test]
fn a_chain_of_components_serves_survives_a_restart_and_goes_back() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("guest.wasm"), kvasir_tests::guest("scheduler")).unwrap();
    let file = write(
        folder.path(),
        "both.toml",
        "[[filter]]\nsource = \"netkv\"\n[[scorer]]\nsource = \"./guest.wasm\"\nweight = 0.5\n[[scorer]]\nsource = \"overlap-cost\"\n[picker]\nsource = \"pick\"\nsettings = { temperature = \"0.2\" }",
    );
    // What a host that is gone had under way may hold it a little longer.
    let db = || loop {
        match kvasir_state_db::open(&folder.path().join("db"), 1 << 20) {
            Ok(opened) => return opened.db,
            Err(_) => std::thread::yield_now(),
        }
    };
    let state = folder.path().join("db");
    let loaded = {
        let host = host(Some((db(), &state)));
        host.load(SlotKind::Scheduler, Source::File(file), Vec::new()).unwrap()
    };
    assert_eq!((loaded.name.as_str(), loaded.engine), ("both", "wasm"));
    std::fs::remove_file(folder.path().join("guest.wasm")).unwrap();
    let host = host(Some((db(), &state)));
    let restored = host.status(SlotKind::Scheduler);
    assert_eq!((&restored.name, &restored.digest), (&loaded.name, &loaded.digest));
    assert_eq!(host.rollback(SlotKind::Scheduler).unwrap().name, "mooncake");
    assert_eq!(host.rollback(SlotKind::Scheduler).unwrap().digest, loaded.digest);
}

#[test]
fn other_slots_and_bad_parts_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let host = host(None);
    let load = |slot, text: &str| {
        let file = write(folder.path(), "bad.toml", text);
        host.load(slot, Source::File(file), Vec::new()).unwrap_err().to_string()
    };
    let error = load(SlotKind::Evictor, "[[filter]]\nsource = \"lru\"");
    assert!(error.contains("only schedulers form chains"), "{error}");
    let error = load(SlotKind::Scheduler, "[[filter]]\nsource = \"netvk\"");
    assert!(error.contains("did you mean `netkv`"), "{error}");
    let error = load(
        SlotKind::Scheduler,
        "[[filter]]\nsource = \"netkv\"\n[picker]\nsource = \"pick\"\nsettings = { temperature = \"hot\" }",
    );
    assert!(error.contains("`pick` refused its settings"), "{error}");
    assert_eq!(host.status(SlotKind::Scheduler).name, "mooncake");
}

#[test]
fn each_part_is_heard_by_itself_and_a_filter_bars() {
    let out = f32::INFINITY;
    let mut chain = chain(vec![filter(&[0.0, out, 0.0]), scorer(0.5, &[4.0, 0.0, 2.0, 7.0, 1.0])], picker());
    let said = chain.parts(&question()).unwrap();
    let scores = |part: usize| said[part].scores.iter().copied().map(f32::from_bits).collect::<Vec<_>>();
    assert_eq!((scores(0), scores(1)), (vec![0.0, out, 0.0], vec![4.0, 0.0, 2.0, 7.0, 1.0]));
    let row = |slot| Row { slot, identity: 1, barred: None, values: vec![9.0] };
    let table = |slots: u32| Table { columns: vec!["queued".into()], rows: (0..slots).map(row).collect() };
    let prefill = table(PREFILL).with_parts(&said, |slot| slot as usize);
    assert_eq!(prefill.columns, ["says, filter", "says, weight 0.5", "queued"]);
    assert_eq!(
        (&prefill.rows[1].values, prefill.rows[1].barred.as_deref()),
        (&vec![out, 0.0, 9.0], Some("out by says"))
    );
    assert_eq!((&prefill.rows[2].values, &prefill.rows[2].barred), (&vec![0.0, 2.0, 9.0], &None));
    let decode = table(DECODE).with_parts(&said, |slot| (PREFILL + slot) as usize);
    assert_eq!(decode.columns, ["says, weight 0.5", "queued"], "the filter said nothing of it");
    assert_eq!((&decode.rows[1].values, &decode.rows[1].barred), (&vec![1.0, 9.0], &None));
}
