//! Policies that do every harm in every export, in a host that serves: whatever one slot's policy does, the others decide as
//! before, no request goes without an answer, and the process stays within a stated memory.

use crate::process::{Host, Transport, content, runtime};
use kvasir_client::control::{Control, ControlError, PolicySource};
use kvasir_client::data::Put;
use kvasir_dataplane::{BlockKey, BlockMeta};
use kvasir_proto::{self as proto, complete_request::Stage, schedule_response::Decision};
use kvasir_tests::hostile::{BESIDE_EXPORTS, Harm, exports, hostile, with_more};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const BLOCK: u32 = 16 << 10;
/// How long a scenario waits for traffic before it gives up: not an assertion, only an end.
const PATIENCE: Duration = Duration::from_secs(120);
/// Deciding threads.
const WORKERS: u64 = 2;
/// What one instance may take, but an evictor, which has 256 B for each of the pool's slots on top.
const INSTANCE_BYTES: u64 = 4 << 20;
/// Blocks that the pool has room for.
const SLOTS: u64 = 1024;
/// Instances of one slot alive at once: for each worker one that serves, one that follows and one that is given up, four spare ones,
/// a learner and the one after it, and one that is made for the load.
const INSTANCES: u64 = 3 * WORKERS + 4 + 3;
/// What the host itself may need on top: for small components, their compilation, and what the allocator keeps.
const OWN_BYTES: u64 = 160 << 20;
/// The same for components of as many functions as are compiled.
const COMPILING_BYTES: u64 = 512 << 20;
/// The same for loads at once of [`LOAD_BYTES`] each: eight are taken in, and copied twice on their way.
const LOADING_BYTES: u64 = OWN_BYTES + 8 * 3 * LOAD_BYTES as u64;
const LOAD_BYTES: usize = 8 << 20;

fn settings(dir: &std::path::Path) -> Vec<String> {
    vec![
        format!("conductor.workers={WORKERS}"),
        format!("policy.memory_bytes={INSTANCE_BYTES}B"),
        "policy.cold_deadline=100ms".into(),
        // Each harm goes on until the next is loaded.
        "policy.breaker_faults=1000000".into(),
        "policy.guard.watch=0s".into(),
        "conductor.balance_every=20ms".into(),
        format!("store.block_slots={SLOTS}"),
        r#"conductor.links=[{from="a",to="a",fixed_ms=0.1}]"#.into(),
        format!("nvme.dir={}", dir.join("nvme").display()),
        "nvme.segment_bytes=1MiB".into(),
        "nvme.capacity_bytes=32MiB".into(),
    ]
}

/// Peak of resident memory.
fn peak_bytes(host: &Host) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", host.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Honest clients, and what they saw.
#[derive(Default)]
struct Traffic {
    stop: AtomicBool,
    decided: AtomicU64,
    put: AtomicU64,
    /// Since it was last asked for: how long decisions and puts took.
    took: Mutex<[Vec<Duration>; 2]>,
}

impl Traffic {
    /// Requests for one pair of instances, one after the other. Each has an answer, and not of the fallback unless the scheduler is the
    /// bad one.
    fn schedule(&self, host: &Host, bad: &str) {
        let _stop = StopOnDrop(&self.stop);
        runtime().block_on(async {
            let mut control = Control::connect(&host.control(), "").await.unwrap();
            let conductor = &mut control.conductor;
            for (name, prefill) in [("p", true), ("d", false)] {
                let instance = proto::RegisterRequest {
                    name: name.into(),
                    prefill,
                    decode: !prefill,
                    capacity_blocks: 1 << 20,
                    domain: "a".into(),
                    ..Default::default()
                };
                conductor.register(instance).await.unwrap();
            }
            for n in 0.. {
                if self.stop.load(Relaxed) {
                    break;
                }
                let ask = proto::ScheduleRequest {
                    prompt_tokens: 4096,
                    must_run: bad != "admitter",
                    explain: n % 8 == 0,
                    ..Default::default()
                };
                let start = Instant::now();
                let answer = conductor.schedule(ask).await.unwrap().into_inner();
                self.took.lock()[0].push(start.elapsed());
                self.decided.fetch_add(1, Relaxed);
                assert!(bad == "scheduler" || answer.fallback.is_empty(), "{answer:?}");
                match answer.decision {
                    Some(Decision::Placement(_)) => {}
                    Some(Decision::Rejection(_)) if bad == "admitter" => continue,
                    other => panic!("{other:?}"),
                }
                let stage = Stage::Finished.into();
                let done =
                    proto::CompleteRequest { request_id: answer.request_id, stage, ..Default::default() };
                conductor.complete(done).await.unwrap();
            }
        });
    }

