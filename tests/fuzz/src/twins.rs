//! The default policies, each as component and as native twin, which answer alike to the last bit.

use kvasir::policy::record::{PlayError, Played, Player, Record};
use kvasir::policy::{Engine, Error, PolicyConfig, SlotKind, Source, builtin_names};
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

/// As a host has them, but small: instances that take much memory or time end soon.
pub(crate) static CONFIG: LazyLock<PolicyConfig> = LazyLock::new(|| PolicyConfig {
    hot_deadline: Duration::from_millis(50),
    cold_deadline: Duration::from_millis(100),
    memory_bytes: 4 << 20,
    evictor_slots: 1 << 10,
    instances: 8,
    max_module_bytes: 64 << 10,
    ..PolicyConfig::unhurried()
});

pub(crate) static ENGINE: LazyLock<Engine> =
    LazyLock::new(|| Engine::new(&CONFIG, None).expect("an engine of Wasm"));

/// For components of ours, which are larger.
static OWN: LazyLock<Engine> = LazyLock::new(|| {
    let config = PolicyConfig { max_module_bytes: 1 << 20, ..CONFIG.clone() };
    Engine::new(&config, None).expect("an engine of Wasm")
});

/// Decisions that were recorded, of every slot. Short ones, because they are played again and again.
static RECORDED: LazyLock<Vec<Record>> = LazyLock::new(|| {
    let files = [
        include_str!("../../corpus/policy-0.1/admitter.jsonl"),
        include_str!("../../corpus/policy-0.1/balancer.jsonl"),
        include_str!("../../corpus/policy-0.1/evictor.jsonl"),
        include_str!("../../corpus/policy-0.1/scheduler.jsonl"),
    ];
    let short = files.into_iter().flat_map(str::lines).filter(|line| line.len() < 4 << 10);
    short.map(|line| Record::parse(line).expect("a recorded decision reads")).collect()
});

/// Those of one slot; never none.
pub(crate) fn recorded(slot: SlotKind) -> Vec<&'static Record> {
    RECORDED.iter().filter(|record| record.slot == slot.as_str()).collect()
}

/// Every default policy.
pub(crate) static NAMES: LazyLock<Vec<(SlotKind, &'static str)>> = LazyLock::new(|| {
    let of = |slot| builtin_names(slot).into_iter().map(move |name| (slot, name));
    SlotKind::ALL.into_iter().flat_map(of).collect()
});

type Settings = Vec<(String, String)>;

/// The native twin.
pub(crate) fn native(slot: SlotKind, name: &str, settings: Settings) -> Result<Player, Error> {
    Player::new(&OWN, &CONFIG, slot, Source::Native(name.to_owned()), settings)
}

/// Plays a record on both twins with their default settings; they agree unless the component came to one of its limits.
pub(crate) fn agree(slot: SlotKind, name: &'static str, record: &Record) {
    static COMPONENTS: LazyLock<Mutex<HashMap<&str, &'static Player>>> = LazyLock::new(Mutex::default);
    let mut components = COMPONENTS.lock().unwrap_or_else(PoisonError::into_inner);
    let component = components.entry(name).or_insert_with(|| {
        let player = Player::new(&OWN, &CONFIG, slot, Source::Builtin(name.to_owned()), Settings::new());
        Box::leak(Box::new(player.expect("a default policy compiles")))
    });
    let component = component.play(record, true);
    let native = native(slot, name, Settings::new()).expect("a native twin").play(record, true);
    match (native, component) {
        (Ok(native), Ok(component)) => {
            assert_eq!(one_nan(slot, native), one_nan(slot, component), "the twins of `{name}` differ");
        }
        (_, Err(PlayError::Fault { .. })) | (Err(_), Err(_)) => {}
        (native, component) => panic!("the twins of `{name}` differ: {native:?}, {component:?}"),
    }
}

/// What is not a number has many forms: processors keep the one they were given, and components have but one.
fn one_nan(slot: SlotKind, Played { answer, scores, parts }: Played) -> Played {
    let one = |bits: u32| if f32::from_bits(bits).is_nan() { f32::NAN.to_bits() } else { bits };
    // Thresholds are floats; no other answer is.
    let answer = match slot {
        SlotKind::Balancer => answer.into_iter().map(|bits| u64::from(one(bits as u32))).collect(),
        SlotKind::Scheduler | SlotKind::Evictor | SlotKind::Admitter => answer,
    };
    Played { answer, scores: scores.into_iter().map(one).collect(), parts }
}
