//! Some hosts, clients at each, a network that fails, and crashes; then everything works again, and what was promised must be
//! so.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use kvasir_os::thread;
use kvasir_os::time::{Duration, Instant};
use kvasir_os::world::{self, CLIENTS_FROM, Chance};

use crate::client::{self, COPIES, Client};
use crate::host::{Disk, Host, STALL};
use crate::model::{Counts, Model, Run, key};
use crate::violated;

/// Clients of each host, and calls of each.
const CLIENTS: u32 = 2;
const CALLS: u32 = 40;
/// By then hosts that hear each other have made every copy: reconnecting takes 2 s at most, repair 2 s, an audit 1 s.
const SETTLED: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(100);

pub(crate) struct Scenario {
    hosts: Vec<Arc<Host>>,
    runs: Vec<Run>,
    /// Which of them run.
    alive: Vec<bool>,
    model: Arc<Mutex<Model>>,
    chance: Chance,
    clients: Vec<Sent>,
    machines: usize,
    named: u32,
    /// Where the hosts' disks are, if they have any.
    disks: Option<PathBuf>,
    /// What a host without blocks has ([`Host::filled`]).
    empty: (u64, u64),
}

/// A client, on a machine of its own.
struct Sent {
    machine: usize,
    host: usize,
    thread: thread::JoinHandle<()>,
}

impl Scenario {
    /// The hosts keep the files of their disks in `folder`. In half of the seeds they have none.
    pub(crate) fn run(seed: u64, count: usize, folder: PathBuf) -> Counts {
        let mut chance = Chance::new(seed);
        let disks = (chance.below(2) == 0).then_some(folder);
        let hosts: Vec<Arc<Host>> =
            (0..count).map(|host| start(host, count, disk(&disks, host, &mut chance))).collect();
        let empty = hosts[0].filled();
        let runs = (0..count).map(|host| Run { host, number: 0 }).collect();
        let (model, alive) = (Arc::default(), vec![true; count]);
        let (clients, machines, named) = (Vec::new(), CLIENTS_FROM, 0);
        let mut world = Self { hosts, runs, alive, model, chance, clients, machines, named, disks, empty };
        (0..count).for_each(|host| world.enter(host));
        world.until("all hosts are up", |world| world.all_up());
        world.fail_for_a_while();
        world.settle();
        let mut counts = world.model().counts;
        for (down, up) in world.hosts.iter().map(|host| host.moved()) {
            counts.down += down;
            counts.up += up;
        }
        world.take_everything_out();
        counts
    }

    fn model(&self) -> std::sync::MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn any(&mut self) -> usize {
        self.chance.below(self.hosts.len() as u64) as usize
    }

    /// Whether a host has a block, and knows that others count on it. One that was started again finds blocks on its disk of
    /// which it may not have heard; the database that would tell it is not in the world.
    fn keeps(&self, host: usize, n: u32) -> bool {
        let others = (0..self.hosts.len()).filter(|&other| other != host && self.alive[other]);
        let is_known = || !self.hosts[host].cluster.holders(key(n)).is_empty();
        let mut others = others.filter(|&other| self.believes(other, host, n));
        let is_first = self.disks.is_none() || self.runs[host].number == 0;
        holds(&self.hosts[host], n) && (is_first || is_known() || others.next().is_some())
    }

    /// The faulty part: one round of faults for each two hosts.
    fn fail_for_a_while(&mut self) {
        let count = self.hosts.len();
        (0..count).for_each(|host| self.send_clients(host));
        for _ in 0..count / 2 {
            self.wait_up_to(800);
            self.break_network();
            self.wait_up_to(700);
            if self.chance.below(2) == 0 {
                self.break_client();
            }
            self.wait_up_to(800);
            // Fewer than half of them at a time.
            let crashes = 1 + self.chance.below((count as u64 - 1) / 2 + u64::from(count == 2));
            let mut crashed: Vec<usize> = (0..crashes).map(|_| self.any()).collect();
            crashed.sort_unstable();
            crashed.dedup();
            for &host in &crashed {
                self.crash(host);
                self.wait_up_to(300);
            }
            if self.chance.below(2) == 0 {
                world::mend();
            }
            for &host in &crashed {
                self.wait_up_to(4000);
                self.restart(host);
                self.send_clients(host);
            }
        }
        self.wait_up_to(2000);
        world::mend();
        for client in std::mem::take(&mut self.clients) {
            let _ = client.thread.join();
        }
    }

