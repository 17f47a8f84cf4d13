//! A machine as a person reads it.

use std::fmt;

use super::Topology;
use super::model::{Link, Nic};

impl fmt::Display for Link {
    /// The words of `nvidia-smi topo`, as far as they say the same.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::SameSwitch => "PIX",
            Self::SameRoot => "PHB",
            Self::SameNode => "NODE",
            Self::OtherNode(_) => "SYS",
            Self::Unknown => "?",
        })
    }
}

/// `400 Gb/s`, or that it is not known.
pub(super) fn rate(mbps: Option<u64>) -> String {
    match mbps {
        None => "rate unknown".into(),
        Some(mbps) if mbps.is_multiple_of(1000) => format!("{} Gb/s", mbps / 1000),
        Some(mbps) => format!("{mbps} Mb/s"),
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = self.machine();
        let node = |numa: Option<u16>| numa.map_or("cpu:?".into(), |node| format!("cpu:{node}"));
        for numa in &machine.numa {
            writeln!(f, "{:<8} CPUs {}", format!("cpu:{}", numa.id), numa.cpus)?;
        }
        for gpu in &machine.gpus {
            let (name, device) = (format!("cuda:{}", gpu.index), gpu.device.unwrap_or(0));
            writeln!(f, "{name:<8} {} on {}, NVIDIA {device:04x}", gpu.pci.address(), node(gpu.numa))?;
        }
        for nic in &machine.nics {
            let place = nic.pci.as_ref().map_or("no PCI address", |pci| pci.address());
            let link = if nic.up { rate(nic.rate_mbps) } else { "down, not used".into() };
            let kind = if nic.rdma { "RDMA" } else { "Ethernet" };
            writeln!(f, "{:<8} {place} on {}, {kind}, {link}{}", nic.name, node(nic.numa), interfaces(nic))?;
        }
        writeln!(f, "\n{:<8} preferred | secondary", "memory")?;
        for (location, rails) in self.matrix().iter() {
            writeln!(f, "{location:<8} {} | {}", list(&rails.preferred), list(&rails.secondary))?;
        }
        self.links(f)
    }
}

impl Topology {
    /// How far each NIC is from each place.
    fn links(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = self.machine();
        if machine.nics.is_empty() {
            return writeln!(f, "\nno network device has hardware behind it");
        }
        let width = |nic: &Nic| nic.name.len().max(4);
        write!(f, "\n{:<8}", "distance")?;
        for nic in &machine.nics {
            write!(f, " {:<1$}", nic.name, width(nic))?;
        }
        for location in machine.locations() {
            write!(f, "\n{location:<8}")?;
            for nic in &machine.nics {
                write!(f, " {:<1$}", machine.link(location, nic), width(nic))?;
            }
        }
        writeln!(
            f,
            "\nPIX: below one PCIe switch or port; PHB: one root complex; NODE: one NUMA node; SYS: different nodes"
        )
    }
}

fn interfaces(nic: &Nic) -> String {
    let others: Vec<_> = nic.interfaces.iter().filter(|name| **name != nic.name).cloned().collect();
    if others.is_empty() { String::new() } else { format!(", as {}", others.join(" ")) }
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".into() } else { names.join(" ") }
}
