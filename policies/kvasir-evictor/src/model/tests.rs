use super::*;
use crate::Kvasir;
use crate::cells::{Request, queue_of};
use kvasir_policy::Evictor;
use kvasir_policy::evictor::{EVENT, EVENTS_MAX, Event, EventKind, Events};

const NEW: Request = Request { brought: 0, known: 0 };

/// A class whose blocks come back after ten seconds, and one whose blocks do not.
fn taught() -> Model {
    let mut model = Model::default().reopened();
    for second in 0..20_000_u64 {
        let now_ms = second * 1_000;
        model.used(1 + second % 10, queue_of(1, NEW, 1, false), now_ms);
        model.used(100 + second, queue_of(2, NEW, 1, false), now_ms);
        model.fit_if_due(2, now_ms, 100);
    }
    model
}

#[test]
fn classes_are_told_apart_and_the_past_is_bounded() {
    let model = taught();
    let [back, gone, unknown] = [1, 2, 3].map(|class| model.worth(queue_of(class, NEW, 1, false), 5_000));
    assert!(back > 2.0 * unknown && unknown > 2.0 * gone, "{back} {unknown} {gone}");
    let reused = model.tally.reused();
    assert!(reused <= REMEMBERED + FIT_EVENTS as f64, "{reused}");
    assert!(model.worth(queue_of(1, NEW, 1, false), u64::MAX) > 0.0);
}

/// What fits while the pool fills is the most that a call can ask for: a policy that missed its deadline there was dropped.
#[test]
fn a_call_fits_once_however_many_events_it_tells() {
    let mut policy = Kvasir::default();
    policy.open(1);
    let hit = Event {
        kind: EventKind::Hit,
        replayed: false,
        class: 1,
        slot: 0,
        parent_or_uses: 1,
        depth: 0,
        size_bytes: 1,
        time_ms: 1_000,
        identity: 7,
        tenant: 0,
    };
    let mut words = Vec::new();
    (0..EVENTS_MAX).for_each(|_| hit.encode(0, &mut words));
    policy.on_events(Events::new(0, EVENT, &words));
    let told = EVENTS_MAX as u64;
    assert_eq!(
        (policy.model.events, policy.model.next_fit),
        (told, told + told / 4),
        "the next one is due after a quarter more"
    );
}

/// Requests that bring 16 new blocks, after which all come back, and such that bring one, after which none does.
#[test]
fn what_a_request_brought_is_told_apart() {
    let mut model = Model::default().reopened();
    let [many, one] = [16, 1].map(|brought| queue_of(1, Request { brought, ..NEW }, 1, false));
    for second in 0..20_000_u64 {
        model.used(1 + second % 10, many, second * 1_000);
        model.used(100 + second, one, second * 1_000);
        model.fit_if_due(2, second * 1_000, 100);
    }
    assert!(model.worth(many, 5_000) > 2.0 * model.worth(one, 5_000));
    let of_class = model.of_class;
    assert!((of_class[1] - 1.0).abs() < 0.01, "what is a matter of cells is none of class: {of_class:?}");
}

#[test]
fn before_anything_is_known_use_and_recency_count() {
    let model = Model::default();
    let worth = |uses, tail, age_ms| model.worth(queue_of(0, NEW, uses, tail), age_ms);
    assert!(worth(0, false, 1_000) > worth(0, false, 60_000));
    assert!(worth(1, false, 1_000) > worth(0, false, 1_000));
    assert!(worth(0, true, 1_000) < worth(0, false, 60_000));
}

#[test]
fn state_passes_on_and_bad_state_is_refused() {
    let state = taught().export();
    let mut successor = Model::default();
    successor.import(&state).unwrap();
    assert_eq!(successor.export(), state);
    let successor = successor.reopened();
    let [back, gone] = [1, 2].map(|class| successor.worth(queue_of(class, NEW, 1, false), 5_000));
    assert!(back > 2.0 * gone);
    let changed = |at: usize, bytes: &[u8]| {
        let mut state = state.clone();
        state[at..at + bytes.len()].copy_from_slice(bytes);
        state
    };
    const CELLS_AT: usize = 1 + CLASSES * SEEN_BYTES;
    let bad = (-1.0_f64).to_le_bytes();
    for bad in [
        &state[..40],
        &[],
        &[9],
        &changed(CELLS_AT, &[255; 2]),
        &changed(1, &bad),
        &changed(CELLS_AT + 2, &bad),
    ] {
        assert!(Model::default().import(bad).is_err());
    }
}
