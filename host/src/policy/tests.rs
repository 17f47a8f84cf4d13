//! The policy host against real components: the default policies, and what must be refused.

mod trials;

use super::evictor::{EvictorEngine, EvictorHook};
use super::scheduler::SchedulerHook;
use super::slot::{Hook, Policy as _};
use super::*;
use crate::fleet::{DecodeCost, DecodeSpec, Fleet, PrefillCost, PrefillSpec, TransferCost};
use kvasir_policy::evictor::{self, EVENT, Event, EventKind, NO_SLOT, TierRow, Victim};
use kvasir_policy::scheduler::{Column, DecodeRow, Layout, PrefillRow, Question, Request};
use parking_lot::Mutex;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::OnceLock;

fn engine() -> &'static Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(|| Engine::new(&config(), None).expect("engine"))
}

fn config() -> PolicyConfig {
    // Longer than a busy machine keeps a thread waiting.
    let hot_deadline = Duration::from_millis(100);
    PolicyConfig { evictor_slots: 1 << 12, hot_deadline, ..PolicyConfig::unhurried() }
}

/// A default policy by each way that leads to it: as a component, by the core module in it, and natively.
fn trio<H: Hook>(name: &str) -> [Box<H::Engine>; 3] {
    let module = compiled::<H>(name);
    assert!(module.core.is_some(), "{name} has a core module that can be entered");
    let entered = [module.wrapped(), module].map(|module| {
        let limits = H::KIND.limits(&config());
        let mut engine = H::instantiate(&module, &limits, Arc::default()).expect(name);
        engine.describe().and_then(|_| engine.configure(&[])).expect(name).expect(name);
        engine
    });
    let [component, core] = entered;
    let native = standalone::<H>(engine(), &config(), Source::Native(name.into()), Vec::new());
    [component, core, native.expect(name).0]
}

/// Each is compiled once for all tests.
fn compiled<H: Hook>(name: &str) -> Module {
    static MODULES: Mutex<BTreeMap<String, Module>> = Mutex::new(BTreeMap::new());
    let compile = || {
        let builtin = H::builtins().find(|builtin| builtin.name == name).expect(name);
        engine().compile(H::KIND, name, builtin.component).expect(name)
    };
    MODULES.lock().entry(format!("{} {name}", H::KIND)).or_insert_with(compile).clone()
}

fn names<H: Hook>() -> Vec<&'static str> {
    H::builtins().map(|b| b.name).collect()
}

const SLOTS: u32 = 48;

/// One step of a pool: blocks used or inserted, then victims wanted.
#[derive(Clone, Debug)]
struct Step {
    touched: Vec<(u32, u16)>,
    want: u32,
    wait_ms: u64,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let touched = prop::collection::vec((0..SLOTS, 0..4u16), 0..12);
    let step = (touched, 0..6u32, 0..20_000u64);
    let step = step.prop_map(|(touched, want, wait_ms)| Step { touched, want, wait_ms });
    prop::collection::vec(step, 1..40)
}

/// Drives an evictor as a pool would, and returns every victim.
fn drive(engine: &mut dyn EvictorEngine, steps: &[Step]) -> Vec<Victim> {
    drive_with(engine, evictor::Layout::of(SLOTS), steps)
}