    /// Blocks for four times the pool, over and over; the newest is read back.
    fn store(&self, host: &Host) {
        let _stop = StopOnDrop(&self.stop);
        let client = host.client(Transport::Unix);
        for turn in 0u32.. {
            if self.stop.load(Relaxed) {
                break;
            }
            let n = turn % 1024;
            let key = BlockKey::from_engine_hash("hostile", &n.to_le_bytes());
            let (meta, bytes) = (BlockMeta::single(key, BLOCK), content(n, BLOCK));
            let start = Instant::now();
            let put = client.put(&meta, &bytes);
            self.took.lock()[1].push(start.elapsed());
            assert!(matches!(put, Ok(Put::Stored | Put::AlreadyStored)), "block {n}: {put:?}");
            if let Some(block) = client.get(&[key], 0).unwrap().pop().flatten() {
                assert!(block.bytes().unwrap() == bytes, "block {n}");
            }
            self.put.fetch_add(1, Relaxed);
        }
    }

    /// Waits until so many more requests were decided and blocks put.
    fn go_on(&self, turns: u64, what: &str) {
        let wanted = [&self.decided, &self.put].map(|count| (count, count.load(Relaxed) + turns));
        let start = Instant::now();
        while wanted.iter().any(|(count, wanted)| count.load(Relaxed) < *wanted) {
            assert!(!self.stop.load(Relaxed) && start.elapsed() < PATIENCE, "traffic stands still: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// How long decisions and puts took since the last time, in words.
    fn times(&self) -> String {
        let words = |name: &str, mut took: Vec<Duration>| {
            took.sort_unstable();
            let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize];
            let [half, most, nearly_all, all] = [0.5, 0.99, 0.999, 1.0].map(at);
            format!("{name} n {} p50 {half:?} p99 {most:?} p99.9 {nearly_all:?} max {all:?}", took.len())
        };
        let [decided, put] = std::mem::take(&mut *self.took.lock());
        format!("{}; {}", words("decisions", decided), words("puts", put))
    }
}

/// The scenario ends if a part of it fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Runs `attack` on one slot of a host with traffic; nobody else may notice, and the host may need `own_bytes` for it.
fn others_do_not_notice(bad: &str, own_bytes: u64, attack: impl Fn(&Host, &Traffic)) {
    let dir = tempfile::tempdir().unwrap();
    let set = settings(dir.path());
    let host = Host::start_with(dir.path(), &set.iter().map(String::as_str).collect::<Vec<_>>());
    let traffic = Arc::new(Traffic::default());
    std::thread::scope(|scope| {
        scope.spawn(|| traffic.schedule(&host, bad));
        scope.spawn(|| traffic.store(&host));
        let _stop = StopOnDrop(&traffic.stop);
        traffic.go_on(600, "before");
        traffic.times();
        traffic.go_on(1_500, "quiet");
        let (quiet, before) = (traffic.times(), peak_bytes(&host));
        attack(&host, &traffic);
        let (hostile, after) = (traffic.times(), peak_bytes(&host));
        println!("{bad}, quiet:   {quiet}\n{bad}, hostile: {hostile}");
        println!("{bad}: peak of {} MiB quiet, {} MiB in the end", before >> 20, after >> 20);
        let bound = before + INSTANCES * (INSTANCE_BYTES + 256 * SLOTS) + own_bytes;
        assert!(after <= bound, "peak of {after} B, where {bound} B were allowed");
    });
    for slot in ["scheduler", "evictor", "admitter", "balancer"].into_iter().filter(|slot| *slot != bad) {
        let now = host.policy(slot);
        let count = |name: &str| now[name].as_u64().unwrap_or_else(|| panic!("{name} in {now}"));
        let faults = ["traps", "deadline_misses", "invalid_answers", "fallbacks"].map(count);
        assert_eq!(faults, [0; 4], "{now}");
        assert_eq!(count("generation"), 1, "{now}");
        assert!(count("calls") > 0, "{now}");
    }
    host.check(&["stat", "--json"], b"", 0, r#""checksum_failures":0"#);
    host.check(&["policy", "rollback", bad], b"", 0, "");
    assert_eq!(host.terminate(), Some(0));
}

/// Loads each, one after the other; a refusal names a reason.
fn load_all(host: &Host, traffic: &Traffic, slot: &str, components: impl Iterator<Item = (String, Vec<u8>)>) {
    runtime().block_on(async {
        let mut control = Control::connect(&host.control(), "").await.unwrap();
        for (what, bytes) in components {
            let source = PolicySource::Component { name: "hostile".into(), bytes };
            match control.load_policy(slot, source, &[]).await {
                Ok(loaded) => {
                    assert_eq!(loaded.name, "hostile", "{what}");
                    traffic.go_on(15, &what);
                }
                Err(ControlError::Refused { message, .. }) => assert!(!message.is_empty(), "{what}"),
                Err(other) => panic!("{what}: {other}"),
            }
        }
    });
}

/// What is called when a policy is loaded or exchanged does its harm at once; what is called again and again, a little later.
fn every_harm(world: &str) -> impl Iterator<Item = (String, Vec<u8>)> + use<'_> {
    let places = exports(world).into_iter().chain(BESIDE_EXPORTS.map(str::to_owned));
    places.flat_map(move |place| {
        Harm::ALL.into_iter().flat_map(move |harm| {
            let cold = ["describe", "configure", "export-state", "import-state", "open", "start"];
            let after = if cold.contains(&&*place) { 0 } else { 5 };
            // The one behind it has its state exported, or takes its state in.
            let name = format!("{world}: {harm:?} in {place}");
            let component = hostile(world, &place, harm, after);
            let follower = ["export-state", "import-state"].contains(&&*place);
            let again = follower.then(|| (format!("{name}, again"), hostile(world, &place, harm, after)));
            [(name, component)].into_iter().chain(again)
        })
    })
}

fn every_harm_in(slot: &str, world: &str) {
    others_do_not_notice(slot, OWN_BYTES, |host, traffic| load_all(host, traffic, slot, every_harm(world)));
}

#[test]
fn a_scheduler_that_does_every_harm_in_every_export() {
    every_harm_in("scheduler", "learning-scheduler");
}

#[test]
fn an_evictor_that_does_every_harm_in_every_export() {
    every_harm_in("evictor", "evictor");
}

#[test]
fn an_admitter_that_does_every_harm_in_every_export() {
    every_harm_in("admitter", "learning-admitter");
}

#[test]
fn a_balancer_that_does_every_harm_in_every_export() {
    every_harm_in("balancer", "balancer");
}

/// Each is large, and all are on their way at the same time.
#[test]
fn a_hundred_loads_at_once() {
    const LOADS: usize = 100;
    // Not made by the tasks: on a busy machine a hundred of these keep the connection from answering pings.
    let component = with_more("scheduler", "(func)");
    others_do_not_notice("scheduler", LOADING_BYTES, |host, traffic| {
        let answered = runtime().block_on(async {
            let control = Control::connect(&host.control(), "").await.unwrap();
            let loads = (0..LOADS).map(|n| {
                let (mut control, component) = (control.clone(), component.clone());
                tokio::task::spawn(async move {
                    let bytes = padded(component, LOAD_BYTES, n as u8);
                    let source = PolicySource::Component { name: "hostile".into(), bytes };
                    control.load_policy("scheduler", source, &[]).await
                })
            });
            let loads: Vec<_> = loads.collect();
            let (mut loaded, mut lost) = (0, Vec::new());
            for load in loads {
                match load.await.unwrap() {
                    Ok(_) => loaded += 1,
                    Err(ControlError::Refused { message, .. }) => {
                        assert!(message.contains("try again"), "{message}");
                    }
                    // All of them, since one alone may not say why the connection ended.
                    Err(other) => lost.push(other.to_string()),
                }
            }
            assert!(lost.is_empty(), "{loaded} of {LOADS} were loaded, and of the others {lost:#?}");
            loaded
        });
        println!("{answered} of {LOADS} were loaded");
        assert!(answered > 0);
        traffic.go_on(100, "after a hundred loads");
    });
}

/// With a custom section that makes it as large, and another one by `mark`.
fn padded(mut component: Vec<u8>, bytes: usize, mark: u8) -> Vec<u8> {
    let length = (bytes - component.len()) as u32;
    // Its length always in five bytes; of its content the first is the length of its name.
    component.push(0);
    component.extend((0..5).map(|i| ((length >> (7 * i)) & 0x7f) as u8 | if i < 4 { 0x80 } else { 0 }));
    let end = component.len() + length as usize;
    component.extend([1, b'x']);
    component.resize(end, mark);
    component
}

#[test]
fn components_that_are_made_to_be_compiled_for_ever() {
    let locals = |n: usize| format!("(local{})", " i32".repeat(n));
    let functions = |n| "(func (result i32) (i32.const 1))".repeat(n);
    let nesting = |depth| format!("(func {} {})", "block ".repeat(depth), "end ".repeat(depth));
    let loops = |depth: usize, of: usize| {
        let count = |n| format!("local.get {n} i32.const 1 i32.add local.set {n} ");
        let counted: String = (0..of).map(count).collect();
        format!("(func {} {} {counted} {})", locals(of), "loop ".repeat(depth), "end ".repeat(depth))
    };
    let joins = |blocks: usize, of: usize| {
        let set: String = (1..=of).map(|n| format!("local.get 0 local.set {n} ")).collect();
        let read: String = (1..=of).map(|n| format!("local.get {n} drop ")).collect();
        let skipped = format!("block local.get 0 br_if 0 {set} end ");
        let more = "block local.get 0 br_if 0 end ".repeat(blocks);
        format!("(func (param i32) {} {skipped} {more} {read})", locals(of))
    };
    let bombs = [
        ("too many functions", functions(60_001)),
        ("functions", functions(59_000)),
        ("too deep blocks", nesting(300_000)),
        ("deep blocks", nesting(9_999)),
        ("too many loops", format!("(func {})", "loop end ".repeat(100_000))),
        ("loops", format!("(func {})", "loop end ".repeat(4_000))),
        ("variables of loops", loops(500, 500)),
        ("variables of blocks", joins(1_000, 1_000)),
    ];
    others_do_not_notice("balancer", COMPILING_BYTES, |host, traffic| {
        for (what, more) in &bombs {
            let start = Instant::now();
            let before = peak_bytes(host);
            let bomb = with_more("balancer", more);
            let bytes = bomb.len();
            load_all(host, traffic, "balancer", std::iter::once(((*what).to_owned(), bomb)));
            println!(
                "{what} {bytes} B: {:?}, peak {} MiB more",
                start.elapsed(),
                (peak_bytes(host) - before) >> 20
            );
        }
    });
}
