//! `/metrics` as Prometheus reads it.

use crate::process::{Host, content};
use crate::replicas::{Plan, key, metric, put, until};
use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};

/// A pair of hosts that stored, copied, read and offloaded blocks and asked every policy but the balancer.
fn busy_pair() -> (Plan, [Host; 2]) {
    let plan = Plan::new(2);
    let nvme = |n: usize| {
        let dir = plan.dir.path().join(format!("disk-{n}"));
        let set = [
            "nvme.segment_bytes=1MiB",
            "nvme.capacity_bytes=64MiB",
            "tiering.min_uses=0",
            "store.put_wait=30s",
        ];
        [vec![format!("nvme.dir={}", dir.display())], set.map(str::to_owned).into()].concat()
    };
    let hosts = [0, 1].map(|n| plan.start(n, &nvme(n)));
    until("peers", || hosts.iter().all(|host| metric(host, "kvasir_peer_up", "") == 1));
    put(&hosts[0], 0..2048, 1);
    put(&hosts[0], 4000..4008, 2);
    until("copies", || metric(&hosts[1], "kvasir_replicas_own", "") >= 8);
    until("something is on disk", || metric(&hosts[0], "kvasir_tier_blocks", "nvme") > 0);
    let client = hosts[0].client(crate::process::Transport::Unix);
    for n in 0..256 {
        if let Some(block) = &client.get(&[key(n)], 0).unwrap()[0] {
            assert_eq!(block.bytes().unwrap(), content(n, 16 << 10));
        }
    }
    (plan, hosts)
}

#[derive(Default)]
struct Family {
    help: String,
    kind: String,
    /// Name, labels and value of each row.
    rows: Vec<(String, String, f64)>,
}

/// The page by family. A row belongs to the family that was announced last.
fn families(page: &str) -> BTreeMap<String, Family> {
    let mut families = BTreeMap::<String, Family>::new();
    let mut open = String::new();
    for line in page.lines() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "HELP", name, help] => {
                let family = Family { help: help.to_owned(), ..Family::default() };
                assert!(families.insert(name.to_owned(), family).is_none(), "{name} is there twice");
                open = name.to_owned();
            }
            ["#", "TYPE", name, kind] => {
                assert_eq!(name, open, "type and help stand together");
                families.get_mut(name).unwrap().kind = kind.to_owned();
            }
            _ => {
                let (row, value) = line.rsplit_once(' ').unwrap();
                let (name, labels) = row.split_once('{').unwrap();
                let family = families.get_mut(&open).unwrap_or_else(|| panic!("{name} has no help"));
                family.rows.push((
                    name.to_owned(),
                    labels.trim_end_matches('}').to_owned(),
                    value.parse().unwrap(),
                ));
            }
        }
    }
    families
}

fn check_histogram(name: &str, family: &Family) {
    let mut series = BTreeMap::<&str, Vec<(f64, f64)>>::new();
    for (row, labels, value) in &family.rows {
        if row.ends_with("_bucket") {
            let (labels, bound) = labels.rsplit_once(",le=").unwrap();
            let bound = bound.trim_matches('"').parse().unwrap();
            series.entry(labels).or_default().push((bound, *value));
        }
    }
    assert!(!series.is_empty(), "{name} has no buckets");
    for (labels, buckets) in series {
        assert!(buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{name} {labels}: {buckets:?}");
        let (last, count) = *buckets.last().unwrap();
        assert_eq!(last, f64::INFINITY, "{name} {labels}");
        let row = |suffix: &str| {
            let wanted = format!("{name}{suffix}");
            family.rows.iter().find(|row| row.0 == wanted && row.1 == labels).unwrap().2
        };
        assert_eq!(row("_count"), count, "{name} {labels}");
        assert_eq!(row("_sum") > 0.0, count > 0.0, "{name} {labels}");
    }
}

/// Units that Prometheus has other names for, as whole words.
const NOT_BASE_UNITS: [&str; 10] =
    ["ms", "us", "ns", "millis", "milliseconds", "minutes", "kib", "mib", "percent", "bits"];

#[test]
fn every_family_keeps_the_rules_of_prometheus() {
    let (_plan, hosts) = busy_pair();
    let page = hosts[0].page("/metrics");
    let (head, page) = page.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("text/plain; version=0.0.4"), "{head}");
    let page: String = page
        .lines()
        .filter(|line| line.starts_with("kvasir") || line.starts_with('#'))
        .map(|line| format!("{line}\n"))
        .collect();
    let families = families(&page);
    assert!(families.len() > 100, "{}", families.len());
    for (name, family) in &families {
        assert!(name.starts_with("kvasir_") && !family.help.is_empty() && !family.rows.is_empty(), "{name}");
        assert!(name.split('_').all(|word| !NOT_BASE_UNITS.contains(&word)), "{name}");
        let own = |(row, ..): &(String, String, f64)| row == name;
        match family.kind.as_str() {
            "counter" => assert!(name.ends_with("_total") && family.rows.iter().all(own), "{name}"),
            "gauge" => assert!(!name.ends_with("_total") && family.rows.iter().all(own), "{name}"),
            "histogram" => {
                assert!(name.ends_with("_seconds"), "{name}");
                check_histogram(name, family);
            }
            kind => panic!("{name} is a {kind}"),
        }
    }
    for (name, label) in [
        ("kvasir_data_request_seconds", "call=\"get\""),
        ("kvasir_data_request_seconds", "call=\"commit\""),
        ("kvasir_onboard_seconds", "tier=\"nvme\""),
        ("kvasir_copy_seconds", ""),
        ("kvasir_policy_call_seconds", "slot=\"evictor\""),
        ("kvasir_block_seconds", "of=\"lifetime\""),
    ] {
        assert!(metric(&hosts[0], &format!("{name}_count"), label) > 0, "{name} {label} counted nothing");
    }
    assert!(families.contains_key("kvasir_decision_seconds"));
}

#[test]
#[ignore = "needs promtool"]
fn promtool_has_no_objections() {
    let (_plan, hosts) = busy_pair();
    let page = hosts[0].page("/metrics");
    let rows = page.lines().filter(|line| line.starts_with("kvasir") || line.starts_with('#'));
    let mut command = Command::new("promtool");
    command.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut promtool = command.spawn().unwrap();
    let text: String = rows.map(|row| format!("{row}\n")).collect();
    promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.is_empty(), "{said}");
}