/// The same by a host whose records may be longer; what it appends means nothing to the policy.
fn drive_with(engine: &mut dyn EvictorEngine, layout: evictor::Layout, steps: &[Step]) -> Vec<Victim> {
    let longer = |words: &[u32], from: usize, to: usize| -> Vec<u32> {
        let more = std::iter::repeat_n(u32::MAX, to - from);
        words.chunks(from).flat_map(|record| record.iter().copied().chain(more.clone())).collect()
    };
    let tier = |tier, used_mib: f32| TierRow {
        tier,
        capacity_mib: 1e6,
        used_mib,
        load_fixed_ms: 1.0,
        load_ms_per_mib: 0.1,
        takes_copies: true,
    };
    engine.open(&layout.encode()).expect("open");
    let (mut resident, mut all, mut now) = ([false; SLOTS as usize], Vec::new(), 0);
    for step in steps {
        let base = now;
        now += step.wait_ms;
        let mut words = Vec::new();
        for &(slot, class) in &step.touched {
            let hit = std::mem::replace(&mut resident[slot as usize], true);
            let event = Event {
                kind: if hit { EventKind::Hit } else { EventKind::Insert },
                replayed: false,
                class,
                slot,
                parent_or_uses: if hit { 1 } else { NO_SLOT },
                depth: slot % 7,
                size_bytes: 4096,
                time_ms: now,
                identity: u64::from(slot) * 77,
                tenant: slot % 3,
            };
            event.encode(base, &mut words);
        }
        let tiers = [tier(2, now as f32), tier(3, 0.0)].map(|row| row.encode().map(f32::to_bits));
        let tiers = longer(&tiers.concat(), TierRow::VALUES, layout.tier_values);
        engine.update_tiers(&tiers.into_iter().map(f32::from_bits).collect::<Vec<_>>()).expect("tiers");
        engine.on_events(base, &longer(&words, EVENT, layout.event_words)).expect("events");
        let mut victims = Vec::new();
        engine.select_victims(now, step.want, &mut victims).expect("victims");
        for victim in &victims {
            assert!(std::mem::take(&mut resident[victim.slot as usize]), "{victim:?} is not resident");
        }
        all.extend(victims);
    }
    all
}

fn prefill_row(slot: u16, busy_until: f32) -> PrefillRow {
    PrefillRow {
        slot,
        available: busy_until >= 0.0,
        busy_until,
        cost_fixed: 5.0,
        cost_per_token: 0.05,
        cost_per_pair: 1e-6,
        transfer_fixed: 1.0,
        transfer_per_block: 0.4,
        capacity_blocks: 100,
        free_blocks: 100,
        ..PrefillRow::default()
    }
}

fn decode_row(slot: u16, load: f32) -> DecodeRow {
    DecodeRow {
        slot,
        available: load >= 0.0,
        sequences: load.max(0.0) as u32 % 64,
        context_tokens: load.max(0.0) as u64 * 100,
        free_blocks: 1_000,
        capacity_blocks: 1_000,
        step_fixed: 10.0,
        step_per_sequence: 0.1,
        step_per_token: 1e-4,
        ..DecodeRow::default()
    }
}

/// Rows with so many more values than are known.
fn longer<const N: usize>(rows: &[[f32; N]], more: u32) -> Vec<f32> {
    rows.iter().flat_map(|row| row.iter().copied().chain((0..more).map(|_| f32::NAN))).collect()
}

fn fleet(instances: u16) -> Fleet {
    let mut fleet = Fleet::new(Default::default(), 512, 0);
    let cost = PrefillCost { fixed_ms: 5.0, ms_per_token: 0.05, ms_per_pair: 1e-6 };
    let transfer = TransferCost { fixed_ms: 1.0, ms_per_block: 0.4 };
    let cost_of_step = DecodeCost { fixed_ms: 10.0, ms_per_sequence: 0.1, ms_per_context_token: 1e-4 };
    for _ in 0..instances {
        fleet.register_prefill(PrefillSpec { cost, transfer, capacity_blocks: 100 }, 0).expect("prefill");
        let decode = DecodeSpec { cost: cost_of_step, handover: transfer, capacity_blocks: 1_000 };
        fleet.register_decode(decode, 0).expect("decode");
    }
    fleet
}

