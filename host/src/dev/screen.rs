//! The live summary: a few lines on a terminal, one line every few seconds elsewhere. Also the
//! heartbeat of the simulated instances.

use super::Cluster;
use super::stats::Stats;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use kvasir_dataplane::tier::lifecycle::State;
use std::io::IsTerminal;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

const REFRESH: Duration = Duration::from_millis(250);
/// Ticks between two lines if standard error is no terminal.
const LOG_EVERY: u32 = 20;

/// The task that draws; ends with [`Screen::finish`].
pub(super) struct Screen {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

struct Lines {
    all: MultiProgress,
    trace: ProgressBar,
    rows: Vec<ProgressBar>,
}

impl Screen {
    pub(super) fn start(cluster: Arc<Cluster>, stats: Arc<Stats>, requests: u64) -> Self {
        stats.next_phase(cluster.policies());
        let (stop, mut stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            let lines =
                std::io::stderr().is_terminal().then(|| Lines::new(requests, cluster.hosts.len() + 1));
            let mut turn = 0;
            loop {
                draw(&cluster, &stats, lines.as_ref(), requests, turn);
                turn += 1;
                if let Err(error) = cluster.report_load().await {
                    tracing::warn!(%error, "instances not reported");
                }
                tokio::select! {
                    _ = &mut stopped => break,
                    () = tokio::time::sleep(REFRESH) => {}
                }
            }
            if let Some(lines) = lines {
                let _ = lines.all.clear();
            }
        });
        Self { stop, task }
    }

    pub(super) async fn finish(self) {
        let _ = self.stop.send(());
        let _ = self.task.await;
    }
}

impl Lines {
    fn new(requests: u64, rows: usize) -> Self {
        let all = MultiProgress::new();
        let style = "{bar:40} {pos}/{len} requests, {elapsed} ({eta} left)";
        let trace = all.add(ProgressBar::new(requests));
        trace.set_style(ProgressStyle::with_template(style).expect("the template is constant"));
        let row = |_| {
            all.add(
                ProgressBar::new_spinner()
                    .with_style(ProgressStyle::with_template("{msg}").expect("constant")),
            )
        };
        let rows = (0..rows).map(row).collect();
        Self { all, trace, rows }
    }
}

fn draw(cluster: &Cluster, stats: &Stats, lines: Option<&Lines>, requests: u64, turn: u32) {
    let (ended, hits, blocks) = stats.progress();
    let hit_rate = if blocks == 0 { 0.0 } else { 100.0 * hits as f64 / blocks as f64 };
    let moved = stats.bytes_moved() as f64 / f64::from(1 << 20);
    let total = format!("{}  hit rate {hit_rate:.1} %  {moved:.0} MiB moved", cluster.policies());
    let Some(lines) = lines else {
        if turn > 0 && turn.is_multiple_of(LOG_EVERY) {
            eprintln!("{ended}/{requests} requests  {total}");
        }
        return;
    };
    lines.trace.set_position(ended);
    lines.rows[0].set_message(total);
    for (host, row) in cluster.hosts.iter().zip(&lines.rows[1..]) {
        let pressure = host.running.host().node.store().pressure();
        let used = 100.0 * (1.0 - pressure.free_bytes as f64 / pressure.pool_bytes as f64);
        let evicted = host.running.host().node.store().metrics().lifecycle.in_state(State::Evicted);
        row.set_message(format!("{}  pool {used:.0} % used  {evicted} blocks evicted", host.name));
    }
}
