//! One function an area: facts in, findings out.

use super::facts::{Facts, NoClock, PortState, SocketState};
use super::{Finding, Level};
use crate::config::{Config, Size};
use crate::data_dir::DISK_BYTES_MIN;
use crate::policy::inspect::CONTRACT;
use kvasir_dataplane::memory::placing::HugePages;
use kvasir_dataplane::{cluster::Kind, wire};

/// Descriptors of one data connection, and of all else.
const FILES_PER_CONNECTION: u64 = 5;
const FILES_BESIDE: u64 = 256;
/// What a host maps beside its pool, nearly all of it room that policies may grow into.
const ADDRESS_BESIDE: u64 = 8 << 30;
const HUGE_PAGE: u64 = 2 << 20;
/// Below this a data folder fills soon: compiled policies, state, the audit log.
const DISK_COMFORT: u64 = 1 << 30;
/// 1 January 2026. No release of Kvasir is older, so no clock that is right shows less.
const EARLIEST: u64 = 1_767_225_600;
/// Clocks of hosts that differ by more are not kept by a time service.
const CLOCK_SKEW_S: i64 = 2;

fn finding(area: &'static str, level: Level, found: impl Into<String>, advice: impl Into<String>) -> Finding {
    Finding { area, level, found: found.into(), advice: advice.into() }
}

fn ok(area: &'static str, found: impl Into<String>) -> Finding {
    finding(area, Level::Ok, found, "")
}

fn size(bytes: u64) -> Size {
    Size(bytes)
}

pub(super) fn versions(_: &Config, facts: &Facts) -> Vec<Finding> {
    let own = env!("CARGO_PKG_VERSION");
    let mut found = vec![ok(
        "versions",
        format!("kvasir {own}, policy contract {}, data protocol {}", CONTRACT, wire::VERSION),
    )];
    if let Some(host) = facts.host.as_ref().filter(|host| !host.version.is_empty() && host.version != own) {
        let advice = "restart the host with this binary, or use the binary that it runs";
        let differs = format!("the running host is version {}, this is {own}", host.version);
        found.push(finding("versions", Level::Warning, differs, advice));
    }
    found
}

pub(super) fn host(_: &Config, facts: &Facts) -> Vec<Finding> {
    let Some(host) = &facts.host else {
        let advice = "start it with `kvasir serve`; until then this tells whether it could start";
        return vec![finding("host", Level::Note, "no host runs with these settings", advice)];
    };
    let pid = host.pid.map_or(String::new(), |pid| format!(" (process {pid})"));
    let mut found = vec![ok("host", format!("a host runs with these settings{pid}"))];
    let advice = "see its log; `curl -s localhost:PORT/readyz?verbose` on listen.http says more";
    let part = |(name, detail): &(String, String)| {
        finding("host", Level::Broken, format!("{name} is not ready: {detail}"), advice)
    };
    found.extend(host.not_ready.iter().map(part));
    let advice = "see `kvasir node list` there and here, and whether cluster.listen of both can be reached";
    let peer = |(name, reason): &(String, String)| {
        finding("host", Level::Warning, format!("host {name} is not up: {reason}"), advice)
    };
    found.extend(host.peers_down.iter().map(peer));
    found
}