fn question(prompt_tokens: u32, seed: u64, ttft_slo: f32, prefix: &[u32]) -> Question {
    let request =
        Request { prompt_tokens, output_tokens: 200, class: 1, seed, ttft_slo, ..Request::default() };
    Question::new(100.0, &request, prefix.len(), prefix.len()).with(Column::Prefix, prefix)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn evictors_choose_the_same_victims_in_wasm_and_natively(steps in steps()) {
        for name in names::<EvictorHook>() {
            let [component, core, native] = trio::<EvictorHook>(name).map(|mut e| drive(e.as_mut(), &steps));
            prop_assert_eq!(&component, &native, "{}", name);
            prop_assert_eq!(&core, &native, "{}, unwrapped", name);
        }
    }

    #[test]
    fn a_host_with_longer_records_works_with_evictors_of_today(
        steps in steps(), event_words in 9..20usize, tier_values in 6..12usize,
    ) {
        for name in names::<EvictorHook>() {
            let engines = trio::<EvictorHook>(name);
            let longer = evictor::Layout { event_words, tier_values, ..evictor::Layout::of(SLOTS) };
            let expected = drive(trio::<EvictorHook>(name)[2].as_mut(), &steps);
            for mut engine in engines {
                prop_assert_eq!(drive_with(engine.as_mut(), longer, &steps), expected.clone(), "{}", name);
            }
        }
    }

    #[test]
    fn schedulers_decide_the_same_in_wasm_and_natively(
        queues in prop::collection::vec(-50.0..5_000.0f32, 1..40),
        requests in prop::collection::vec((1..100_000u32, any::<u64>(), 10.0..20_000.0f32), 1..10),
        prefixes in prop::collection::vec(0..150u32, 400),
    ) {
        for name in names::<SchedulerHook>() {
            let mut engines = trio::<SchedulerHook>(name);
            let rows = queues.iter().enumerate();
            let prefill: Vec<_> = rows.clone().map(|(i, &q)| prefill_row(i as u16, q).encode()).collect();
            let decode: Vec<_> = rows.map(|(i, &q)| decode_row(i as u16, q).encode()).collect();
            // The components are told by a later host, whose rows are longer.
            for (engine, more) in engines.iter_mut().zip([3, 3, 0]) {
                let slots = queues.len() as u32;
                let layout = Layout::of(slots, slots, 512);
                let (prefill_row, decode_row) = (layout.prefill_row + more, layout.decode_row + more);
                let layout = Layout { prefill_row, decode_row, ..layout }.encode();
                engine.open(&[&layout[..], &[7; 3][..more as usize]].concat()).expect("open");
                engine.update_prefill(&longer(&prefill, more)).expect("rows");
                engine.update_decode(&longer(&decode, more)).expect("rows");
                engine.set_thresholds(&[1.5]).expect("thresholds");
            }
            for (i, &(prompt, seed, slo)) in requests.iter().enumerate() {
                let prefix = &prefixes[i * 40..i * 40 + queues.len()];
                let question = question(prompt, seed, slo, prefix);
                let [component, core, native] =
                    engines.each_mut().map(|e| e.schedule(&question).expect("decision"));
                prop_assert_eq!(component, native, "{}", name);
                prop_assert_eq!(core, native, "{}, unwrapped", name);
                let [component, core, native] =
                    engines.each_mut().map(|e| e.explain(&question).expect("scores"));
                prop_assert_eq!(&component, &native, "{}", name);
                prop_assert_eq!(&core, &native, "{}, unwrapped", name);
            }
        }
    }
}

#[test]
fn the_default_schedulers_and_evictors_are_entered_by_their_core_module() {
    fn check<H: Hook>() {
        for name in names::<H>() {
            let source = Source::Builtin(name.into());
            let prepared = slot::Prepared::<H>::new(engine(), &config(), source, Vec::new()).expect(name);
            assert!(prepared.is_unwrapped(), "{name}");
        }
    }
    check::<SchedulerHook>();
    check::<EvictorHook>();
}