    fn break_network(&mut self) {
        let (one, other) = (self.any(), self.any());
        let other = if one == other { (one + 1) % self.hosts.len() } else { other };
        match self.chance.below(4) {
            0 => world::cut(one, other),
            // From some of the others, for two hosts from the other.
            1 => {
                for other in (0..self.hosts.len()).filter(|&host| host != one) {
                    if self.hosts.len() == 2 || self.chance.below(2) == 0 {
                        world::cut(one, other);
                        world::cut(other, one);
                    }
                }
            }
            2 => (0..=self.chance.below(6)).for_each(|_| {
                world::reset_one();
                self.wait_up_to(60);
            }),
            _ => {}
        }
    }

    fn wait_up_to(&mut self, ms: u64) {
        // At any turn of the threads, not only when they all wait.
        thread::sleep(Duration::from_millis(self.chance.below(ms)));
        world::let_others(self.chance.below(200));
        self.check_holders();
    }

    fn send_clients(&mut self, host: usize) {
        for _ in 0..CLIENTS {
            let client = Client {
                at: Host::data_port(host),
                model: Arc::clone(&self.model),
                chance: Chance::new(self.chance.below(u64::MAX)),
                first: self.named,
                calls: CALLS,
            };
            self.named += CALLS;
            let machine = self.machines;
            self.machines += 1;
            let sent = world::on_host(machine, || {
                thread::Builder::new().name("client".into()).spawn(move || client.work())
            });
            let thread = sent.unwrap_or_else(|error| violated(&format!("no thread: {error}")));
            self.clients.push(Sent { machine, host, thread });
        }
    }

    /// A client is gone in the middle of whatever it does, or is not heard any more, or does not hear.
    fn break_client(&mut self) {
        let at = self.chance.below(self.clients.len().max(1) as u64) as usize;
        let Some(Sent { machine, host, .. }) = self.clients.get(at) else { return };
        match self.chance.below(4) {
            0 => world::cut(*machine, *host),
            1 => world::cut(*host, *machine),
            _ => {
                world::crash(*machine);
                self.clients.swap_remove(at);
            }
        }
    }

    /// A process has begun.
    fn enter(&self, host: usize) {
        self.model().runs.insert(self.hosts[host].boot, self.runs[host]);
    }

    /// Ends the process of a host, and everything in its memory with it; of its disk, what its power or its own end takes.
    fn crash(&mut self, host: usize) {
        self.check_holders();
        match &self.disks {
            None => world::crash(host),
            Some(disks) => match self.chance.below(4) {
                0 => {
                    world::crash(host);
                    world::note("its disk is lost");
                    let _ = std::fs::remove_dir_all(disk_folder(disks, host));
                }
                1 => world::cut_power(host),
                _ => world::crash(host),
            },
        }
        self.alive[host] = false;
        self.model().ended.push(self.runs[host]);
        let kept: Vec<u32> = self.model().kept().collect();
        for n in kept {
            // What another host has, for whatever reason, is promised on.
            let there = (0..self.hosts.len()).any(|host| self.alive[host] && self.keeps(host, n));
            self.model().promise(n).is_lost |= !there;
        }
        // No destructor runs.
        std::mem::forget(Arc::clone(&self.hosts[host]));
    }

    fn restart(&mut self, host: usize) {
        world::note(&format!("host-{host} starts again, with an empty pool"));
        let disk = disk(&self.disks, host, &mut self.chance);
        self.hosts[host] = start(host, self.hosts.len(), disk);
        self.runs[host].number += 1;
        self.enter(host);
        self.alive[host] = true;
    }

    fn all_up(&self) -> bool {
        use kvasir_cluster::LinkState::Up;
        self.hosts.iter().all(|host| host.cluster.peers().iter().all(|peer| peer.state == Up))
    }

    /// Whether a host believes that another has a copy.
    fn believes(&self, host: usize, other: usize, n: u32) -> bool {
        self.hosts[host].cluster.holders(key(n)).contains(&Host::name(other))
    }

    /// A host that believes that another has a copy must be right, while neither was started again, and the other has
    /// dropped none that it thought to be one too many.
    fn check_holders(&self) {
        let all = || 0..self.hosts.len();
        let first: Vec<usize> =
            all().filter(|&host| self.alive[host] && self.runs[host].number == 0).collect();
        let trims = |peer: usize| self.hosts[peer].cluster.stats().trimmed > 0;
        let peers: Vec<usize> = first.iter().copied().filter(|&peer| !trims(peer)).collect();
        let kept: Vec<u32> = self.model().kept().collect();
        for &host in &first {
            for &n in &kept {
                let holders = self.hosts[host].cluster.holders(key(n));
                let believed = peers.iter().filter(|&&peer| holders.contains(&Host::name(peer)));
                for &peer in believed.filter(|&&peer| peer != host) {
                    if !holds(&self.hosts[peer], n) && !self.model().promise(n).removing {
                        violated(&format!(
                            "host-{host} believes that host-{peer} has a copy of block {n}; it has none"
                        ));
                    }
                }
            }
        }
    }

