//! This host among others: opened from the configuration, its events in the log.

use crate::config::Config;
pub use kvasir_dataplane::cluster::OpenError;
use kvasir_dataplane::cluster::{Cluster, ClusterConfig, Event, Kind, PeerConfig, unavailable};
use kvasir_dataplane::topology::Topology;
use kvasir_dataplane::transport::node::Secret;
use kvasir_dataplane::transport::tcp::{Tls, TlsError, TlsFiles};
use kvasir_dataplane::{Clock, DramStore};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Shorter secrets can be guessed.
const SECRET_MIN: usize = 16;
const SECRET_MAX: u64 = 64 << 10;

/// Why this host cannot join others.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cluster.secret_file {} cannot be used: {reason}", path.display())]
    Secret { path: PathBuf, reason: String },
    #[error("[cluster.tls] cannot be used: {0}")]
    Tls(#[from] TlsError),
    #[error("the cluster does not open: {0}")]
    Open(#[from] OpenError),
}

/// Opens the ports for other hosts. Returns `None` if the settings know of no others.
///
/// # Errors
/// The secret cannot be read or is none, or a port is taken.
pub fn open(config: &Config, store: &Arc<DramStore>, clock: Clock) -> Result<Option<Arc<Cluster>>, Error> {
    let settings = &config.cluster;
    if !settings.is_on() {
        return Ok(None);
    }
    let peer = |peer: &crate::config::Peer| PeerConfig {
        name: peer.name.clone(),
        address: peer.address.clone(),
        rack: peer.rack.clone(),
    };
    let cluster = ClusterConfig {
        cluster: settings.name.clone(),
        rack: settings.rack.clone(),
        listen: settings.listen,
        transfer: settings.transfer.0.clone(),
        transports: named(config),
        socket: socket(config),
        peers: settings.peers.iter().map(peer).collect(),
        topology: topology(config),
        topology_every: settings.topology_every.0,
        tls: read_tls(config)?,
        tls_in_kernel: settings.tls.kernel,
        blocks_max: settings.blocks_max as usize,
        read_timeout: settings.read_timeout.0,
        audit_every: settings.audit_every.0,
        repair_after: settings.repair_after.0,
        targets: targets(config),
        removals: Some(config.node.data_dir.join("removals")),
        ..ClusterConfig::new(&config.node.name, read_secret(&settings.secret_file)?)
    };
    Ok(Some(Cluster::open(cluster, Arc::clone(store), clock, Box::new(log))?))
}

/// Reads what opening would read, and opens nothing.
///
/// # Errors
/// A file that cannot be used, or a transport that this machine does not have.
pub fn check(config: &Config) -> Result<(), Error> {
    if config.cluster.is_on() {
        read_secret(&config.cluster.secret_file)?;
        read_tls(config)?;
    }
    for &kind in &config.cluster.transports {
        if let Some(reason) = unavailable(kind) {
            return Err(OpenError::Unavailable { kind, reason }.into());
        }
    }
    Ok(())
}

/// The transports that the settings name.
fn named(config: &Config) -> Option<Vec<Kind>> {
    Some(config.cluster.transports.clone()).filter(|kinds| !kinds.is_empty())
}

/// Where hosts on this machine meet. Returns `None` if the path is longer than a socket's may be.
fn socket(config: &Config) -> Option<PathBuf> {
    const PATH_MAX: usize = 107;
    let path = config.node.data_dir.join("cluster.sock");
    (path.as_os_str().len() <= PATH_MAX).then_some(path)
}

fn read_tls(config: &Config) -> Result<Option<Tls>, TlsError> {
    let tls = &config.cluster.tls;
    let files = TlsFiles { authority: tls.ca.clone(), certificate: tls.cert.clone(), key: tls.key.clone() };
    tls.is_on().then(|| Tls::read(&files, &config.node.name)).transpose()
}

/// Where targets are kept: beside the blocks that outlive a restart, and nowhere if none do.
fn targets(config: &Config) -> Option<PathBuf> {
    let dir = &config.nvme.dir;
    (!dir.as_os_str().is_empty()).then(|| dir.join("targets"))
}

fn log(event: Event) {
    if event.is_warning() {
        tracing::warn!("{event}");
    } else {
        tracing::info!("{event}");
    }
}

/// Which NICs serve which memory here. Without this, all rails are alike.
fn topology(config: &Config) -> Option<Topology> {
    Topology::probe(Path::new("/sys"), config.topology.clone())
        .inspect_err(|error| tracing::warn!(%error, "rails to other hosts are not chosen by topology"))
        .ok()
}

fn read_secret(path: &Path) -> Result<Secret, Error> {
    let wrong = |reason: String| Error::Secret { path: path.into(), reason };
    let file = std::fs::metadata(path).map_err(|error| wrong(error.to_string()))?;
    let mode = file.permissions().mode();
    if mode & 0o077 != 0 {
        return Err(wrong(format!("others may read it (mode {:03o}); run chmod 600 on it", mode & 0o777)));
    }
    if file.len() > SECRET_MAX {
        return Err(wrong(format!("it has {} B; a secret has at most {SECRET_MAX}", file.len())));
    }
    let bytes = std::fs::read(path).map_err(|error| wrong(error.to_string()))?;
    // An editor ends a file with a line feed, another tool does not.
    let secret = bytes.trim_ascii_end();
    if secret.len() < SECRET_MIN {
        return Err(wrong(format!("it has {} B; a secret has at least {SECRET_MIN}", secret.len())));
    }
    Ok(Secret::new(secret))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_long_and_kept_from_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        let check = |text: &str, mode: u32, expected: &str| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let found = read_secret(&path).map_or_else(|error| error.to_string(), |_| "fine".to_owned());
            assert!(found.contains(expected), "{found}");
        };
        check("sixteen bytes!!!\n", 0o600, "fine");
        check("sixteen bytes!!!", 0o640, "chmod 600");
        check("fifteen bytes!!\n", 0o600, "it has 15 B");
        let missing = read_secret(&dir.path().join("none")).map(drop).unwrap_err().to_string();
        assert!(missing.contains("secret_file") && missing.contains("No such file"), "{missing}");
    }
}
