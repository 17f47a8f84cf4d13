//! A host follows the rollouts of policies that another one keeps, or its own.

use super::load::load_encoded;
use crate::calendar::unix_ms;
use crate::host::Host;
use crate::policy::SlotKind;
use crate::policy::rollout::follower::{Follower, Leader, Own};
use crate::policy::rollout::keeper::{Report, Told};
use crate::policy::rollout::{Order, Said};
use kvasir_client::control::{Control, ControlAddr, ControlError};
use kvasir_client::{ClientFiles, ClientTls};
use kvasir_proto::{self as proto, follow_order, follow_report};
use prost::Message;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Between two rounds.
const EVERY: Duration = Duration::from_secs(1);
/// Who brought a policy of a rollout into service, in the history.
const WHO: &str = "rollout";

/// Starts the thread; it ends with the host.
///
/// # Errors
/// No thread.
pub(crate) fn start(host: &Arc<Host>) -> std::io::Result<()> {
    let (name, host) = (host.config.node.name.clone(), Arc::downgrade(host));
    std::thread::Builder::new().name("kvasir-follow".into()).spawn(move || follow(&host, name)).map(drop)
}

fn follow(host: &Weak<Host>, name: String) {
    let (mut follower, mut last_error) = (Follower::new(name), String::new());
    while let Some(host) = host.upgrade() {
        let error = round(&host, &mut follower).err().unwrap_or_default();
        if !error.is_empty() && error != last_error {
            tracing::warn!(leader = host.config.policy.follow, error, "rollouts are not followed; trying on");
        }
        last_error = error;
        drop(host);
        std::thread::sleep(EVERY);
    }
}

fn round(host: &Host, follower: &mut Follower) -> Result<(), String> {
    let load = |request: &[u8]| load_encoded(host, request, WHO);
    if host.config.policy.follow.is_empty() {
        let mut own = Own { keeper: &host.rollouts, now_ms: unix_ms() };
        return follower.round(&host.policies, &mut own, load);
    }
    follower.round(&host.policies, &mut Remote::connect(host)?, load)
}

/// Another host. Connected anew for every round: token and certificates may have been exchanged.
struct Remote {
    runtime: tokio::runtime::Runtime,
    control: Control,
}

impl Remote {
    fn connect(host: &Host) -> Result<Self, String> {
        let policy = &host.config.policy;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| format!("no runtime: {e}"))?;
        let token = token(&policy.follow_token)?;
        let addr: ControlAddr = policy.follow.parse().map_err(|e: ControlError| e.to_string())?;
        let control = runtime.block_on(async {
            match &addr {
                ControlAddr::Tcp(to) if !policy.follow_ca.as_os_str().is_empty() => {
                    let name = to.rsplit_once(':').map_or(&**to, |(name, _)| name).trim_matches(['[', ']']);
                    let files = ClientFiles { authority: policy.follow_ca.clone(), identity: None };
                    let tls = ClientTls::read(&files, name).map_err(|e| e.to_string())?;
                    Control::connect_tls(to, &token, &tls).await.map_err(|e| e.to_string())
                }
                addr => Control::connect(addr, &token).await.map_err(|e| e.to_string()),
            }
        });
        Ok(Self { control: control?, runtime })
    }
}

fn token(file: &Path) -> Result<String, String> {
    if file.as_os_str().is_empty() {
        return Ok(String::new());
    }
    let text = std::fs::read_to_string(file);
    let text = text.map_err(|e| format!("policy.follow_token {}: {e}", file.display()))?;
    Ok(text.trim().to_owned())
}

impl Leader for Remote {
    fn follow(&mut self, host: &str, reports: Vec<Report>) -> Result<Vec<Told>, String> {
        let reports = reports.into_iter().map(report).collect();
        let request = proto::FollowRequest { host: host.into(), reports };
        let answer = self.runtime.block_on(self.control.rollouts.follow(request));
        let orders = answer.map_err(|status| status.message().to_owned())?.into_inner().orders;
        orders.into_iter().take(SlotKind::ALL.len()).map(told).collect()
    }

    fn fetch(&mut self, slot: SlotKind, id: u64) -> Result<Vec<u8>, String> {
        let request = proto::FetchRequest { slot: slot.to_string(), id };
        let answer = self.runtime.block_on(self.control.rollouts.fetch(request));
        let policy = answer.map_err(|status| status.message().to_owned())?.into_inner().policy;
        policy.map(|policy| policy.encode_to_vec()).ok_or_else(|| "an answer without a policy".to_owned())
    }
}

fn report(report: Report) -> proto::FollowReport {
    use follow_report::Said as Wire;
    let (said, reason) = match report.said {
        Said::Other => (Wire::Other, String::new()),
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