/// They do no harm until their settings say so, and so pass the trial.
#[test]
fn harm_in_a_module_that_is_entered_alone_is_a_fault_of_that_call() {
    let asked = |mode: &str| {
        let bytes = kvasir_tests::guest("careless").to_vec();
        let source = Source::Bytes { name: "careless".into(), bytes };
        let settings =
            [("mode", mode), ("after", "0")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        let prepared = slot::Prepared::<SchedulerHook>::new(engine(), &config(), source, settings.to_vec());
        let prepared = prepared.expect(mode);
        assert!(prepared.is_unwrapped());
        let (mut engine, _) = prepared.engine().expect(mode);
        engine.open(&Layout::of(1, 1, 16).encode()).expect("open");
        let ask = || question(1_000, 1, f32::INFINITY, &[0]);
        let fault = engine.schedule(&ask()).expect_err(mode);
        assert_eq!(engine.schedule(&ask()), Err(Fault::NotReady), "{mode}");
        (fault, prepared.last_words())
    };
    assert!(matches!(asked("loop").0, Fault::Deadline(_)));
    let (trap, said) = asked("trap");
    assert!(matches!(trap, Fault::Trap(_)), "{trap}");
    assert_eq!(said.as_deref(), Some("will do: trap"), "what it logs arrives");
    let grown = asked("grow").0.to_string();
    assert!(grown.contains("forcing trap when growing memory"), "{grown}");
}

#[test]
fn a_core_module_that_answers_otherwise_is_not_entered() {
    let (lru, fifo) = (compiled::<EvictorHook>("lru"), compiled::<EvictorHook>("fifo"));
    let entered =
        |core| slot::entered::<EvictorHook>(engine(), Module { core, ..lru.clone() }).core.is_some();
    assert!(entered(lru.core.clone()));
    assert!(!entered(fifo.core));
}

#[test]
fn a_swap_reaches_every_worker_and_rolls_back() {
    let host = PolicyHost::open(&config(), Wanted::default(), None).expect("host");
    let mut workers = [host.scheduler_worker(), host.scheduler_worker()];
    let fleet = fleet(4);
    let decide = |w: &mut SchedulerWorker| {
        let outcome = w.schedule(&fleet, &question(1_000, 1, f32::INFINITY, &[0; 4]));
        assert_eq!(outcome.fallback, None);
        outcome.generation
    };
    let first: Vec<_> = workers.iter_mut().map(decide).collect();
    let status =
        host.load(SlotKind::Scheduler, Source::Builtin("round-robin".into()), Vec::new()).expect("load");
    assert_eq!((status.name.as_str(), status.previous.as_deref()), ("round-robin", Some("mooncake")));
    for (worker, before) in workers.iter_mut().zip(first) {
        assert!(decide(worker) > before);
        assert_eq!(worker.policy(), "round-robin");
    }
    assert_eq!(host.rollback(SlotKind::Scheduler).expect("rollback").name, "mooncake");
    decide(&mut workers[0]);
    assert_eq!(workers[0].policy(), "mooncake");
    assert!(matches!(host.rollback(SlotKind::Evictor), Err(Error::NoPrevious(SlotKind::Evictor))));
}

#[test]
fn what_cannot_serve_is_refused_with_its_cause() {
    let host = PolicyHost::open(&config(), Wanted::default(), None).expect("host");
    let lru = EvictorHook::builtins().find(|b| b.name == "lru").expect("lru").component;
    let bytes = |bytes: &[u8]| Source::Bytes { name: "it".into(), bytes: bytes.to_vec() };
    let huge = vec![0; config().max_module_bytes as usize + 1];
    // With a core module in it that exports a function it does not have.
    let uncompilable = [lru, &[1, 15], b"\0asm\x01\0\0\0", &[7, 5, 1, 1, b'x', 0, 7]].concat();
    let cases = [
        (SlotKind::Scheduler, bytes(lru), "it lacks the export `kvasir:policy/scheduling@0.1.0`"),
        (SlotKind::Scheduler, bytes(&uncompilable), "it lacks the export `kvasir:policy/scheduling@0.1.0`"),
        (SlotKind::Evictor, bytes(&uncompilable), "does not compile"),
        (SlotKind::Evictor, bytes(&lru[..lru.len() / 2]), "does not compile"),
        (SlotKind::Evictor, bytes(b"\0asm\x01\0\0\0"), "core module"),
        (SlotKind::Evictor, bytes(b"hello world"), "magic number"),
        (SlotKind::Evictor, bytes(b""), "empty"),
        (SlotKind::Evictor, bytes(&huge), "more than the 33554432 allowed"),
        (SlotKind::Evictor, Source::Builtin("lrx".into()), "did you mean `lru`?"),
        (SlotKind::Evictor, Source::File("no-such-file.wasm".into()), "no-such-file.wasm"),
    ];
    for (slot, source, expected) in cases {
        let before = host.status(slot);
        let error = host.load(slot, source, Vec::new()).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(host.status(slot).generation, before.generation);
        assert_eq!(host.status(slot).name, before.name);
    }
    let settings = vec![("window".to_owned(), "5".to_owned())];
    let error =
        host.load(SlotKind::Evictor, Source::Builtin("lru".into()), settings).expect_err("unknown setting");
    assert!(error.to_string().contains("unknown setting `window`"), "{error}");
}

#[test]
fn assignments_and_modules_survive_a_restart() {
    let folder = tempfile::tempdir().expect("folder");
    let cache = tempfile::tempdir().expect("cache");
    let config = PolicyConfig { cache_dir: Some(cache.path().into()), ..config() };
    let open = || {
        let db = kvasir_state_db::open(folder.path(), 1 << 20).expect("sled").db;
        PolicyHost::open(&config, Wanted::default(), Some((db, folder.path()))).expect("host")
    };
    let lru = EvictorHook::builtins().find(|b| b.name == "lru").expect("lru").component;
    let host = open();
    let own = Source::Bytes { name: "own".into(), bytes: lru.to_vec() };
    host.load(SlotKind::Evictor, own, Vec::new()).expect("load");
    host.load(SlotKind::Evictor, Source::Builtin("sieve".into()), Vec::new()).expect("load");
    drop(host);
    let host = open();
    let status = host.status(SlotKind::Evictor);
    assert_eq!(
        (status.name.as_str(), status.previous.as_deref()),
        ("sieve", Some("lru")),
        "what it calls itself"
    );
    let status = host.rollback(SlotKind::Evictor).expect("rollback");
    assert_eq!(status.digest, Some(Digest::of(lru).to_string()));
    assert_eq!(host.status(SlotKind::Scheduler).name, "mooncake");
}

#[test]
fn a_component_that_only_the_configuration_named_comes_back_after_a_restart() {
    let folder = tempfile::tempdir().expect("folder");
    let lru = EvictorHook::builtins().find(|b| b.name == "lru").expect("lru").component;
    let own = Source::Bytes { name: "own".into(), bytes: lru.to_vec() };
    let wanted = Wanted { evictor: (own, Vec::new()), ..Wanted::default() };
    let open = |wanted| {
        let db = kvasir_state_db::open(folder.path(), 1 << 20).expect("sled").db;
        PolicyHost::open(&config(), wanted, Some((db, folder.path()))).expect("host")
    };
    let host = open(wanted);
    host.load(SlotKind::Evictor, Source::Builtin("sieve".into()), Vec::new()).expect("load");
    drop(host);
    let host = open(Wanted::default());
    host.load(SlotKind::Balancer, Source::Builtin("static".into()), Vec::new()).expect("of another slot");
    let status = host.rollback(SlotKind::Evictor).expect("rollback");
    assert_eq!(status.digest, Some(Digest::of(lru).to_string()));
}

#[test]
fn a_record_of_another_version_holds_neither_the_daemon_nor_another_slot_up() {
    let folder = tempfile::tempdir().expect("folder");
    let lru = EvictorHook::builtins().find(|b| b.name == "lru").expect("lru").component;
    let db = kvasir_state_db::open(folder.path(), 1 << 20).expect("sled").db;
    let open =
        || PolicyHost::open(&config(), Wanted::default(), Some((db.clone(), folder.path()))).expect("host");
    let host = open();
    let own = Source::Bytes { name: "own".into(), bytes: lru.to_vec() };
    host.load(SlotKind::Evictor, own, Vec::new()).expect("load");
    drop(host);
    let assignments = db.open_tree("policy-assignments").expect("tree");
    let written =
        assignments.insert("evictor", b"{\"current\":7}").expect("written").expect("what was loaded");
    let host = open();
    assert_eq!(host.status(SlotKind::Evictor).name, "workload-aware");
    let trip = host.status(SlotKind::Evictor).last_trip.expect("said");
    assert!(trip.contains("not restored"), "{trip}");
    host.load(SlotKind::Balancer, Source::Builtin("static".into()), Vec::new()).expect("of another slot");
    drop(host);
    assignments.insert("evictor", written).expect("written");
    assert_eq!(open().status(SlotKind::Evictor).name, "lru", "its component was kept");
}

#[test]
fn a_file_put_into_the_watched_folder_is_loaded() {
    let folder = tempfile::tempdir().expect("folder");
    let config = PolicyConfig { watch_dir: Some(folder.path().into()), ..config() };
    let host = PolicyHost::open(&config, Wanted::default(), None).expect("host");
    let fifo = EvictorHook::builtins().find(|b| b.name == "fifo").expect("fifo").component;
    let staged = folder.path().join("staged");
    std::fs::write(&staged, fifo).expect("write");
    std::fs::rename(&staged, folder.path().join("evictor.wasm")).expect("rename");
    while host.status(SlotKind::Evictor).name != "fifo" {
        std::thread::yield_now(); // the test runner's time limit ends this if the file is not seen
    }
}

#[test]
fn the_watched_folder_keeps_settings_and_does_not_undo_what_was_loaded() {
    let (folder, state) = (tempfile::tempdir().expect("folder"), tempfile::tempdir().expect("state"));
    let config = PolicyConfig { watch_dir: Some(folder.path().into()), ..config() };
    let db = kvasir_state_db::open(state.path(), 1 << 20).expect("db").db;
    let open = || {
        let slack = vec![("slack".to_owned(), "3".to_owned())];
        let wanted = Wanted { admitter: (Source::Native("slo".into()), slack), ..Wanted::default() };
        PolicyHost::open(&config, wanted, Some((db.clone(), state.path()))).expect("host")
    };
    let put = |name: &str, bytes: &[u8]| {
        std::fs::write(folder.path().join("staged"), bytes).expect("write");
        std::fs::rename(folder.path().join("staged"), folder.path().join(name)).expect("rename");
    };
    let component = |name: &str| EvictorHook::builtins().find(|b| b.name == name).expect(name).component;
    let slo = super::admitter::AdmitterHook::builtins().next().expect("slo").component;
    let host = open();
    put("admitter.wasm", slo);
    put("evictor.wasm", component("fifo"));
    let status = |slot| host.status(slot);
    while status(SlotKind::Admitter).engine != "wasm" || status(SlotKind::Evictor).name != "fifo" {
        std::thread::yield_now();
    }
    assert_eq!(status(SlotKind::Admitter).settings, [("slack".to_owned(), "3".to_owned())]);
    host.load(SlotKind::Evictor, Source::Builtin("lru".into()), Vec::new()).expect("lru");
    drop(host);

    let host = open();
    assert!(host.logs(SlotKind::Admitter).0.iter().any(|l| l.text.contains("policy.admitter.settings")));
    put("admitter.wasm", b"no component");
    while !host
        .logs(SlotKind::Admitter)
        .0
        .iter()
        .any(|line| line.text.contains("not a WebAssembly component"))
    {
        std::thread::yield_now(); // the folder has been looked at, all of it
    }
    assert_eq!(host.status(SlotKind::Evictor).name, "lru", "the file is older than what was loaded");
}
