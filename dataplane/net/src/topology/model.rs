//! What a machine is made of, as far as transfers care.

use serde::Serialize;

use kvasir_memory::region::Location;

/// A device's place in the PCI tree: root complex, bridges from the top down, and last the function itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct PciPath(Vec<String>);

impl PciPath {
    /// `None` unless `parts` holds at least a root and a function.
    pub fn new(parts: Vec<String>) -> Option<Self> {
        (parts.len() >= 2).then_some(Self(parts))
    }

    /// The address of the function, such as `0000:1b:00.0`.
    pub fn address(&self) -> &str {
        self.0.last().map_or("", String::as_str)
    }

    /// How many steps from the top two paths share: 0 = different root complexes, 1 = the root complex only.
    fn shared(&self, other: &Self) -> usize {
        self.0.iter().zip(&other.0).take_while(|(a, b)| a == b).count()
    }
}

/// One NUMA node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NumaNode {
    pub id: u16,
    /// As the kernel lists them, such as `0-55,112-167`.
    pub cpus: String,
    /// Relative cost of reaching each node (ACPI SLIT: 10 = itself), in order of node ids; empty if unknown.
    pub distances: Vec<u32>,
}

/// One NVIDIA GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// The N of `cuda:N`.
    pub index: u16,
    /// PCI device id, such as 0x2330 for H100 SXM.
    pub device: Option<u16>,
    pub pci: PciPath,
    pub numa: Option<u16>,
}

/// One network device: an RDMA device with its network interfaces, or an interface without RDMA.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Nic {
    /// Name of the RDMA device, or else of the interface. Unique in a machine.
    pub name: String,
    pub rdma: bool,
    /// Network interfaces of the same PCI function.
    pub interfaces: Vec<String>,
    /// `None` for devices outside the PCI tree (software RDMA, some hypervisors).
    pub pci: Option<PciPath>,
    pub numa: Option<u16>,
    /// Megabits per second. Virtual devices often do not say.
    pub rate_mbps: Option<u64>,
    /// Whether its link is up. NICs whose link is down are not used.
    pub up: bool,
}

/// How far a NIC is from memory, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Link {
    /// Below one PCIe switch or port: peer-to-peer traffic does not reach the CPU.
    SameSwitch,
    /// Below one root complex.
    SameRoot,
    /// On one NUMA node.
    SameNode,
    /// On different NUMA nodes, with their distance.
    OtherNode(u32),
    /// The machine does not say.
    Unknown,
}

/// A machine.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize)]
pub struct Machine {
    pub numa: Vec<NumaNode>,
    pub gpus: Vec<Gpu>,
    pub nics: Vec<Nic>,
}

/// The distance that ACPI gives a remote node when a machine does not say.
const REMOTE: u32 = 20;

impl Machine {
    /// Every place of memory, CPUs first.
    pub fn locations(&self) -> impl Iterator<Item = Location> {
        let nodes = self.numa.iter().map(|node| Location::Cpu(node.id));
        nodes.chain(self.gpus.iter().map(|gpu| Location::Cuda(gpu.index)))
    }

    /// The NIC of this name, its own or that of one of its interfaces.
    pub fn nic(&self, name: &str) -> Option<&Nic> {
        let by_name = self.nics.iter().find(|nic| nic.name == name);
        by_name.or_else(|| self.nics.iter().find(|nic| nic.interfaces.iter().any(|i| i == name)))
    }

    /// How far `nic` is from `location`.
    pub fn link(&self, location: Location, nic: &Nic) -> Link {
        let node = match location {
            Location::Cpu(node) => Some(node),
            Location::Cuda(index) => {
                let Some(gpu) = self.gpus.iter().find(|gpu| gpu.index == index) else { return Link::Unknown };
                match nic.pci.as_ref().map(|pci| gpu.pci.shared(pci)) {
                    Some(2..) => return Link::SameSwitch,
                    Some(1) => return Link::SameRoot,
                    _ => gpu.numa,
                }
            }
        };
        match (node, nic.numa) {
            (Some(a), Some(b)) if a == b => Link::SameNode,
            (Some(a), Some(b)) => Link::OtherNode(self.distance(a, b)),
            _ => Link::Unknown,
        }
    }

    fn distance(&self, from: u16, to: u16) -> u32 {
        let column = self.numa.iter().position(|node| node.id == to);
        let row = self.numa.iter().find(|node| node.id == from);
        row.zip(column).and_then(|(row, column)| row.distances.get(column).copied()).unwrap_or(REMOTE)
    }
}
