//! Hosts with certificates: what they say and read is encrypted, and a host with none, or the wrong one, stays outside.

use crate::process::{Host, KVASIR, Transport};
use crate::replicas::{Plan, all_there, metric, nodes, put, settled, until};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// An authority that certifies hosts.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: tempfile::TempDir,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, dir }
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    /// A certificate for `name`, and its key.
    pub(crate) fn issue(&self, name: &str) -> (PathBuf, PathBuf) {
        self.issue_for(name, Duration::from_secs(365 * 24 * 3600))
    }

    /// As [`issue`](Self::issue); it expires after `lifetime`.
    pub(crate) fn issue_for(&self, name: &str, lifetime: Duration) -> (PathBuf, PathBuf) {
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.not_after = (SystemTime::now() + lifetime).into();
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let (cert_path, key_path) = (self.path(&format!("{name}.pem")), self.path(&format!("{name}.key")));
        std::fs::write(&cert_path, certificate.pem()).unwrap();
        std::fs::write(&key_path, key.serialize_pem()).unwrap();
        set_mode(&key_path, 0o600);
        (cert_path, key_path)
    }

    /// The settings of a host whose certificate names `name`.
    fn settings(&self, name: &str) -> Vec<String> {
        let (cert_path, key_path) = self.issue(name);
        vec![
            format!("cluster.tls.cert={}", cert_path.display()),
            format!("cluster.tls.key={}", key_path.display()),
            format!("cluster.tls.ca={}", self.path("ca.pem").display()),
        ]
    }
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn hosts_with_certificates_keep_copies_for_each_other() {
    const BLOCKS: u32 = 100;
    let (plan, authority) = (Plan::new(3), Authority::new());
    // Otherwise they would share memory, which needs no encryption.
    let tcp = r#"cluster.transports=["tcp"]"#.to_owned();
    let start = |n: usize| {
        let tls = authority.settings(&format!("host-{n}"));
        plan.start(n, &[&tls[..], std::slice::from_ref(&tcp)].concat())
    };
    let mut hosts: Vec<Host> = (0..3).map(start).collect();
    until("peers", || hosts.iter().all(|host| metric(host, "kvasir_peer_up", "") == 2));
    put(&hosts[0], 0..BLOCKS, 2);
    until("copies", || settled(&hosts.iter().collect::<Vec<_>>(), BLOCKS.into(), 2));
    assert!(hosts[1..].iter().any(|host| metric(host, "kvasir_peer_transfer_bytes_total", "tcp") > 0));
    hosts[0].kill();
    for host in &hosts[1..] {
        all_there(host, BLOCKS, Transport::Unix);
    }
    until("the loss is known", || hosts[1..].iter().all(|host| nodes(host)["nodes"][1]["state"] == "down"));
    hosts[0] = start(0);
    until("all as before", || settled(&hosts.iter().collect::<Vec<_>>(), BLOCKS.into(), 2));
}

#[test]
fn a_host_without_certificates_is_refused_by_one_that_has_them() {
    let (plan, authority) = (Plan::new(2), Authority::new());
    let hosts = [plan.start(0, &authority.settings("host-0")), plan.start(1, &[])];
    until("refused", || hosts.iter().all(|host| nodes(host)["nodes"][1]["state"] == "refused"));
    let reason = |host: &Host| nodes(host)["nodes"][1]["reason"].as_str().unwrap().to_owned();
    assert!(reason(&hosts[0]).contains("that one has no TLS, this one has"), "{}", reason(&hosts[0]));
    assert!(reason(&hosts[1]).contains("that one has TLS, this one has not"), "{}", reason(&hosts[1]));
}

/// `kvasir config validate` with these settings says `expected`.
fn validate(plan: &Plan, settings: &[String], valid: bool, expected: &str) {
    let mut command = std::process::Command::new(KVASIR);
    command.args(["config", "validate", "--set", "node.name=host-0"]);
    let secret = plan.secret("secret", "what all hosts of this test know");
    for set in settings.iter().chain([&secret]) {
        command.args(["--set", set]);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() == valid && text.contains(expected), "{settings:?}: {text}");
}

#[test]
fn validating_reads_the_certificates() {
    let (plan, authority) = (Plan::new(0), Authority::new());
    let good = authority.settings("host-0");
    let beyond = "cluster.listen=0.0.0.0:7423".to_owned();
    validate(&plan, &[&good[..], &[beyond]].concat(), true, "valid");
    let but = |n: usize, file: &str| {
        let mut settings = good.clone();
        let (key, _) = settings[n].split_once('=').unwrap();
        settings[n] = format!("{key}={}", authority.path(file).display());
        settings
    };
    let other = authority.settings("host-1");
    validate(&plan, &but(0, "missing.pem"), false, "missing.pem cannot be read");
    validate(&plan, &but(0, "host-0.key"), false, "has no certificate");
    validate(&plan, &but(1, "host-1.key"), false, "is not that of certificate");
    validate(&plan, &other, false, "have one issued with the DNS name host-0");
    let stranger = Authority::new();
    let foreign = format!("cluster.tls.ca={}", stranger.path("ca.pem").display());
    validate(&plan, &[&good[..2], &[foreign]].concat(), false, "does not pass under authority");
    set_mode(&authority.path("host-0.key"), 0o644);
    validate(&plan, &good, false, "chmod 600");
}