pub(super) fn limits(config: &Config, facts: &Facts) -> Vec<Finding> {
    let (limits, pool) = (&facts.limits, config.store.dram.pool_bytes);
    let files = FILES_BESIDE + 2 * FILES_PER_CONNECTION * u64::from(config.store.server.connections_max);
    let unit = "or LimitNOFILE in the service's unit";
    let files = match limits.files.filter(|&limit| limit < files) {
        None => ok("limits", "enough open files"),
        Some(limit) => finding(
            "limits",
            Level::Warning,
            format!("{limit} open files; store.connections_max of both kinds may take {files}"),
            format!("raise it: ulimit -n {files}, {unit}"),
        ),
    };
    let address = match limits.address_bytes.filter(|&limit| limit < pool.saturating_add(ADDRESS_BESIDE)) {
        None => ok("limits", "enough address space"),
        Some(limit) => finding(
            "limits",
            Level::Warning,
            format!("{} of address space for a pool of {}", size(limit), size(pool)),
            "policies may get less memory than they are allowed; raise it: ulimit -v unlimited",
        ),
    };
    let short = limits.locked_bytes.filter(|&limit| limit < pool);
    let locked = match (short, config.store.dram.lock_memory) {
        (None, _) => ok("limits", "enough locked memory"),
        (Some(limit), true) => finding(
            "limits",
            Level::Broken,
            format!("{} may be locked, and store.lock_memory locks a pool of {}", size(limit), size(pool)),
            "raise it: ulimit -l unlimited, or LimitMEMLOCK=infinity in the service's unit",
        ),
        (Some(limit), false) => finding(
            "limits",
            Level::Note,
            format!(
                "{} may be locked, less than the pool; RDMA and store.lock_memory need more",
                size(limit)
            ),
            "",
        ),
    };
    vec![files, address, locked]
}

