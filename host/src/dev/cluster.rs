//! The hosts of `kvasir dev` and the ways to reach them.

use super::instance::{self, Instance};
use super::{Plan, Swap};
use crate::access::tokens::Tokens;
use crate::config::{Config, Door};
use crate::daemon::{Daemon, Running};
use anyhow::{Context, Result};
use kvasir_client::control::{Control, ControlAddr, PolicySource};
use kvasir_client::data::{Client, Endpoint, Options};
use kvasir_dataplane::server::access::Role;
use kvasir_dataplane::units::Span;
use kvasir_proto as proto;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;

/// Spare slots, so that blocks do not run out of slots: the smallest block of a pool decides how many it can hold.
const SLOTS_SPARE: u64 = 64;

/// One host with its simulated engines.
pub struct Host {
    pub name: String,
    pub running: Running,
    pub control: Control,
    /// Same machine: blocks are read in place.
    pub local: Arc<Client>,
    /// As another host would read from this one.
    pub remote: Arc<Client>,
    pub instance: Instance,
    /// Epoch of the instance at the conductor.
    pub epoch: u64,
    /// Messages about blocks must arrive in order: held while one is on its way.
    pub sequence: Mutex<u64>,
}

/// Several hosts; the first one's conductor decides for all.
pub struct Cluster {
    pub hosts: Vec<Host>,
    pub block_bytes: u32,
}

impl Cluster {
    /// Starts the hosts on free loopback ports, with their data in `folder`.
    ///
    /// # Errors
    /// A host does not start or cannot be reached.
    pub async fn start(plan: &Plan, folder: &Path) -> Result<Arc<Self>> {
        let mut hosts: Vec<Host> = Vec::new();
        for i in 0..plan.hosts {
            let name = format!("host-{i}");
            let running = Daemon::start(config(plan, folder, &name))?;
            let control = ControlAddr::Unix(running.control_path().into());
            let control = Control::connect(&control, "").await?;
            let tokens = Tokens::in_folder(&running.host().config.node.data_dir);
            let token = tokens.create(&[Role::Engine], 0, &[], None)?;
            let options = Options { namespace: "kvasir-dev".into(), token, ..Options::default() };
            let socket = Endpoint::Unix(running.socket_path().into());
            let local = Arc::new(Client::connect(&socket, options.clone())?);
            let remote = Arc::new(Client::connect(
                &Endpoint::Tcp(running.data_addr().context("a data port")?),
                options,
            )?);
            let mut conductor =
                hosts.first().map_or_else(|| control.conductor.clone(), |h| h.control.conductor.clone());
            let registration = proto::RegisterRequest {
                name: name.clone(),
                prefill: true,
                decode: true,
                capacity_blocks: (plan.pool_bytes / u64::from(plan.block_bytes)) as u32,
                cost: Some(instance::cost_model(plan.speed)),
                host: name.clone(),
                ..Default::default()
            };
            let epoch =
                conductor.register(registration).await.context("registering an instance")?.into_inner().epoch;
            let (instance, sequence) = (Instance::default(), Mutex::new(0));
            hosts.push(Host { name, running, control, local, remote, instance, epoch, sequence });
        }
        Ok(Arc::new(Self { hosts, block_bytes: plan.block_bytes }))
    }

    /// The host whose conductor decides.
    pub fn conductor(&self) -> &Host {
        &self.hosts[0]
    }

    pub fn host(&self, name: &str) -> Option<&Host> {
        self.hosts.iter().find(|host| host.name == name)
    }

    /// Sends a sign of life of every instance.
    ///
    /// # Errors
    /// The conductor refuses it.
    pub async fn report_load(&self) -> Result<()> {
        for host in &self.hosts {
            let free_blocks =
                host.running.host().node.store().pressure().free_bytes / u64::from(self.block_bytes);
            let request = proto::ReportLoadRequest {
                name: host.name.clone(),
                epoch: host.epoch,
                free_blocks: free_blocks as u32,
                ..Default::default()
            };
            self.conductor().control.conductor.clone().report_load(request).await?;
        }
        Ok(())
    }

    /// Loads other policies while requests flow: a scheduler at the conductor, an evictor at every
    /// host. Returns the names of those in service.
    ///
    /// # Errors
    /// A host refuses a policy.
    pub async fn load(&self, swap: &Swap) -> Result<String> {
        let scheduler = PolicySource::Builtin(swap.scheduler.clone());
        self.conductor().control.clone().load_policy("scheduler", scheduler, &[]).await?;
        for host in &self.hosts {
            let evictor = PolicySource::Builtin(swap.evictor.clone());
            host.control.clone().load_policy("evictor", evictor, &[]).await?;
        }
        Ok(self.policies())
    }

    /// Undoes [`Cluster::load`].
    ///
    /// # Errors
    /// A host has nothing to roll back to.
    pub async fn rollback(&self) -> Result<String> {
        let rollback = |slot: &str| proto::RollbackRequest { slot: slot.into() };
        self.conductor().control.policy.clone().rollback(rollback("scheduler")).await?;
        for host in &self.hosts {
            host.control.policy.clone().rollback(rollback("evictor")).await?;
        }
        Ok(self.policies())
    }

    /// The policies in service, as one text.
    pub fn policies(&self) -> String {
        use crate::policy::SlotKind::{Evictor, Scheduler};
        let policies = &self.conductor().running.host().policies;
        format!("{} + {}", policies.status(Scheduler).name, policies.status(Evictor).name)
    }
}

fn config(plan: &Plan, folder: &Path, name: &str) -> Config {
    let mut config = Config::default();
    let any_port = "127.0.0.1:0".parse().expect("a valid address");
    config.node.name = name.into();
    config.node.data_dir = folder.join(name);
    config.node.socket = folder.join(name).join("kvasir.sock");
    config.node.control = folder.join(name).join("control.sock");
    config.listen.http = any_port;
    config.listen.data = Door(Some(any_port));
    config.store.dram.pool_bytes = plan.pool_bytes;
    config.store.dram.blocks_max = (plan.pool_bytes / u64::from(plan.block_bytes) + SLOTS_SPARE) as u32;
    config.policy.dir = folder.join(name).join("policies");
    // The swap in the middle may be to a worse policy, on purpose: to show it until the operator takes it back.
    config.policy.guard.watch = Span(Duration::ZERO);
    config
}
