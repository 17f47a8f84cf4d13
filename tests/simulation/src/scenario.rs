//! Two hosts, clients at both, a network that fails, and one crash; then everything works again, and what was promised must
//! be so.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use kvasir_os::thread;
use kvasir_os::time::{Duration, Instant};
use kvasir_os::world::{self, Chance};

use crate::client::{self, Client};
use crate::host::Host;
use crate::model::{Counts, HOSTS, Model, Run, key};
use crate::violated;

/// Clients of each host, and calls of each.
const CLIENTS: u32 = 2;
const CALLS: u32 = 40;
/// By then two hosts that hear each other have made every copy: reconnecting takes 2 s at most, repair 2 s, an audit 1 s.
const SETTLED: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(100);

pub(crate) struct Scenario {
    hosts: Vec<Arc<Host>>,
    runs: Vec<Run>,
    model: Arc<Mutex<Model>>,
    chance: Chance,
    clients: Vec<thread::JoinHandle<()>>,
    named: u32,
    /// Free bytes of an empty pool.
    empty: u64,
}

impl Scenario {
    pub(crate) fn run(seed: u64) -> Counts {
        let hosts: Vec<Arc<Host>> = (0..HOSTS).map(start).collect();
        let empty = hosts[0].store.pressure().free_bytes;
        let runs = (0..HOSTS).map(|host| Run { host, number: 0 }).collect();
        let (model, chance) = (Arc::default(), Chance::new(seed));
        let mut world = Self { hosts, runs, model, chance, clients: Vec::new(), named: 0, empty };
        world.until("both hosts are up", |world| world.all_up());
        world.fail_for_a_while();
        world.settle();
        let counts = world.model().counts;
        world.take_everything_out();
        counts
    }

    fn model(&self) -> std::sync::MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The faulty part.
    fn fail_for_a_while(&mut self) {
        (0..HOSTS).for_each(|host| self.send_clients(host));
        self.wait_up_to(800);
        let (one, other) =
            (self.chance.below(HOSTS as u64) as usize, self.chance.below(HOSTS as u64) as usize);
        match self.chance.below(4) {
            0 => world::cut(one, 1 - one),
            1 => {
                world::cut(0, 1);
                world::cut(1, 0);
            }
            2 => (0..=self.chance.below(6)).for_each(|_| {
                world::reset_one();
                self.wait_up_to(60);
            }),
            _ => {}
        }
        self.wait_up_to(1500);
        self.crash(other);
        if self.chance.below(2) == 0 {
            world::mend();
        }
        self.wait_up_to(4000);
        self.restart(other);
        self.send_clients(other);
        self.wait_up_to(2000);
        world::mend();
        for client in std::mem::take(&mut self.clients) {
            let _ = client.join();
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
                run: self.runs[host],
                host: Arc::clone(&self.hosts[host]),
                model: Arc::clone(&self.model),
                chance: Chance::new(self.chance.below(u64::MAX)),
                first: self.named,
                calls: CALLS,
            };
            self.named += CALLS;
            let sent = world::on_host(host, || {
                thread::Builder::new().name("client".into()).spawn(move || client.work())
            });
            self.clients.push(sent.unwrap_or_else(|error| violated(&format!("no thread: {error}"))));
        }
    }

    /// Ends the process of a host, and everything in its memory with it.
    fn crash(&mut self, host: usize) {
        let (own, other) = (self.runs[host], self.runs[1 - host]);
        let kept: Vec<u32> = self.model().kept().collect();
        // What it knows a copy of, and what another host has for whatever reason, is promised on.
        let copied = |n: &u32| !self.hosts[host].cluster.holders(key(*n)).is_empty();
        let copied: BTreeSet<u32> = kept.into_iter().filter(copied).collect();
        world::crash(host);
        let put_here: Vec<u32> = {
            let model = self.model();
            model.kept().filter(|n| model.promises[n].acknowledged == Some(own)).collect()
        };
        for n in put_here {
            let there = holds(&self.hosts[1 - host], n);
            let mut model = self.model();
            model.promise(n).acknowledged = (there || copied.contains(&n)).then_some(other);
        }
        // Its clients end with it: they are on the same machine.
        self.clients.retain(|client| !client.is_crashed());
        // No destructor runs.
        std::mem::forget(Arc::clone(&self.hosts[host]));
    }

    fn restart(&mut self, host: usize) {
        world::note(&format!("host-{host} starts again, with an empty pool"));
        self.hosts[host] = start(host);
        self.runs[host].number += 1;
    }

    fn all_up(&self) -> bool {
        use kvasir_cluster::LinkState::Up;
        self.hosts.iter().all(|host| host.cluster.peers().iter().all(|peer| peer.state == Up))
    }

    /// A host that believes that its peer has a copy must be right, while neither was started again.
    fn check_holders(&self) {
        if self.runs.iter().any(|run| run.number > 0) {
            return;
        }
        let kept: Vec<u32> = self.model().kept().collect();
        for n in kept {
            for (host, peer) in [(0, 1), (1, 0)] {
                let believed = !self.hosts[host].cluster.holders(key(n)).is_empty();
                if believed && !holds(&self.hosts[peer], n) && !self.model().promise(n).removing {
                    violated(&format!(
                        "host-{host} believes that host-{peer} has a copy of block {n}; it has none"
                    ));
                }
            }
        }
    }

    /// The faults are over: whatever was promised must become so.
    fn settle(&self) {
        world::note("the faults are over");
        self.until("both hosts are up again", |world| world.all_up());
        let kept: Vec<u32> = self.model().kept().collect();
        self.until_of(&kept, "does not have two copies", |world, n| {
            world.hosts.iter().all(|host| holds(host, n))
        });
        let removed = self.model().removed(&self.runs);
        self.until_of(&removed, "was removed, and is still there", |world, n| {
            !world.hosts.iter().any(|host| holds(host, n))
        });
        for host in &self.hosts {
            kept.iter().for_each(|&n| must(client::read(host, n), n, "was acknowledged, and is not found"));
            removed.iter().for_each(|&n| must(!client::read(host, n), n, "was removed, and is served"));
        }
    }

    /// Removes everything, after which both pools must be as empty as at the beginning.
    fn take_everything_out(&self) {
        let all: Vec<_> = (0..self.named).map(key).collect();
        let host = &self.hosts[0];
        let removed = host.tiering.remove(&all, host.clock.now_ms());
        world::note(&format!(
            "removes everything: {}",
            removed.map_or("failed".into(), |all| all.len().to_string())
        ));
        self.until("all space is free again", |world| {
            world.hosts.iter().all(|host| host.store.pressure().free_bytes == world.empty)
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
    host.store.exists(&[key(n)]).is_ok_and(|found| found[0])
}

fn start(host: usize) -> Arc<Host> {
    match Host::start(host, HOSTS) {
        Ok(host) => Arc::new(host),
        Err(error) => violated(&format!("host-{host} does not start: {error:#}")),
    }
}
