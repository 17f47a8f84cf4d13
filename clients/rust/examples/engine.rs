//! What an engine does: registers its KV memory once, saves blocks, loads them elsewhere, and hears of it by a descriptor.
//!
//! `cargo run --example engine -- unix:/run/kvasir/data.sock`, with `kvasir serve` running.

use std::error::Error;
use std::sync::Arc;

use kvasir_client::data::{BlockKey, BlockMeta, Done, Endpoint, JobOptions, Jobs, Options, Plan, Run};
use rustix::event::{PollFd, PollFlags, poll};

const LAYERS: usize = 4;
const BLOCKS: usize = 16;
/// Bytes of one layer's K, or V, of a block.
const RUN: usize = 16 << 10;

fn main() -> Result<(), Box<dyn Error>> {
    let endpoint: Endpoint = std::env::args().nth(1).ok_or("name the host's data socket")?.parse()?;
    run(&endpoint, "")
}

pub(crate) fn run(endpoint: &Endpoint, token: &str) -> Result<(), Box<dyn Error>> {
    // Per layer K of all blocks, then V of all blocks. Shared with devices and threads in a real engine.
    let mut kv: Vec<u8> = (0..2 * LAYERS * BLOCKS * RUN).map(|at| (at / RUN) as u8).collect();
    let base = kv.as_mut_ptr().expose_provenance();
    let run_of = |n| Run { addr: base + n * BLOCKS * RUN, len: RUN, stride: RUN };
    let runs: Vec<Run> = (0..2 * LAYERS).map(run_of).collect();
    #[expect(unsafe_code, reason = "the addresses are the engine's word")]
    // SAFETY: `kv` outlives the plan, and nobody uses it by its name until the jobs below are done.
    let plan = Arc::new(unsafe { Plan::new(&runs, BLOCKS) }?);

    let namespace = "my-model, bf16, tp 1/1".to_owned();
    let key = |n: usize| BlockKey::from_engine_hash(&namespace, &n.to_le_bytes());
    let meta = |n| BlockMeta::single(key(n), (2 * LAYERS * RUN) as u32);
    let options = Options { namespace: namespace.clone(), token: token.to_owned(), ..Options::default() };
    let jobs = Jobs::start(endpoint, &options, JobOptions::default())?;

    // The first half of the blocks to the host, then from there into the second half.
    jobs.save(1, &plan, (0..BLOCKS / 2).map(|n| (meta(n), n)).collect())?;
    println!("{}", wait(&jobs)?);
    jobs.load(2, &plan, (0..BLOCKS / 2).map(|n| (key(n), BLOCKS / 2 + n)).collect())?;
    println!("{}", wait(&jobs)?);
    drop((jobs, plan));

    for blocks in kv.chunks(BLOCKS * RUN) {
        let (saved, loaded) = blocks.split_at(BLOCKS / 2 * RUN);
        assert!(saved == loaded);
    }
    Ok(())
}

/// Sleeps until the job has ended. An engine has the descriptor in its own loop, or calls `drain` every step.
fn wait(jobs: &Jobs) -> Result<String, Box<dyn Error>> {
    poll(&mut [PollFd::from_borrowed_fd(jobs.event_fd(), PollFlags::IN)], None)?;
    match jobs.drain().pop() {
        Some(Done { job, ok: true, blocks, bytes, .. }) => {
            Ok(format!("job {job}: {} blocks, {bytes} B", blocks.len()))
        }
        other => Err(format!("{other:?}").into()),
    }
}
