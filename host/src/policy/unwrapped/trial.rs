//! Whether a policy answers alike however it is entered, asked at random.

use crate::policy::Fault;
use crate::policy::evictor::EvictorEngine;
use crate::policy::scheduler::SchedulerEngine;
use kvasir_policy::evictor::{Event, EventKind, Layout as PoolLayout, NO_SLOT};
use kvasir_policy::scheduler::{Column, DecodeRow, Layout, PrefillRow, Question, Request};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

/// Questions of each trial.
const QUESTIONS: u64 = 16;
const INSTANCES: u16 = 8;
/// Block slots of the pool that evictors are asked about.
const SLOTS: u32 = 64;

/// # Errors
/// Either fails.
pub(in crate::policy) fn schedulers_agree<'a>(
    one: &'a mut dyn SchedulerEngine,
    other: &'a mut dyn SchedulerEngine,
) -> Result<bool, Fault> {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let slots = usize::from(INSTANCES);
    let layout = Layout::of(INSTANCES.into(), INSTANCES.into(), 16).encode();
    let prefill: Vec<f32> = (0..INSTANCES).flat_map(|slot| prefill_row(slot, &mut rng).encode()).collect();
    let decode: Vec<f32> = (0..INSTANCES).flat_map(|slot| decode_row(slot, &mut rng).encode()).collect();
    for engine in [&mut *one, &mut *other] {
        engine.open(&layout)?;
        engine.update_prefill(&prefill)?;
        engine.update_decode(&decode)?;
        engine.set_thresholds(&[4.0])?;
    }
    for _ in 0..QUESTIONS {
        let prefix: Vec<u32> = (0..INSTANCES).map(|_| rng.random_range(0..200)).collect();
        let question = Question::new(rng.random_range(0.0..2_000.0), &request(&mut rng), slots, slots);
        let question = question.with(Column::Prefix, &prefix);
        let scores = |engine: &mut dyn SchedulerEngine| {
            let scores = engine.explain(&question)?;
            Ok::<Vec<u32>, Fault>(scores.into_iter().map(f32::to_bits).collect())
        };
        if one.schedule(&question)? != other.schedule(&question)? || scores(one)? != scores(other)? {
            return Ok(false);
        }
    }
    Ok(one.export_state()? == other.export_state()?)
}

fn request(rng: &mut ChaCha8Rng) -> Request {
    Request {
        prompt_tokens: rng.random_range(1..4_000),
        output_tokens: rng.random_range(0..500),
        session: rng.random_range(0..4),
        seed: rng.random(),
        ttft_slo: if rng.random_bool(0.5) { f32::INFINITY } else { rng.random_range(0.0..600.0) },
        tbt_slo: f32::INFINITY,
        ..Request::default()
    }
}

fn prefill_row(slot: u16, rng: &mut ChaCha8Rng) -> PrefillRow {
    PrefillRow {
        slot,
        available: rng.random_bool(0.9),
        busy_until: rng.random_range(0.0..2_000.0),
        cost_fixed: rng.random_range(0.0..10.0),
        cost_per_token: rng.random_range(0.01..0.2),
        cost_per_pair: 1e-6,
        transfer_fixed: 1.0,
        transfer_per_block: rng.random_range(0.1..2.0),
        free_blocks: rng.random_range(0..10_000),
        capacity_blocks: 10_000,
        identity: u32::from(slot) + 1,
        ..PrefillRow::default()
    }
}

fn decode_row(slot: u16, rng: &mut ChaCha8Rng) -> DecodeRow {
    DecodeRow {
        slot,
        available: rng.random_bool(0.9),
        free_blocks: rng.random_range(0..10_000),
        sequences: rng.random_range(0..40),
        context_tokens: rng.random_range(0..9_000),
        step_fixed: 10.0,
        step_per_sequence: rng.random_range(0.1..0.5),
        step_per_token: 1e-4,
        identity: u32::from(slot) + 1_001,
        ..DecodeRow::default()
    }
}

/// # Errors
/// Either fails.
pub(in crate::policy) fn evictors_agree<'a>(
    one: &'a mut dyn EvictorEngine,
    other: &'a mut dyn EvictorEngine,
) -> Result<bool, Fault> {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let layout = PoolLayout::of(SLOTS).encode();
    let mut events = Vec::new();
    // Slots are taken in turns, so that each is free when a block comes into it.
    let mut free: Vec<u32> = (0..SLOTS).rev().collect();
    for engine in [&mut *one, &mut *other] {
        engine.open(&layout)?;
    }
    for now_ms in 0..QUESTIONS {
        events.clear();
        while let Some(slot) = free.pop() {
            event(EventKind::Insert, slot, now_ms, &mut rng).encode(0, &mut events);
            // Now and then one that was there before.
            let seen = rng.random_range(0..SLOTS);
            if !free.contains(&seen) {
                event(EventKind::Hit, seen, now_ms, &mut rng).encode(0, &mut events);
            }
        }
        let [mut victims, mut others] = [Vec::new(), Vec::new()];
        let want = rng.random_range(1..16);
        for (engine, victims) in [(&mut *one, &mut victims), (&mut *other, &mut others)] {
            engine.on_events(0, &events)?;
            engine.select_victims(now_ms, want, victims)?;
        }
        if victims != others {
            return Ok(false);
        }
        free.extend(victims.iter().map(|victim| victim.slot).filter(|slot| *slot < SLOTS));
    }
    Ok(one.export_state()? == other.export_state()?)
}

fn event(kind: EventKind, slot: u32, time_ms: u64, rng: &mut ChaCha8Rng) -> Event {
    Event {
        kind,
        replayed: false,
        class: rng.random_range(0..4),
        slot,
        parent_or_uses: if kind == EventKind::Hit { 1 } else { NO_SLOT },
        depth: 0,
        size_bytes: 4_096,
        time_ms,
        identity: rng.random(),
        tenant: 0,
    }
}
