//! A host follows the rollouts of policies that another one keeps, or its own.
//!
//! The other one may hang: every exchange with it has a time limit, and ends at once when this host stops.

use super::load::load_encoded;
use super::stop_signal;
use crate::calendar::unix_ms;
use crate::config::Policy;
use crate::host::Host;
use crate::policy::SlotKind;
use crate::policy::rollout::follower::{Follower, Leader, Own};
use crate::policy::rollout::keeper::{Report, Told};
use crate::policy::rollout::{Order, Said};
use crate::text::printable;
use kvasir_client::control::{Control, ControlAddr, ControlError};
use kvasir_client::{ClientFiles, ClientTls};
use kvasir_proto::{self as proto, follow_order, follow_report};
use prost::Message;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// Time between two rounds.
const EVERY: Duration = Duration::from_secs(1);
/// Limit for a connection, and for the answer to a report. A host that is not heard of for 15 s loses its turn.
const ANSWER: Duration = Duration::from_secs(10);
/// Limit for a component to arrive.
const FETCH: Duration = Duration::from_secs(120);
/// Longest text of another host.
const TEXT_BYTES: usize = 1 << 10;
/// Stands in the history for the rollout that brought a policy into service.
const WHO: &str = "rollout";

/// The thread that follows.
pub(crate) struct Following(JoinHandle<()>);

impl Following {
    /// Starts the thread; it ends with the host, or when `stopping` turns true and nothing is being brought into service.
    ///
    /// # Errors
    /// There is no thread, or no timer for it.
    pub(crate) fn start(host: &Arc<Host>, stopping: watch::Receiver<bool>) -> std::io::Result<Self> {
        let (follower, host) = (Follower::new(host.config.node.name.clone()), Arc::downgrade(host));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let run = move || follow(&host, follower, &runtime, &stopping);
        std::thread::Builder::new().name("kvasir-follow".into()).spawn(run).map(Self)
    }

    /// Waits until the thread has let go of the host, but no longer than that.
    pub(crate) fn wait(&self, patience: Duration) {
        let until = Instant::now() + patience;
        while !self.0.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn follow(host: &Weak<Host>, mut follower: Follower, runtime: &Runtime, stopping: &watch::Receiver<bool>) {
    let mut last_error = String::new();
    while let Some(host) = host.upgrade() {
        let error = round(&host, &mut follower, runtime, stopping).err().unwrap_or_default();
        if *stopping.borrow() {
            return;
        }
        if !error.is_empty() && error != last_error {
            tracing::warn!(leader = host.config.policy.follow, error, "rollouts are not followed; trying on");
        }
        last_error = error;
        drop(host);
        let stopped = runtime.block_on(async { tokio::time::timeout(EVERY, stop_signal(stopping)).await });
        if stopped.is_ok() {
            return;
        }
    }
}

fn round(
    host: &Host,
    follower: &mut Follower,
    runtime: &Runtime,
    stopping: &watch::Receiver<bool>,
) -> Result<(), String> {
    let load = |request: &[u8]| load_encoded(host, request, WHO);
    if host.config.policy.follow.is_empty() {
        let mut own = Own { keeper: &host.rollouts, now_ms: unix_ms() };
        return follower.round(&host.policies, &mut own, load);
    }
    let exchange = Exchange { runtime, stopping };
    follower.round(&host.policies, &mut Remote::connect(&host.config.policy, exchange)?, load)
}

/// How this host waits for another one.
#[derive(Clone, Copy)]
struct Exchange<'a> {
    runtime: &'a Runtime,
    stopping: &'a watch::Receiver<bool>,
}

impl Exchange<'_> {
    fn wait<R>(
        self,
        patience: Duration,
        what: &str,
        answer: impl Future<Output = Result<R, String>>,
    ) -> Result<R, String> {
        self.runtime.block_on(async {
            tokio::select! {
                answer = tokio::time::timeout(patience, answer) => {
                    answer.unwrap_or_else(|_| Err(format!("{what}: no answer within {patience:?}")))
                }
                () = stop_signal(self.stopping) => Err("this host stops".to_owned()),
            }
        })
    }
}

