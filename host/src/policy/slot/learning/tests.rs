use super::*;
use crate::policy::catalog::Catalog;
use crate::policy::engine::Engine;
use crate::policy::scheduler::SchedulerHook;
use crate::policy::slot::{Builder, Source, Worker};
use crate::policy::{PolicyConfig, Share, SlotKind, Stage};
use kvasir_policy::learning::End;

fn learner(mode: &str, after: u32) -> (Source, Vec<(String, String)>) {
    let bytes = kvasir_tests::guest("learning").to_vec();
    let settings = [("mode", mode.to_owned()), ("after", after.to_string())];
    (Source::Bytes { name: "mine".into(), bytes }, settings.map(|(n, v)| (n.to_owned(), v)).into())
}

fn slot(wanted: (Source, Vec<(String, String)>), catalog: Option<Catalog>) -> Arc<Slot<SchedulerHook>> {
    let config = PolicyConfig::default();
    let (engine, builder) = (Engine::new(&config, None).unwrap(), Builder::start().unwrap());
    Slot::open(engine, &config, wanted, catalog, builder).unwrap()
}

fn finish(slot: &Slot<SchedulerHook>, requests: usize) {
    let rejected = Outcome { end: End::Rejected, ..Outcome::default() };
    (0..requests).for_each(|_| slot.lessons.feed.push(&Outcome::default()));
    slot.lessons.feed.push(&rejected);
}

/// What the deciding half said last of what it knows.
fn known(slot: &Slot<SchedulerHook>, worker: &mut Worker<SchedulerHook>) -> Option<String> {
    worker.refresh();
    let lines = slot.log.read().0.into_iter().rev();
    lines.map(|line| line.text).find(|text| text.starts_with("knows of"))
}

fn until(class: &mut Class<SchedulerHook>, done: impl Fn(&Class<SchedulerHook>) -> bool) {
    while !done(class) {
        class.turn(Instant::now()); // the test runner's time limit ends this
    }
}

#[test]
fn what_is_learned_reaches_every_engine_that_decides() {
    let slot = slot(learner("none", 0), None);
    let mut workers = [slot.worker(), slot.worker()];
    let mut class = Class::new(slot.clone(), Instant::now());
    class.turn(Instant::now());
    for worker in &mut workers {
        assert_eq!(known(&slot, worker).as_deref(), Some("knows of 0 finished requests"));
    }
    finish(&slot, 3);
    class.turn(Instant::now());
    for worker in &mut workers {
        assert_eq!(known(&slot, worker).as_deref(), Some("knows of 3 finished requests"));
    }
    let told = |slot: &Slot<SchedulerHook>| {
        slot.log.read().0.iter().filter(|line| line.text == "knows of 3 finished requests").count()
    };
    assert_eq!(told(&slot), 2);
    // Those that follow a failure are told too, and nobody is told the same again.
    workers[0].drop_engine();
    while told(&slot) < 3 {
        workers[0].refresh();
    }
    finish(&slot, 0);
    class.turn(Instant::now());
    for worker in &mut workers {
        worker.refresh();
    }
    assert_eq!(told(&slot), 3, "a rejection taught nothing new");
    let status = slot.lessons.feed.status();
    assert_eq!((status.outcomes, status.published, status.knowledge_bytes), (5, 2, 12));
    assert!(status.learns && status.faults == 0 && slot.current().counters.values().traps == 0);
}

#[test]
fn no_failure_of_a_learner_touches_what_decides() {
    for (mode, faults) in [("trap", 1), ("loop", 1), ("grow", 1), ("publish-too-much", 2)] {
        let slot = slot(learner(mode, 2), None);
        let (mut class, mut worker) = (Class::new(slot.clone(), Instant::now()), slot.worker());
        class.turn(Instant::now());
        finish(&slot, 5);
        until(&mut class, |_| slot.lessons.feed.status().faults >= faults);
        worker.refresh();
        assert_eq!(worker.tell(|engine| engine.export_state().map(|state| state.len())), Ok(12), "{mode}");
        let counters = slot.current().counters.values();
        assert_eq!((counters.traps, counters.deadline_misses, counters.invalid_answers), (0, 0, 0), "{mode}");
        assert!(slot.log.read().0.iter().any(|line| line.text.starts_with("the learner failed")), "{mode}");
        assert_eq!(slot.current().generation, 1, "{mode}");
    }
}

