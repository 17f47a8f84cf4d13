use super::*;

/// A class whose blocks come back after ten seconds, and one whose blocks do not.
fn taught() -> Model {
    let mut model = Model::default().reopened();
    for second in 0..20_000_u64 {
        let now_ms = second * 1_000;
        model.used(1 + second % 10, cell_of(1, 1, false), now_ms);
        model.used(100 + second, cell_of(2, 1, false), now_ms);
        (0..2).for_each(|_| model.fit_if_due(now_ms, 100));
    }
    model
}

#[test]
fn classes_are_told_apart_and_the_past_is_bounded() {
    let model = taught();
    let [back, gone, unknown] = [1, 2, 3].map(|class| model.worth(cell_of(class, 1, false), 5_000));
    assert!(back > 2.0 * unknown && unknown > 2.0 * gone, "{back} {unknown} {gone}");
    let reused: f64 = model.counts.iter().map(Counts::reused).sum();
    assert!(reused <= REMEMBERED + FIT_EVENTS as f64, "{reused}");
    assert!(model.worth(cell_of(1, 1, false), u64::MAX) > 0.0);
}

#[test]
fn before_anything_is_known_use_and_recency_count() {
    let model = Model::default();
    let worth = |uses, tail, age_ms| model.worth(cell_of(0, uses, tail), age_ms);
    assert!(worth(0, false, 1_000) > worth(0, false, 60_000));
    assert!(worth(1, false, 1_000) > worth(0, false, 1_000));
    assert!(worth(0, true, 1_000) < worth(0, false, 60_000));
}

#[test]
fn cells_are_dense_and_high_classes_are_one() {
    let cells: std::collections::BTreeSet<_> = (0..CLASSES as u16)
        .flat_map(|class| [0, 1, 2, 3, 5, 9, 17, 65, 257].map(|uses| cell_of(class, uses, false)))
        .chain((0..CLASSES as u16).map(|class| cell_of(class, 0, true)))
        .collect();
    assert_eq!((cells.len(), cells.last().copied()), (CELLS, Some(CELLS as u16 - 1)));
    assert_eq!(cell_of(u16::MAX, u32::MAX, true), CELLS as u16 - 1);
}

#[test]
fn state_passes_on_and_bad_state_is_refused() {
    let state = taught().export();
    let mut successor = Model::default();
    successor.import(&state).unwrap();
    assert_eq!(successor.export(), state);
    let successor = successor.reopened();
    let [back, gone] = [1, 2].map(|class| successor.worth(cell_of(class, 1, false), 5_000));
    assert!(back > 2.0 * gone);
    let changed = |at: usize, bytes: &[u8]| {
        let mut state = state.clone();
        state[at..at + bytes.len()].copy_from_slice(bytes);
        state
    };
    for bad in [&state[..40], &[], &[9], &changed(1, &[255; 2]), &changed(3, &(-1.0_f64).to_le_bytes())] {
        assert!(Model::default().import(bad).is_err());
    }
}