/// Another host. Connected again for every round: token and certificates may have been exchanged.
struct Remote<'a> {
    exchange: Exchange<'a>,
    control: Control,
}

impl<'a> Remote<'a> {
    fn connect(policy: &Policy, exchange: Exchange<'a>) -> Result<Self, String> {
        let token = token(&policy.follow_token)?;
        let addr: ControlAddr = policy.follow.parse().map_err(|e: ControlError| e.to_string())?;
        let control = exchange.wait(ANSWER, "connect", connect(&addr, &token, &policy.follow_ca))?;
        Ok(Self { exchange, control })
    }
}

async fn connect(addr: &ControlAddr, token: &str, authority: &Path) -> Result<Control, String> {
    let control = match addr {
        ControlAddr::Tcp(to) if !authority.as_os_str().is_empty() => {
            let name = to.rsplit_once(':').map_or(&**to, |(name, _)| name).trim_matches(['[', ']']);
            let files = ClientFiles { authority: authority.to_owned(), identity: None };
            let tls = ClientTls::read(&files, name).map_err(|e| e.to_string())?;
            Control::connect_tls(to, token, &tls).await
        }
        addr => Control::connect(addr, token).await,
    };
    control.map_err(|e| e.to_string())
}

fn token(file: &Path) -> Result<String, String> {
    if file.as_os_str().is_empty() {
        return Ok(String::new());
    }
    let text = std::fs::read_to_string(file);
    let text = text.map_err(|e| format!("policy.follow_token {}: {e}", file.display()))?;
    Ok(text.trim().to_owned())
}

fn refused(status: tonic::Status) -> String {
    // The other host's text is for people with a terminal.
    match status.code() {
        tonic::Code::Unauthenticated => {
            "it does not know this host's token; make one there with `kvasir token new --role policy`, and put it \
             into the file that policy.follow_token names here"
                .to_owned()
        }
        _ => printable(status.message(), TEXT_BYTES),
    }
}

impl Leader for Remote<'_> {
    fn follow(&mut self, host: &str, reports: Vec<Report>) -> Result<Vec<Told>, String> {
        let reports = reports.into_iter().map(report).collect();
        let request = proto::FollowRequest { host: host.into(), reports };
        let answer = async { self.control.rollouts.follow(request).await.map_err(refused) };
        let orders = self.exchange.wait(ANSWER, "report", answer)?.into_inner().orders;
        orders.into_iter().take(SlotKind::ALL.len()).map(told).collect()
    }

    fn fetch(&mut self, slot: SlotKind, id: u64) -> Result<Vec<u8>, String> {
        let request = proto::FetchRequest { slot: slot.to_string(), id };
        let answer = async { self.control.rollouts.fetch(request).await.map_err(refused) };
        let policy = self.exchange.wait(FETCH, "fetch", answer)?.into_inner().policy;
        policy.map(|policy| policy.encode_to_vec()).ok_or_else(|| "an answer without a policy".to_owned())
    }
}

fn report(report: Report) -> proto::FollowReport {
    use follow_report::Said as Wire;
    let (said, reason) = match report.said {
        Said::Other => (Wire::Other, String::new()),
        Said::Paused => (Wire::Paused, String::new()),
        Said::Watched => (Wire::Watched, String::new()),
        Said::Settled => (Wire::Settled, String::new()),
        Said::Failed(reason) => (Wire::Failed, reason),
    };
    proto::FollowReport { slot: report.slot.to_string(), id: report.id, said: said.into(), reason }
}

fn told(order: proto::FollowOrder) -> Result<Told, String> {
    use follow_order::Order as Wire;
    let (wire, id) = (order.order(), order.id);
    let slot = order.slot.parse().map_err(|e: crate::policy::UnknownSlot| e.to_string())?;
    let target = serde_json::from_str(&order.target).map_err(|e| format!("a rollout's target: {e}"))?;
    let order = match wire {
        Wire::Serve => Order::Serve,
        Wire::Return => Order::Return,
        Wire::Keep | Wire::Unspecified => Order::Keep,
    };
    Ok(Told { slot, id, order, target })
}
