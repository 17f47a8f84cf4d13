//! `kvasir dev`.

use crate::config::Size;
use crate::dev::{Cluster, Plan, Swap, Trace, run};
use crate::policy::{SlotKind, builtin_names};
use crate::replay::generate::{Plan as Workload, Workload as Kind};
use anyhow::{Result, bail, ensure};
use std::path::PathBuf;

/// Three hosts in one process with simulated engines: a trace, live numbers, and a policy swap in the
/// middle. The hosts then stay up for you to try things, until Ctrl-C.
#[derive(clap::Args, Clone, Debug)]
pub(super) struct DevArgs {
    /// End after the trace; the exit code tells whether every byte and every decision was right.
    #[arg(long)]
    demo: bool,
    /// Trace to run, plain or gzip. Default: a generated one.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Kind of generated trace.
    #[arg(long, value_enum, default_value_t = Kind::Agent)]
    workload: Kind,
    /// Requests in a generated trace.
    #[arg(long, value_name = "N", default_value_t = 2_400)]
    requests: u64,
    /// Mean arrival rate of a generated trace, per trace second.
    #[arg(long, value_name = "RPS", default_value_t = 6.0)]
    rate: f64,
    /// Seed of a generated trace.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Trace seconds per second.
    #[arg(long, value_name = "X", default_value_t = 16.0)]
    speed: f64,
    /// Hosts, each with one prefill and one decode instance.
    #[arg(long, value_name = "N", default_value_t = 3)]
    hosts: usize,
    /// Memory of each host's pool.
    #[arg(long, value_name = "SIZE", default_value = "48MiB")]
    pool: Size,
    /// Size of one block.
    #[arg(long, value_name = "SIZE", default_value = "32KiB")]
    block: Size,
    /// Scheduler in service between half and three quarters of the trace.
    #[arg(long, value_name = "NAME", default_value = "round-robin")]
    swap_scheduler: String,
    /// Evictor in service between half and three quarters of the trace.
    #[arg(long, value_name = "NAME", default_value = "lru")]
    swap_evictor: String,
    /// Print one JSON object with the outcome and nothing else on standard output.
    #[arg(long)]
    json: bool,
}

impl DevArgs {
    /// # Errors
    /// A value out of range, a host that does not start, or, with `--demo`, anything that was not right.
    pub(super) fn run(self) -> Result<()> {
        let plan = self.plan()?;
        tokio::runtime::Runtime::new()?.block_on(self.run_plan(&plan))
    }

    fn plan(&self) -> Result<Plan> {
        ensure!((1..=16).contains(&self.hosts), "--hosts {} is outside 1 to 16", self.hosts);
        ensure!((0.01..=10_000.0).contains(&self.speed), "--speed {} is outside 0.01 to 10000", self.speed);
        ensure!(
            (64..=64 << 20).contains(&self.block.0) && self.pool.0 >= 16 * self.block.0,
            "--block must be 64 B to 64 MiB, and --pool at least 16 blocks"
        );
        for (flag, slot, name) in [
            ("--swap-scheduler", SlotKind::Scheduler, &self.swap_scheduler),
            ("--swap-evictor", SlotKind::Evictor, &self.swap_evictor),
        ] {
            let known = builtin_names(slot);
            ensure!(
                known.contains(&name.as_str()),
                "{flag}: no built-in {slot} is called `{name}`; built in: {}. One of your own is loaded while the trace runs: \
                 `kvasir policy load {slot} ./NAME.wasm`",
                known.join(", ")
            );
        }
        let workload = Workload {
            workload: self.workload,
            requests: self.requests,
            rate_rps: self.rate,
            seed: self.seed,
        };
        Ok(Plan {
            trace: self.trace.clone().map_or(Trace::Generated(workload), Trace::File),
            speed: self.speed,
            hosts: self.hosts,
            pool_bytes: self.pool.0,
            block_bytes: self.block.0 as u32,
            swap: Some(Swap { scheduler: self.swap_scheduler.clone(), evictor: self.swap_evictor.clone() }),
        })
    }

    async fn run_plan(&self, plan: &Plan) -> Result<()> {
        let folder = tempfile::Builder::new().prefix("kvasir-dev-").tempdir()?;
        let cluster = Cluster::start(plan, folder.path()).await?;
        eprintln!(
            "{} hosts are up, {} serve; replaying at {} times the trace's speed; `--grpc unix:{}` is the host that schedules",
            plan.hosts,
            cluster.policies(),
            plan.speed,
            cluster.conductor().running.control_path().display()
        );
        let summary = tokio::select! {
            summary = run(&cluster, plan) => summary?,
            // The hosts end in order, and their folder goes.
            interrupted = tokio::signal::ctrl_c() => {
                interrupted?;
                bail!("interrupted before the trace was over");
            }
        };
        if self.json {
            println!("{}", serde_json::to_string(&summary)?);
        } else {
            print!("{summary}");
            print!("\n{}", next_steps(&cluster, self.demo));
        }
        if self.demo {
            return match summary.faults() {
                None => Ok(()),
                Some(faults) => bail!("the run was not clean: {faults}"),
            };
        }
        tokio::signal::ctrl_c().await?;
        Ok(())
    }
}

fn next_steps(cluster: &Cluster, ending: bool) -> String {
    let kvasir = std::env::args().next().unwrap_or_else(|| "kvasir".to_owned());
    if ending {
        return format!(
            "try next:\n  \
             {kvasir} dev                       the same, and the hosts stay up to try things on\n  \
             {kvasir} serve                     one host with an embedded store\n  \
             {kvasir} policy load evictor lru   swap a policy of a running host; a FILE.wasm works too\n  \
             {kvasir} replay --help             your own trace through any evictor\n"
        );
    }
    let host = cluster.conductor();
    let control = host.running.control_path().display();
    format!(
        "try next, while the hosts are up:\n  \
         {kvasir} policy list --grpc unix:{control}\n  \
         {kvasir} policy load evictor sieve --grpc unix:{control}\n  \
         {kvasir} policy rollback evictor --grpc unix:{control}\n  \
         cp my-policy.wasm {}/evictor.wasm\n  \
         curl --unix-socket {control} http://kvasir/metrics\n  \
         Ctrl-C ends the hosts\n",
        host.running.host().config.policy.dir.display()
    )
}