#[test]
fn a_learner_that_traps_goes_on_from_what_was_kept() {
    let slot = slot(learner("trap", 4), None);
    let (mut class, mut worker) = (Class::new(slot.clone(), Instant::now()), slot.worker());
    class.turn(Instant::now());
    finish(&slot, 3);
    class.turn(class.service.keep_due);
    finish(&slot, 9);
    until(&mut class, |class| slot.lessons.feed.status().faults == 1 && class.service.learner.is_some());
    finish(&slot, 2);
    class.turn(Instant::now());
    assert_eq!(known(&slot, &mut worker).as_deref(), Some("knows of 5 finished requests"));
}

#[test]
fn what_was_learned_survives_a_restart_and_a_swap_and_is_no_other_policys() {
    let folder = tempfile::tempdir().unwrap();
    let catalog =
        Catalog::open(kvasir_state_db::open(folder.path(), 1 << 20).unwrap().db, folder.path()).unwrap();
    let open = || slot(learner("none", 0), Some(catalog.clone()));
    let first = open();
    let mut class = Class::new(first.clone(), Instant::now());
    class.turn(Instant::now());
    finish(&first, 7);
    class.turn(Instant::now());
    class.keep_state(); // as at the end
    drop((class, first));

    let second = open();
    let (mut class, mut worker) = (Class::new(second.clone(), Instant::now()), second.worker());
    class.turn(Instant::now());
    assert_eq!(known(&second, &mut worker).as_deref(), Some("knows of 7 finished requests"));
    finish(&second, 1);
    class.turn(Instant::now());
    let (source, settings) = learner("none", 1);
    second.load(source, settings).unwrap();
    finish(&second, 1); // before its learner is there
    class.turn(Instant::now());
    assert_eq!(known(&second, &mut worker).as_deref(), Some("knows of 9 finished requests"));

    second.load(Source::Native("random".into()), Vec::new()).unwrap();
    class.turn(Instant::now());
    worker.refresh();
    finish(&second, 1);
    let status = second.lessons.feed.status();
    assert!(!status.learns && second.lessons.feed.take().is_empty(), "nobody learns");
    second.rollback().unwrap();
    class.turn(Instant::now());
    assert_eq!(known(&second, &mut worker).as_deref(), Some("knows of 9 finished requests"));
    assert!(catalog.learned(SlotKind::Scheduler, "counting").unwrap().is_some());
    catalog.keep_learned(SlotKind::Scheduler, "other", &[1], &["other"]).unwrap();
    assert!(catalog.learned(SlotKind::Scheduler, "counting").unwrap().is_none(), "named by nobody");
}

#[test]
fn a_state_that_is_not_taken_is_not_offered_again() {
    let folder = tempfile::tempdir().unwrap();
    let catalog =
        Catalog::open(kvasir_state_db::open(folder.path(), 1 << 20).unwrap().db, folder.path()).unwrap();
    catalog.keep_learned(SlotKind::Scheduler, "counting", &[3; 8], &[]).unwrap();
    let slot = slot(learner("trap-on-import", 0), Some(catalog));
    let (mut class, mut worker) = (Class::new(slot.clone(), Instant::now()), slot.worker());
    until(&mut class, |class| slot.lessons.feed.status().faults == 1 && class.service.learner.is_some());
    assert_eq!(known(&slot, &mut worker).as_deref(), Some("knows of 0 finished requests"));
}

#[test]
fn what_cannot_be_adopted_costs_an_instance_and_not_the_decision() {
    let slot = slot(learner("trap-on-adopt", 0), None);
    let (mut class, mut worker) = (Class::new(slot.clone(), Instant::now()), slot.worker());
    while slot.current().spares.lock().is_empty() {
        std::thread::yield_now();
    }
    class.turn(Instant::now());
    assert!(worker.refresh(), "another engine, which has to be given everything");
    assert_eq!(worker.tell(|engine| engine.export_state().map(|state| state.len())), Ok(12));
    assert!(!worker.refresh(), "it is not asked to adopt the same again");
    assert_eq!(slot.current().counters.values().traps, 1);
}

#[test]
fn a_learner_that_is_slow_misses_the_oldest() {
    let feed = Feed::default();
    let outcome = |decision| Outcome { decision, ..Outcome::default() };
    feed.push(&outcome(0));
    assert!(feed.take().is_empty(), "nobody learns");
    feed.want(true);
    (0..QUEUE as u64 + 5).for_each(|decision| feed.push(&outcome(decision)));
    assert_eq!((feed.status().dropped, feed.queue.lock().len()), (5, QUEUE));
    let words = feed.take();
    assert_eq!((words.len(), words[2]), (OUTCOMES_MAX * OUTCOME, 5));
}