    /// Hosts that have a copy and of which all others know it; `None` as long as any knows of a copy that is not there.
    fn copies(&self, n: u32) -> Option<usize> {
        let mut copies = 0;
        for host in 0..self.hosts.len() {
            let others = (0..self.hosts.len()).filter(|&other| other != host);
            let known = others.filter(|&other| self.believes(other, host, n)).count();
            let is_there = holds(&self.hosts[host], n);
            if known > 0 && !is_there {
                return None;
            }
            copies += usize::from(known == self.hosts.len() - 1);
        }
        Some(copies)
    }

    fn say_who_has(&self, n: u32) {
        let all = || 0..self.hosts.len();
        let having: Vec<usize> = all().filter(|&host| holds(&self.hosts[host], n)).collect();
        let believed: Vec<(usize, usize)> = all()
            .flat_map(|host| all().map(move |other| (host, other)))
            .filter(|&(host, other)| self.believes(host, other, n))
            .collect();
        world::note(&format!(
            "block {n} is on {having:?}; host, and where it believes it to be: {believed:?}"
        ));
    }

    /// The faults are over: whatever was promised must become so.
    fn settle(&self) {
        world::note("the faults are over");
        self.until("all hosts are up again", |world| world.all_up());
        let kept: Vec<u32> = self.model().kept().collect();
        self.until_of(&kept, "does not have as many copies as were asked for", |world, n| {
            let enough = world.copies(n).is_some_and(|copies| copies >= COPIES.into());
            if !enough {
                world.say_who_has(n);
            }
            enough
        });
        let removed = self.model().removed(&self.runs);
        self.until_of(&removed, "was removed, and is still there", |world, n| {
            !world.hosts.iter().any(|host| holds(host, n))
        });
        for host in &self.hosts {
            kept.iter().for_each(|&n| must(client::read(host, n), n, "was acknowledged, and is not found"));
            removed.iter().for_each(|&n| must(!client::read(host, n), n, "was removed, and is served"));
            // Also of calls that were never answered, and of blocks that nobody promises any more.
            (0..self.named).for_each(|n| {
                client::read(host, n);
            });
        }
    }

    /// Removes everything, after which all tiers must be as empty as at the beginning.
    fn take_everything_out(&self) {
        // What clients had sent before they gave up is served, or is given up as well.
        thread::sleep(STALL * 2);
        let all: Vec<_> = (0..self.named).map(key).collect();
        let host = &self.hosts[0];
        let removed = host.tiering.remove(&all, host.clock.now_ms());
        world::note(&format!(
            "removes everything: {}",
            removed.map_or("failed".into(), |all| all.len().to_string())
        ));
        self.until("all space is free again", |world| {
            let mut filled = world.hosts.iter().map(|host| host.filled());
            let so = filled.all(|filled| filled == world.empty);
            if !so {
                (0..world.named).filter(|&n| world.hosts.iter().any(|host| holds(host, n))).for_each(|n| {
                    world.say_who_has(n);
                });
            }
            so
        });
    }

    fn until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let until = Instant::now() + SETTLED;
        while !is_so(self) {
            if Instant::now() > until {
                violated(&format!("{SETTLED:?} passed without: {what}"));
            }
            thread::sleep(LOOK);
        }
    }

    /// Waits until it is so of each of these blocks.
    fn until_of(&self, blocks: &[u32], wrong: &str, is_so: impl Fn(&Self, u32) -> bool) {
        let until = Instant::now() + SETTLED;
        for &n in blocks {
            while !is_so(self, n) {
                if Instant::now() > until {
                    violated(&format!("block {n} {wrong}, {SETTLED:?} after the faults"));
                }
                thread::sleep(LOOK);
            }
        }
    }
}

fn must(so: bool, n: u32, wrong: &str) {
    if !so {
        violated(&format!("block {n} {wrong}"));
    }
}

fn holds(host: &Host, n: u32) -> bool {
    host.has(key(n))
}

fn disk_folder(disks: &Path, host: usize) -> PathBuf {
    disks.join(Host::name(host))
}

fn disk(disks: &Option<PathBuf>, host: usize, chance: &mut Chance) -> Option<Disk> {
    let disks = disks.as_ref()?;
    Some(Disk { folder: disk_folder(disks, host), seed: chance.below(u64::MAX) })
}

fn start(host: usize, count: usize, disk: Option<Disk>) -> Arc<Host> {
    match Host::start(host, count, disk) {
        Ok(host) => Arc::new(host),
        Err(error) => violated(&format!("host-{host} does not start: {error:#}")),
    }
}
