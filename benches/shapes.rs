//! What a decision costs by how it is asked for: the alternatives of docs/design/0001, each the same scan of the same rows.

use kvasir::bench::{Times, time_calls};
use kvasir_benches::measuring;
use wasmtime::component::{Component, HasSelf, Linker};
use wasmtime::{Config, Engine, Instance, Memory, Module, Result, Store, TypedFunc};

wasmtime::component::bindgen!({ path: "shapes/wit", world: "shapes" });

use bench::shapes::table;

const COMPONENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/shapes.component.wasm"));
const MODULE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/shapes.wasm"));
/// Words of a question before its column, and values in a row.
const WORDS: usize = 19;
const WIDTH: usize = 17;
const SIZES: [usize; 3] = [8, 64, 512];
const NOW: f32 = 1_000.0;

fn main() -> Result<()> {
    let calls = if measuring() { 20_000 } else { 100 };
    println!("{:<36} {:>9} {:>9} {:>9}   p50 ns by rows", "shape", SIZES[0], SIZES[1], SIZES[2]);
    for interrupted in [false, true] {
        if interrupted {
            println!("interrupted by epochs:");
        }
        let mut config = Config::new();
        // As the daemon has them.
        config.cranelift_nan_canonicalization(true).wasm_relaxed_simd(false).epoch_interruption(interrupted);
        let engine = Engine::new(&config)?;
        for (name, run) in SHAPES {
            let mut columns = Vec::new();
            for rows in SIZES {
                columns.push(run(&engine, rows, calls)?.ns(0.5));
            }
            println!("{name:<36} {:>9} {:>9} {:>9}", columns[0], columns[1], columns[2]);
        }
    }
    Ok(())
}

type Run = fn(&Engine, usize, usize) -> Result<Times>;

const SHAPES: [(&str, Run); 12] = [
    ("component, an empty call", |engine, rows, calls| {
        asked(engine, rows, calls, |guest, store, _| guest.call_empty(store, &[]).map(|()| None))
    }),
    ("component, rows sent as records", |engine, rows, calls| {
        asked(engine, rows, calls, |guest, store, said| {
            guest.call_sent_records(store, NOW, &said.question, &said.records).map(Some)
        })
    }),
    ("component, rows sent as a list", |engine, rows, calls| {
        asked(engine, rows, calls, |guest, store, said| {
            guest.call_sent_list(store, NOW, &said.question, &said.rows).map(Some)
        })
    }),
    ("component, rows asked for", |engine, rows, calls| {
        asked(engine, rows, calls, |guest, store, said| {
            guest.call_asked(store, NOW, &said.question, said.records.len() as u32).map(Some)
        })
    }),
    ("component, rows kept", |engine, rows, calls| {
        asked(engine, rows, calls, |guest, store, said| guest.call_kept(store, NOW, &said.question).map(Some))
    }),
    ("component, columns kept", |engine, rows, calls| {
        asked(engine, rows, calls, |guest, store, said| {
            guest.call_kept_columns(store, NOW, &said.question).map(Some)
        })
    }),
    ("component, rows kept, typed request", |engine, rows, calls| {
        asked(engine, rows, calls, |guest, store, said| {
            guest.call_kept_typed(store, NOW, said.request, &said.question[WORDS..]).map(Some)
        })
    }),
    ("component, rows kept, answer a list", |engine, rows, calls| {
        asked(engine, rows, calls, |guest, store, said| {
            guest.call_kept_to_list(store, NOW, &said.question).map(|list| Some(decided(list[0])))
        })
    }),
    ("component, rows kept, answer a number", |engine, rows, calls| {
        asked(engine, rows, calls, |guest, store, said| {
            guest.call_kept_to_word(store, NOW, &said.question).map(|word| Some(decided(word as u32)))
        })
    }),
    ("core module, an empty call", |engine, rows, calls| core(engine, rows, calls, "empty")),
    ("core module, rows kept", |engine, rows, calls| core(engine, rows, calls, "kept")),
    ("core module, columns kept", |engine, rows, calls| core(engine, rows, calls, "kept-columns")),
];

/// What a guest is told.
struct Said {
    question: Vec<u32>,
    request: Request,
    rows: Vec<f32>,
    records: Vec<Row>,
    /// The slot that every shape must answer.
    best: u32,
}

impl Said {
    fn new(slots: usize) -> Self {
        let records: Vec<Row> = (0..slots).map(row).collect();
        let rows = records.iter().flat_map(|row| {
            let head = [row.slot, row.available, row.busy_until, row.c0, row.c1, row.c2];
            head.into_iter().chain([0.0; WIDTH - 6])
        });
        let mut question = vec![0; WORDS];
        question[0] = 8_000;
        question.extend((0..slots).map(|slot| (slot * 7 % 400) as u32));
        let cost = |slot: usize| {
            let (row, held) = (&records[slot], (question[WORDS + slot] as f32 * 16.0).min(8_000.0));
            let new = 8_000.0 - held;
            (row.busy_until - NOW).max(0.0) + row.c0 + row.c1 * new + row.c2 * new * (held + new * 0.5)
        };
        let best = (0..slots).min_by(|&a, &b| cost(a).total_cmp(&cost(b))).expect("there are slots");
        let request = Request {
            prompt_tokens: question[0],
            output_tokens: 0,
            class: 0,
            tenant: 0,
            priority: 0,
            hints: 0,
            session: 0,
            seed: 0,
            ttft_slo: 0.0,
            tbt_slo: 0.0,
            model: 0,
            adapter: 0,
            session_memo: 0,
            tenant_memo: 0,
        };
        Self { rows: rows.collect(), question, request, best: best as u32, records }
    }
}