#[test]
fn a_thread_keeps_what_was_learned_when_it_ends() {
    let folder = tempfile::tempdir().unwrap();
    let catalog =
        Catalog::open(kvasir_state_db::open(folder.path(), 1 << 20).unwrap().db, folder.path()).unwrap();
    let slot = slot(learner("none", 0), Some(catalog.clone()));
    let learning = Learning::start(&slot, Duration::from_millis(1)).unwrap();
    while !slot.lessons.feed.status().learns {
        std::thread::yield_now();
    }
    finish(&slot, 2);
    while slot.lessons.feed.status().outcomes < 3 {
        std::thread::yield_now();
    }
    drop(learning);
    let kept = catalog.learned(SlotKind::Scheduler, "counting").unwrap().unwrap();
    assert_eq!(kept.first_chunk(), Some(&2u64.to_le_bytes()));
}

/// Both seats hear of so many finished requests.
fn finish_for_both(slot: &Slot<SchedulerHook>, requests: usize) {
    for feed in slot.feeds() {
        (0..requests).for_each(|_| feed.push(&Outcome::default()));
    }
}

fn worker_on_trial(slot: &Arc<Slot<SchedulerHook>>) -> Worker<SchedulerHook> {
    let trial = slot.trial().unwrap();
    Worker::of_trial(slot, &trial.version, trial.seat())
}

#[test]
fn what_is_on_trial_learns_and_goes_on_with_that_when_it_is_promoted() {
    let folder = tempfile::tempdir().unwrap();
    let catalog =
        Catalog::open(kvasir_state_db::open(folder.path(), 1 << 20).unwrap().db, folder.path()).unwrap();
    let native = || (Source::Native("random".into()), Vec::new());
    let on_trial = |slot: &Arc<Slot<SchedulerHook>>| {
        let (source, settings) = learner("none", 0);
        slot.load_on_trial(source, settings, Stage::Canary(Share::PerMille(100))).unwrap();
    };
    let first = slot(native(), Some(catalog.clone()));
    let mut class = Class::new(first.clone(), Instant::now());
    finish_for_both(&first, 9); // before the trial
    on_trial(&first);
    class.turn(Instant::now());
    finish_for_both(&first, 3);
    class.turn(Instant::now());
    let mut worker = worker_on_trial(&first);
    assert_eq!(known(&first, &mut worker).as_deref(), Some("knows of 3 finished requests"));
    let (in_service, status) = first.learning();
    assert_eq!((status.learns, status.outcomes, status.published, status.faults), (true, 3, 2, 0));
    assert!(!in_service.learns, "the native policy does not learn");
    class.keep_state(); // as at the end
    drop((class, worker));
    first.close();

    // Another start goes on with the trial, and with what it learned.
    let second = slot(native(), Some(catalog.clone()));
    let mut class = Class::new(second.clone(), Instant::now());
    class.turn(Instant::now());
    finish_for_both(&second, 2);
    class.turn(Instant::now());
    assert_eq!(
        known(&second, &mut worker_on_trial(&second)).as_deref(),
        Some("knows of 5 finished requests")
    );
    finish_for_both(&second, 1); // not heard yet
    second.promote().unwrap();
    // Its first decision in service is made on what it learned before.
    assert_eq!(known(&second, &mut second.worker()).as_deref(), Some("knows of 5 finished requests"));
    finish_for_both(&second, 1);
    class.turn(Instant::now());
    assert_eq!(known(&second, &mut second.worker()).as_deref(), Some("knows of 7 finished requests"));
    let kept = |name: &str| catalog.learned(SlotKind::Scheduler, name).unwrap();
    assert_eq!(kept("counting").unwrap().first_chunk(), Some(&5_u64.to_le_bytes()));
    let (in_service, on_trial) = second.learning();
    assert!(in_service.learns && !on_trial.learns && on_trial.outcomes == 0, "{on_trial:?}");
}

#[test]
fn a_learner_on_trial_touches_nothing_in_service() {
    let slot = slot(learner("none", 0), None);
    let mut class = Class::new(slot.clone(), Instant::now());
    class.turn(Instant::now());
    finish_for_both(&slot, 2);
    class.turn(Instant::now());
    let (source, settings) = learner("trap", 2);
    slot.load_on_trial(source, settings, Stage::Shadow).unwrap();
    class.turn(Instant::now());
    finish_for_both(&slot, 5);
    until(&mut class, |_| slot.learning().1.faults > 0);
    let (in_service, on_trial) = slot.learning();
    assert_eq!((in_service.outcomes, in_service.faults, on_trial.learns), (7, 0, true));
    assert_eq!(known(&slot, &mut slot.worker()).as_deref(), Some("knows of 7 finished requests"));
    slot.rollback().unwrap();
    class.turn(Instant::now());
    assert!(!slot.learning().1.learns && slot.current().generation == 1);
}
