//! Reads a machine from sysfs. No vendor's library is needed: GPUs are PCI functions of a certain class and vendor.
//!
//! Attributes that are missing or unreadable are unknown, not errors: a NIC without a link does not tell its
//! speed, and containers and hypervisors hide what they like.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::Error;
use super::model::{Gpu, Machine, Nic, NumaNode, PciPath};

const NVIDIA: &str = "0x10de";
/// PCI classes of GPUs: VGA controller and 3D controller. An NVSwitch is a bridge (0x0680), not one of these.
const GPU_CLASSES: [&str; 2] = ["0x0300", "0x0302"];
/// No attribute read here is longer.
const ATTRIBUTE_MAX: u64 = 4096;

/// The machine below `sysfs`, which is `/sys` outside tests.
///
/// # Errors
/// `sysfs` is no sysfs, or a folder that is there cannot be listed.
pub fn probe(sysfs: &Path) -> Result<Machine, Error> {
    let root = sysfs.canonicalize().map_err(|source| Error::Read { path: sysfs.to_owned(), source })?;
    if !root.join("class").is_dir() || !root.join("devices").is_dir() {
        return Err(Error::NotSysfs { path: root });
    }
    let numa = numa_nodes(&root)?;
    // If there is one node, everything is near it, though hypervisors often say -1.
    let only_node = if let [only] = numa.as_slice() { Some(only.id) } else { None };
    let sysfs = Sysfs { root, only_node };
    Ok(Machine { numa, gpus: sysfs.gpus()?, nics: sysfs.nics()? })
}

fn numa_nodes(root: &Path) -> Result<Vec<NumaNode>, Error> {
    let folder = root.join("devices/system/node");
    let mut nodes = Vec::new();
    for name in names(&folder)? {
        let Some(id) = name.strip_prefix("node").and_then(|id| id.parse().ok()) else { continue };
        let cpus = attribute(&folder.join(&name), "cpulist").unwrap_or_default();
        let distances = attribute(&folder.join(&name), "distance").unwrap_or_default();
        let distances = distances.split_whitespace().filter_map(|text| text.parse().ok()).collect();
        nodes.push(NumaNode { id, cpus, distances });
    }
    if nodes.is_empty() {
        // A kernel without NUMA has one node and no folder for it.
        let cpus = attribute(&root.join("devices/system/cpu"), "online").unwrap_or_default();
        nodes.push(NumaNode { id: 0, cpus, distances: Vec::new() });
    }
    nodes.sort_by_key(|node| node.id);
    Ok(nodes)
}

struct Sysfs {
    root: PathBuf,
    only_node: Option<u16>,
}

impl Sysfs {
    fn gpus(&self) -> Result<Vec<Gpu>, Error> {
        let folder = self.root.join("bus/pci/devices");
        let mut gpus = Vec::new();
        for name in names(&folder)? {
            let Ok(device) = folder.join(&name).canonicalize() else { continue };
            let class = attribute(&device, "class").unwrap_or_default();
            if attribute(&device, "vendor").as_deref() != Some(NVIDIA)
                || !GPU_CLASSES.iter().any(|gpu| class.starts_with(gpu))
            {
                continue;
            }
            let Some(pci) = self.pci_path(&device) else { continue };
            let id = attribute(&device, "device")
                .and_then(|text| u16::from_str_radix(text.trim_start_matches("0x"), 16).ok());
            gpus.push(Gpu { index: 0, device: id, numa: self.numa_node(&device), pci });
        }
        gpus.sort_by_key(|gpu| (gpu.pci.address().len(), gpu.pci.address().to_owned()));
        for (index, gpu) in (0..).zip(&mut gpus) {
            gpu.index = index;
        }
        Ok(gpus)
    }

    fn nics(&self) -> Result<Vec<Nic>, Error> {
        let mut interfaces = self.interfaces()?;
        let mut found = Vec::new();
        for name in names(&self.root.join("class/infiniband"))? {
            let class = self.root.join("class/infiniband").join(&name);
            let device = self.rdma_device(&class);
            let own = interfaces.get_mut(&device).map(|own| own.iter_mut().map(Interface::take).collect());
            let (up, rate_mbps) = ports(&class)?;
            found.push((device, Nic { rdma: true, up, rate_mbps, ..nic(name, own.unwrap_or_default()) }));
        }
        for (device, own) in &interfaces {
            for interface in own.iter().filter(|interface| !interface.taken) {
                let (up, rate_mbps) = (interface.up, interface.rate_mbps);
                let nic = nic(interface.name.clone(), vec![interface.name.clone()]);
                found.push((device.clone(), Nic { up, rate_mbps, ..nic }));
            }
        }
        let mut nics: Vec<Nic> = found
            .iter()
            .filter(|(device, _)| !is_function_of_another(device, &found))
            .map(|(device, nic)| Nic {
                pci: self.pci_path(device),
                numa: self.numa_node(device),
                ..nic.clone()
            })
            .collect();
        nics.sort_by(|a, b| natural(&a.name).cmp(&natural(&b.name)));
        Ok(nics)
    }