pub(super) fn memory(config: &Config, facts: &Facts) -> Vec<Finding> {
    let (memory, pool) = (&facts.memory, config.store.dram.pool_bytes);
    let reserved = memory.huge_pages_free.saturating_mul(HUGE_PAGE) >= pool;
    let wanted = config.store.dram.huge_pages;
    let mut found = Vec::new();
    // The pool of a host that runs is taken already.
    if facts.host.is_none() && !reserved {
        found.push(match memory.available_bytes < pool {
            false => ok("memory", format!("{} available, pool {}", size(memory.available_bytes), size(pool))),
            true => finding(
                "memory",
                Level::Broken,
                format!(
                    "store.pool_bytes is {}, and {} is available",
                    size(pool),
                    size(memory.available_bytes)
                ),
                "set a smaller store.pool_bytes, or stop what uses the memory",
            ),
        });
    }
    let pages = pool.div_ceil(HUGE_PAGE);
    let reserve = format!("reserve them: sysctl vm.nr_hugepages={pages}");
    found.push(match (wanted, facts.host.is_some() || reserved) {
        (HugePages::Off, _) => finding("memory", Level::Note, "store.huge_pages is off", ""),
        (_, true) => ok("memory", "huge pages are reserved, or the host has its pool already"),
        (HugePages::Require, false) => finding(
            "memory",
            Level::Broken,
            format!("store.huge_pages is require, and {} of {pages} are free", memory.huge_pages_free),
            reserve,
        ),
        (HugePages::Auto, false) if memory.are_transparent => {
            ok("memory", "huge pages where the kernel has them to give")
        }
        (HugePages::Auto, false) => finding(
            "memory",
            Level::Warning,
            "no huge pages for the pool, so large copies take longer",
            format!("{reserve}, or echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        ),
    });
    found
}

pub(super) fn ports(_: &Config, facts: &Facts) -> Vec<Finding> {
    let port = |port: &super::facts::Port| {
        let at = format!("{} {}", port.key, port.addr);
        let other = format!("stop it, or set another {}", port.key);
        match &port.state {
            PortState::Own => ok("ports", format!("{at} is this host's")),
            PortState::Free if facts.host.is_none() || port.addr.port() == 0 => {
                ok("ports", format!("{at} is free"))
            }
            PortState::Free => finding(
                "ports",
                Level::Warning,
                format!("a host runs, but nobody listens on {at}"),
                "it was started with other settings; give the same --config and --set here, or restart it",
            ),
            PortState::Taken(Some((pid, name))) => {
                finding("ports", Level::Broken, format!("{at} is taken by process {pid} ({name})"), other)
            }
            PortState::Taken(None) => {
                let who = "a process of another user, which `ss -ltnp` names to root";
                finding("ports", Level::Broken, format!("{at} is taken by {who}"), other)
            }
            PortState::Unusable(error) => {
                let advice = format!("set {} to an address of this machine", port.key);
                finding("ports", Level::Broken, format!("{at} cannot be opened: {error}"), advice)
            }
        }
    };
    facts.ports.iter().map(port).collect()
}

pub(super) fn data_dir(_: &Config, facts: &Facts) -> Vec<Finding> {
    let folder = &facts.data_dir;
    let path = folder.path.display();
    let broken = |found: String, advice: &str| finding("data folder", Level::Broken, found, advice);
    let mut findings = vec![match (folder.owner_mode, &folder.parent) {
        (Some((owner, _)), _) if owner != facts.user => broken(
            format!("{path} belongs to user {owner}, this is user {}", facts.user),
            "run as that user, or set another node.data_dir",
        ),
        (Some((_, mode)), _) if mode & 0o022 != 0 => broken(
            format!("{path} has mode {mode:o}, so others may write to it"),
            "run `chmod go-w` on it, after a look at what is in there",
        ),
        (Some(_), _) => ok("data folder", format!("{path} is this user's")),
        (None, (parent, false)) => broken(
            format!("{path} is not there, and {} is not for this user to write", parent.display()),
            "make it for this user, or set another node.data_dir",
        ),
        (None, (_, true)) => ok("data folder", format!("{path} is not there yet, and will be made")),
    }];
    if let Some(free) = folder.free_bytes.filter(|&free| free < DISK_COMFORT) {
        let level = if free < DISK_BYTES_MIN { Level::Broken } else { Level::Warning };
        let advice = "make room, or set another node.data_dir";
        findings.push(finding("data folder", level, format!("the disk has {} free", size(free)), advice));
    }
    findings
}

pub(super) fn sockets(_: &Config, facts: &Facts) -> Vec<Finding> {
    let socket = |socket: &super::facts::Socket| {
        let at = format!("{} {}", socket.key, socket.path.display());
        match &socket.state {
            SocketState::Absent => ok("sockets", format!("{at} is free")),
            SocketState::Answers(mode) => ok("sockets", format!("{at} answers, mode {mode:o}")),
            SocketState::LeftOver => finding(
                "sockets",
                Level::Note,
                format!("{at} is left from a host that is gone; it will be replaced"),
                "",
            ),
            SocketState::NotASocket => {
                let advice = format!("remove it, or set another {}", socket.key);
                finding("sockets", Level::Broken, format!("{at} is there and is not a socket"), advice)
            }
            SocketState::Closed(error) => {
                let advice =
                    "run this as the user of the host, or have this user added under [[access.allow]]";
                finding(
                    "sockets",
                    Level::Broken,
                    format!("{at} is closed to user {}: {error}", facts.user),
                    advice,
                )
            }
        }
    };
    facts.sockets.iter().map(socket).collect()
}

pub(super) fn clock(_: &Config, facts: &Facts) -> Vec<Finding> {
    let clock = &facts.clock;
    let service = "have a time service set it, such as chrony or systemd-timesyncd";
    let wall = match clock.wall_s < EARLIEST {
        false => ok("clock", "the wall clock shows a time that can be right"),
        true => finding(
            "clock",
            Level::Broken,
            "the wall clock shows a time before this version; certificates and tokens seem not to be valid yet",
            service,
        ),
    };
    let source = match clock.source.as_str() {
        "" => finding("clock", Level::Note, "the kernel does not tell its clock source", ""),
        slow @ ("hpet" | "acpi_pm" | "jiffies" | "refined-jiffies") => finding(
            "clock",
            Level::Warning,
            format!(
                "the clock source is {slow}: each look at the clock takes a microsecond, and a get takes two"
            ),
            "see the kernel's log for why it left the tsc; in a virtual machine ask for kvm-clock",
        ),
        source => ok("clock", format!("the clock source is {source}")),
    };
    let peer = |(addr, ahead): &(String, Result<i64, NoClock>)| match ahead {
        Ok(s) if s.abs() <= CLOCK_SKEW_S => ok("clock", format!("the clock of {addr} agrees")),
        Ok(s) => {
            let side = if *s > 0 { "ahead" } else { "behind" };
            finding("clock", Level::Warning, format!("the clock of {addr} is {} s {side}", s.abs()), service)
        }
        Err(error) => {
            let advice =
                "give the listen.http of a running host, as HOST:PORT, and --tls-ca if it speaks TLS";
            finding("clock", Level::Warning, format!("the clock of {addr} is not known: {error}"), advice)
        }
    };
    [wall, source].into_iter().chain(clock.peers.iter().map(peer)).collect()
}

pub(super) fn kernel(config: &Config, facts: &Facts) -> Vec<Finding> {
    let kernel = &facts.kernel;
    let disk = !config.nvme.dir.as_os_str().is_empty();
    let ring = match &kernel.io_uring {
        None => ok("kernel", format!("{} has io_uring", kernel.release)),
        Some(error) => finding(
            "kernel",
            if disk { Level::Warning } else { Level::Note },
            format!(
                "io_uring is refused: {error}; the disk tier does plain system calls instead, which is slower"
            ),
            "sysctl kernel.io_uring_disabled=0; in a container, a seccomp profile that allows io_uring_setup",
        ),
    };
    let memfd = match &kernel.memfd {
        None => ok("kernel", "memory can be shared with clients (memfd with seals)"),
        Some(error) => finding(
            "kernel",
            Level::Broken,
            format!("no memory to share with clients: {error}"),
            "allow memfd_create and fcntl seals; a pool cannot be made without them",
        ),
    };
    vec![ring, memfd]
}

pub(super) fn rdma(config: &Config, facts: &Facts) -> Vec<Finding> {
    let rdma = &facts.rdma;
    let wanted = config.cluster.is_on() && config.cluster.transports.contains(&Kind::Rdma);
    let locked = facts.limits.locked_bytes.is_some_and(|limit| limit < config.store.dram.pool_bytes);
    let lacks = [
        (
            rdma.library.is_none(),
            "libibverbs.so.1 is not installed",
            "apt-get install ibverbs-providers libibverbs1",
        ),
        (
            rdma.devices.is_empty(),
            "there is no device in /sys/class/infiniband",
            "load the adapter's driver (or rdma_rxe for tests)",
        ),
        (
            !rdma.devices.is_empty() && !rdma.may_open,
            "this user may not open /dev/infiniband/uverbs*",
            "give the user's group read and write on them; in a container pass the devices in",
        ),
        (
            !rdma.devices.is_empty() && locked,
            "the pool is larger than the memory that may be locked",
            "ulimit -l unlimited, or LimitMEMLOCK=infinity in the service's unit",
        ),
    ];
    // An adapter that lies idle because something is missing is worth a word; to have none is usual.
    let level = match (wanted, rdma.devices.is_empty()) {
        (true, _) => Level::Broken,
        (false, false) => Level::Warning,
        (false, true) => Level::Note,
    };
    let lacks: Vec<_> = lacks
        .into_iter()
        .filter(|(lacks, ..)| *lacks)
        .map(|(_, found, advice)| finding("rdma", level, found, advice))
        .collect();
    if lacks.is_empty() { vec![ok("rdma", format!("devices: {}", rdma.devices.join(", ")))] } else { lacks }
}

pub(super) fn cuda(_: &Config, facts: &Facts) -> Vec<Finding> {
    let cuda = &facts.cuda;
    let level = if cuda.cards > 0 { Level::Warning } else { Level::Note };
    let lacks = [
        (
            cuda.library.is_none(),
            "libcuda.so.1 is not installed",
            "install NVIDIA's driver, or its container toolkit",
        ),
        (
            !cuda.device,
            "there is no /dev/nvidiactl",
            "load NVIDIA's driver; in a container pass the devices in",
        ),
    ];
    let lacks: Vec<_> = lacks
        .into_iter()
        .filter(|(lacks, ..)| *lacks)
        .map(|(_, found, advice)| finding("cuda", level, found, advice))
        .collect();
    if lacks.is_empty() {
        vec![ok("cuda", format!("{} GPUs, library and device are there", cuda.cards))]
    } else {
        lacks
    }
}