fn row(slot: usize) -> Row {
    let spread = 1.0 + (slot * 37 % 64) as f32 / 64.0;
    Row {
        slot: slot as f32,
        available: 1.0,
        busy_until: NOW + (slot * 13 % 100) as f32,
        c0: 5.0 * spread,
        c1: 0.05 * spread,
        c2: 1e-6,
        t0: 0.0,
        t1: 0.0,
        queued: 0.0,
        free_blocks: 0.0,
        capacity: 0.0,
        reported_at: 0.0,
        identity: 0.0,
        peer: 0.0,
        host: 0.0,
        domain: 0.0,
        waiting: 0.0,
    }
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

impl table::Host for Said {
    fn get(&mut self, slot: u32) -> Row {
        self.records[slot as usize]
    }
}

impl bench::shapes::types::Host for Said {}

/// Times a call to a component that was told the rows.
fn asked(
    engine: &Engine,
    rows: usize,
    calls: usize,
    call: fn(&Shapes, &mut Store<Said>, &Said) -> Result<Option<Decision>>,
) -> Result<Times> {
    let mut linker = Linker::new(engine);
    Shapes::add_to_linker::<_, HasSelf<Said>>(&mut linker, |said| said)?;
    let mut store = Store::new(engine, Said::new(rows));
    store.set_epoch_deadline(1);
    let component = Component::new(engine, COMPONENT)?;
    let guest = Shapes::instantiate(&mut store, &component, &linker)?;
    let said = Said::new(rows);
    guest.call_update(&mut store, &said.rows)?;
    if let Some(answer) = call(&guest, &mut store, &said)? {
        assert_eq!(answer.prefill, said.best, "of {rows} rows");
    }
    Ok(time_calls(calls, |_| {
        let _ = std::hint::black_box(call(&guest, &mut store, &said).expect("it went well before"));
    }))
}

/// The same module without the component around it: the host writes into its memory by itself.
struct Core {
    store: Store<()>,
    memory: Memory,
    realloc: TypedFunc<(u32, u32, u32, u32), u32>,
    instance: Instance,
}

impl Core {
    fn new(engine: &Engine) -> Result<Self> {
        let mut store = Store::new(engine, ());
        store.set_epoch_deadline(1);
        let mut linker = wasmtime::Linker::new(engine);
        let module = Module::new(engine, MODULE)?;
        linker.define_unknown_imports_as_traps(&module)?;
        let instance = linker.instantiate(&mut store, &module)?;
        let memory = instance.get_memory(&mut store, "memory").expect("a guest has memory");
        let realloc = instance.get_typed_func(&mut store, "cabi_realloc")?;
        Ok(Self { store, memory, realloc, instance })
    }

    /// The address of a copy in the guest, which it frees.
    fn lower(&mut self, words: impl ExactSizeIterator<Item = [u8; 4]>) -> Result<u32> {
        let bytes = 4 * words.len() as u32;
        let address = self.realloc.call(&mut self.store, (0, 0, 4, bytes))?;
        let memory = &mut self.memory.data_mut(&mut self.store)[address as usize..];
        for (to, word) in memory.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word);
        }
        Ok(address)
    }
}

fn core(engine: &Engine, rows: usize, calls: usize, name: &str) -> Result<Times> {
    let mut core = Core::new(engine)?;
    let said = Said::new(rows);
    let update: TypedFunc<(u32, u32), ()> = core.instance.get_typed_func(&mut core.store, "update")?;
    let address = core.lower(said.rows.iter().map(|value| value.to_le_bytes()))?;
    update.call(&mut core.store, (address, said.rows.len() as u32))?;
    if name == "empty" {
        let empty: TypedFunc<(u32, u32), ()> = core.instance.get_typed_func(&mut core.store, name)?;
        return Ok(time_calls(calls, |_| empty.call(&mut core.store, (4, 0)).expect("it does nothing")));
    }
    let schedule: TypedFunc<(f32, u32, u32), u32> = core.instance.get_typed_func(&mut core.store, name)?;
    let mut ask = || -> Result<u32> {
        let question = core.lower(said.question.iter().map(|word| word.to_le_bytes()))?;
        let answer = schedule.call(&mut core.store, (NOW, question, said.question.len() as u32))?;
        let answer = &core.memory.data(&core.store)[answer as usize..][..4];
        Ok(u32::from_le_bytes(answer.try_into().expect("four bytes")))
    };
    assert_eq!(ask()?, said.best, "of {rows} rows");
    Ok(time_calls(calls, |_| {
        let _ = std::hint::black_box(ask().expect("it went well before"));
    }))
}