    /// Interfaces with hardware behind them, by device folder.
    fn interfaces(&self) -> Result<BTreeMap<PathBuf, Vec<Interface>>, Error> {
        let mut found: BTreeMap<PathBuf, Vec<Interface>> = BTreeMap::new();
        for name in names(&self.root.join("class/net"))? {
            let class = self.root.join("class/net").join(&name);
            let Ok(device) = class.join("device").canonicalize() else { continue };
            // Drivers that do not watch their link say "unknown".
            let up = attribute(&class, "operstate").is_some_and(|state| state == "up" || state == "unknown");
            let rate_mbps =
                attribute(&class, "speed").and_then(|text| text.parse().ok()).filter(|&rate| rate > 0);
            found.entry(device).or_default().push(Interface { name, up, rate_mbps, taken: false });
        }
        Ok(found)
    }

    /// The folder of the hardware behind an RDMA device; its own folder for software RDMA over a virtual interface.
    fn rdma_device(&self, class: &Path) -> PathBuf {
        let parent = attribute(class, "parent").map(|name| self.root.join("class/net").join(name));
        [Some(class.to_owned()), parent]
            .into_iter()
            .flatten()
            .find_map(|folder| folder.join("device").canonicalize().ok())
            .unwrap_or_else(|| class.to_owned())
    }

    /// `devices/pci0000:17/0000:17:01.0/…/0000:1b:00.0/virtio2` → the PCI part of it.
    fn pci_path(&self, device: &Path) -> Option<PciPath> {
        PciPath::new(self.pci_parts(device).map(|(part, _)| part).collect())
    }

    fn numa_node(&self, device: &Path) -> Option<u16> {
        // A device on a bus of its own (virtio) leaves this to the PCI function above it.
        let function = self.pci_parts(device).last().map(|(_, folder)| folder);
        [Some(device), function.as_deref()]
            .into_iter()
            .flatten()
            .find_map(|folder| attribute(folder, "numa_node")?.parse().ok())
            .or(self.only_node)
    }

    fn pci_parts(&self, device: &Path) -> impl Iterator<Item = (String, PathBuf)> {
        let below = device.strip_prefix(&self.root).unwrap_or(device);
        let mut folder = self.root.clone();
        let mut parts = Vec::new();
        for part in below {
            folder.push(part);
            let part = part.to_string_lossy();
            if is_pci(&part) {
                parts.push((part.into_owned(), folder.clone()));
            }
        }
        parts.into_iter()
    }
}

struct Interface {
    name: String,
    up: bool,
    rate_mbps: Option<u64>,
    /// Whether an RDMA device of the same function has it.
    taken: bool,
}

impl Interface {
    fn take(&mut self) -> String {
        self.taken = true;
        self.name.clone()
    }
}

fn nic(name: String, interfaces: Vec<String>) -> Nic {
    Nic { name, rdma: false, interfaces, pci: None, numa: None, rate_mbps: None, up: false }
}

/// Whether `device` is a virtual function whose physical function is here too: the same wire, counted once.
fn is_function_of_another(device: &Path, all: &[(PathBuf, Nic)]) -> bool {
    let physical = device.join("physfn").canonicalize();
    physical.is_ok_and(|physical| all.iter().any(|(other, _)| *other == physical))
}

/// Whether a port of an RDMA device is up, and the highest rate.
fn ports(class: &Path) -> Result<(bool, Option<u64>), Error> {
    let folder = class.join("ports");
    let (mut up, mut rate_mbps) = (false, None);
    for port in names(&folder)? {
        let port = folder.join(port);
        up |= attribute(&port, "state").is_some_and(|state| state.ends_with("ACTIVE"));
        rate_mbps = rate_mbps.max(attribute(&port, "rate").and_then(|text| rate(&text)));
    }
    Ok((up, rate_mbps))
}

/// `400 Gb/sec (4X NDR)` or `2.5 Gb/sec (1X SDR)` → Mb/s.
fn rate(text: &str) -> Option<u64> {
    let gbps: f64 = text.split_whitespace().next()?.parse().ok()?;
    (gbps > 0.0).then_some((gbps * 1000.0) as u64)
}

/// `pci0000:17` (root complex) or `0000:1b:00.0` (function).
fn is_pci(part: &str) -> bool {
    let hex = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_hexdigit());
    if let Some(root) = part.strip_prefix("pci") {
        return root.split_once(':').is_some_and(|(domain, bus)| hex(domain) && hex(bus));
    }
    let Some((device, function)) = part.split_once('.') else { return false };
    let fields: Vec<&str> = device.split(':').collect();
    fields.len() == 3 && fields.into_iter().chain([function]).all(hex)
}

/// Names in a folder, sorted; empty if the folder is not there.
fn names(folder: &Path) -> Result<Vec<String>, Error> {
    let failed = |source| Error::Read { path: folder.to_owned(), source };
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    names.sort_by(|a, b| natural(a).cmp(&natural(b)));
    Ok(names)
}

fn attribute(folder: &Path, name: &str) -> Option<String> {
    let mut text = String::new();
    fs::File::open(folder.join(name)).ok()?.take(ATTRIBUTE_MAX).read_to_string(&mut text).ok()?;
    Some(text.trim().to_owned())
}

/// Sorts `mlx5_2` before `mlx5_10`.
pub(super) fn natural(name: &str) -> (String, u64, &str) {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
    (stem.to_owned(), name[stem.len()..].parse().unwrap_or(0), name)
}
