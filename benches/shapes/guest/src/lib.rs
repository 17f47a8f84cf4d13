//! The same scan behind every shape of `shapes.wit`: the prefill instance where a request starts soonest.
#![cfg(target_arch = "wasm32")]

wit_bindgen::generate!({ path: "../wit", world: "shapes" });

use bench::shapes::table;
use std::cell::RefCell;

/// Values in a row.
const WIDTH: usize = 17;
/// Words of a question before its column.
const WORDS: usize = 19;
/// Tokens in a block.
const BLOCK: f32 = 16.0;

#[derive(Default)]
struct Table {
    rows: Vec<f32>,
    available: Vec<f32>,
    busy_until: Vec<f32>,
    c0: Vec<f32>,
    c1: Vec<f32>,
    c2: Vec<f32>,
    costs: Vec<f32>,
}

thread_local!(static TABLE: RefCell<Table> = RefCell::default());

/// Milliseconds until the first token.
fn cost(now: f32, tokens: f32, prefix: u32, [available, busy_until, c0, c1, c2]: [f32; 5]) -> f32 {
    let held = (prefix as f32 * BLOCK).min(tokens);
    let new = tokens - held;
    let cost = (busy_until - now).max(0.0) + c0 + c1 * new + c2 * new * (held + new * 0.5);
    if available == 1.0 { cost } else { f32::INFINITY }
}

fn smallest(costs: impl Iterator<Item = f32>) -> u32 {
    let mut best = (f32::INFINITY, u32::MAX);
    for (slot, cost) in costs.enumerate() {
        if cost < best.0 {
            best = (cost, slot as u32);
        }
    }
    best.1
}

fn scan_rows(now: f32, tokens: u32, prefix: &[u32], rows: &[f32]) -> u32 {
    let rows = rows.chunks_exact(WIDTH).zip(prefix);
    smallest(
        rows.map(|(row, &prefix)| cost(now, tokens as f32, prefix, [row[1], row[2], row[3], row[4], row[5]])),
    )
}

fn scan_columns(now: f32, tokens: u32, prefix: &[u32], table: &mut Table) -> u32 {
    let Table { available, busy_until, c0, c1, c2, costs, .. } = table;
    let slots = costs.len();
    let (available, busy_until, prefix) = (&available[..slots], &busy_until[..slots], &prefix[..slots]);
    let (c0, c1, c2) = (&c0[..slots], &c1[..slots], &c2[..slots]);
    for slot in 0..slots {
        let row = [available[slot], busy_until[slot], c0[slot], c1[slot], c2[slot]];
        costs[slot] = cost(now, tokens as f32, prefix[slot], row);
    }
    smallest(costs.iter().copied())
}

fn decided(prefill: u32) -> Decision {
    Decision {
        prefill,
        decode: prefill,
        transfer_blocks: 0,
        source: 0,
        reason: 0,
        retry_after: 0,
        session_memo: 0,
        tenant_charge: 0,
    }
}

fn kept(now: f32, question: &[u32]) -> u32 {
    TABLE.with_borrow(|table| scan_rows(now, question[0], &question[WORDS..], &table.rows))
}

struct Shapes;

impl Guest for Shapes {
    fn empty(_: Vec<u32>) {}

    fn update(rows: Vec<f32>) {
        let column = |at: usize| rows.chunks_exact(WIDTH).map(|row| row[at]).collect::<Vec<_>>();
        TABLE.set(Table {
            available: column(1),
            busy_until: column(2),
            c0: column(3),
            c1: column(4),
            c2: column(5),
            costs: column(0),
            rows,
        });
    }

    fn sent_records(now: f32, question: Vec<u32>, rows: Vec<Row>) -> Decision {
        let rows = rows.iter().zip(&question[WORDS..]);
        decided(smallest(rows.map(|(row, &prefix)| {
            cost(now, question[0] as f32, prefix, [row.available, row.busy_until, row.c0, row.c1, row.c2])
        })))
    }

    fn sent_list(now: f32, question: Vec<u32>, rows: Vec<f32>) -> Decision {
        decided(scan_rows(now, question[0], &question[WORDS..], &rows))
    }

    fn asked(now: f32, question: Vec<u32>, slots: u32) -> Decision {
        let rows = (0..slots).zip(&question[WORDS..]);
        decided(smallest(rows.map(|(slot, &prefix)| {
            let row = table::get(slot);
            cost(now, question[0] as f32, prefix, [row.available, row.busy_until, row.c0, row.c1, row.c2])
        })))
    }

    fn kept(now: f32, question: Vec<u32>) -> Decision {
        decided(kept(now, &question))
    }

    fn kept_columns(now: f32, question: Vec<u32>) -> Decision {
        decided(TABLE.with_borrow_mut(|table| scan_columns(now, question[0], &question[WORDS..], table)))
    }

    fn kept_typed(now: f32, request: Request, prefix: Vec<u32>) -> Decision {
        decided(TABLE.with_borrow(|table| scan_rows(now, request.prompt_tokens, &prefix, &table.rows)))
    }

    fn kept_to_list(now: f32, question: Vec<u32>) -> Vec<u32> {
        let slot = kept(now, &question);
        vec![slot, slot, 0, 0, 0, 0, 0, 0, 0, 0]
    }

    fn kept_to_word(now: f32, question: Vec<u32>) -> u64 {
        u64::from(kept(now, &question))
    }
}

export!(Shapes);
