//! Some hosts, clients at each, a network that fails, and crashes; then everything works again, and what was promised must be
//! so.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use kvasir_os::thread;
use kvasir_os::time::{Duration, Instant};
use kvasir_os::world::{self, Chance, Failing};

use crate::bucket::Bucket;
use crate::client::{self, COPIES, Client};
use crate::engines::{self, At, Producer, Reader};
use crate::host::{Disk, Host, Room, STALL};
use crate::lent::read_in_place;
use crate::model::{Counts, Model, Run, key};
use crate::plan::{ClientPlan, Event, HandOverPlan, How, Plan, What};
use crate::violated;

/// By then hosts that hear each other have made every copy: reconnecting takes 2 s at most, repair 2 s, an audit 1 s.
const SETTLED: Duration = Duration::from_secs(30);
const MINUTE: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(100);
/// Blocks that are read in one call when the faults are over.
const READ: usize = 16;

pub(crate) struct Scenario {
    hosts: Vec<Arc<Host>>,
    runs: Vec<Run>,
    /// Which of them run.
    alive: Vec<bool>,
    /// Hosts that stand still, with the blocks that each has and knows to be counted on: nobody can ask them.
    still: BTreeMap<usize, BTreeSet<u32>>,
    /// Processes under the name of a host that runs elsewhere, by machine.
    twins: BTreeMap<usize, Arc<Host>>,
    /// Hosts that have had one.
    doubled: BTreeSet<usize>,
    model: Arc<Mutex<Model>>,
    clients: BTreeMap<usize, thread::JoinHandle<()>>,
    /// What hands blocks over.
    engines: Vec<thread::JoinHandle<()>>,
    seed: u64,
    /// Of each host.
    room: Room,
    /// Where the hosts' disks are, if they have any.
    disks: Option<PathBuf>,
    /// What they share.
    bucket: Option<Arc<Bucket>>,
    /// How they fail now.
    failing: Failing,
    /// What a host without blocks has ([`Host::filled`]).
    empty: (u64, u64),
}

/// What is done at some time.
enum Act {
    Begin(What),
    /// A host that has crashed starts again.
    Restart(usize),
    /// A machine that stands still goes on.
    Resume(usize),
    EndTwin(usize),
    MendDisks,
}

impl Scenario {
    /// The hosts keep the files of their disks in `folder`.
    pub(crate) fn run(seed: u64, plan: &Plan, folder: PathBuf) -> Counts {
        let disks = plan.disks.then_some(folder);
        let room = if plan.small { Room::SMALL } else { Room::AMPLE };
        let (count, model) = (plan.hosts, Arc::<Mutex<Model>>::default());
        let bucket = plan.bucket.then(|| Bucket::new(Arc::clone(&model)));
        let first = |host| disk(&disks, seed, Run { host, number: 0 });
        let hosts: Vec<Arc<Host>> =
            (0..count).map(|host| start(host, host, count, room, first(host), bucket.as_ref())).collect();
        let empty = hosts[0].filled();
        let runs = (0..count).map(|host| Run { host, number: 0 }).collect();
        let alive = vec![true; count];
        let mut world = Self {
            hosts,
            runs,
            alive,
            still: BTreeMap::new(),
            twins: BTreeMap::new(),
            doubled: BTreeSet::new(),
            model,
            clients: BTreeMap::new(),
            engines: Vec::new(),
            seed,
            room,
            disks,
            bucket,
            failing: Failing::default(),
            empty,
        };
        if plan.small {
            let mut model = world.model();
            model.drops = true;
            model.counts.fault("a world with little room");
        }
        if plan.bucket {
            let mut model = world.model();
            // What has left a pool for the bucket, no host has any more.
            (model.drops, model.has_bucket) = (true, true);
            model.counts.fault("a world with a bucket");
        }
        (0..count).for_each(|host| world.enter(host));
        world.until("all hosts are up", |world| world.all_up());
        world.fail_for_a_while(plan);
        world.settle();
        let mut counts = world.model().counts.clone();
        world.hosts.iter().for_each(|host| counts.reached(&host.cluster.stats(), host.moved(), host.swaps()));
        world.take_everything_out();
        counts
    }

    fn model(&self) -> std::sync::MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks that a client has begun to put.
    fn put(&self) -> Vec<u32> {
        self.model().promises.keys().copied().collect()
    }

    /// Whether a host has a block, and knows that others count on it. One that was started again finds blocks on its disk of
    /// which it may not have heard again yet, and one where a block was put too need not have heard of the others.
    fn keeps(&self, host: usize, n: u32) -> bool {
        let others = self.asked().filter(|&other| other != host);
        let is_known = || !self.hosts[host].cluster.holders(key(n)).is_empty();
        let mut others = others.filter(|&other| self.believes(other, host, n));
        let is_first = self.disks.is_none() || self.runs[host].number == 0;
        let is_told = is_first && !self.model().promise(n).put_too.contains(&host);
        holds(&self.hosts[host], n) && (is_told || is_known() || others.next().is_some())
    }

    /// The faulty part.
    fn fail_for_a_while(&mut self, plan: &Plan) {
        let mut acts: BTreeMap<(Duration, usize), (u64, Act)> = BTreeMap::new();
        for (order, Event { at, turns, what, .. }) in plan.events.iter().enumerate() {
            acts.insert((*at, order), (*turns, Act::Begin(what.clone())));
            let end = match what {
                What::Crash { host, away, .. } => Some((*away, Act::Restart(*host))),
                What::Pause { machine, lasts } => Some((*lasts, Act::Resume(*machine))),
                What::Twin { machine, lasts, .. } => Some((*lasts, Act::EndTwin(*machine))),
                What::DisksFail { lasts, .. } => Some((*lasts, Act::MendDisks)),
                _ => None,
            };
            if let Some((later, act)) = end {
                acts.insert((*at + later, order), (*turns, act));
            }
        }
        let begun = Instant::now();
        for ((at, _), (turns, act)) in acts {
            thread::sleep((begun + at).saturating_duration_since(Instant::now()));
            // At any turn of the threads, not only when they all wait.
            world::let_others(turns);
            self.check_holders();
            self.check_limits();
            self.act(act);
        }
        thread::sleep(Duration::from_millis(Chance::new(self.seed).below(2000)));
        world::mend();
        self.bucket.iter().for_each(|bucket| bucket.mend());
        self.fail_disks(Failing::default());
        for (_, client) in std::mem::take(&mut self.clients) {
            let _ = client.join();
        }
        for engine in std::mem::take(&mut self.engines) {
            // One that was in a host as that crashed never ends.
            while !engine.is_finished() && !engine.is_crashed() {
                thread::sleep(LOOK);
            }
        }
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Begin(what) => self.begin(what),
            Act::Restart(host) => self.restart(host),
            Act::Resume(machine) => {
                if self.still.remove(&machine).is_some() {
                    world::resume(machine);
                }
            }
            Act::MendDisks => self.fail_disks(Failing::default()),
            Act::EndTwin(machine) => {
                world::crash(machine);
                // No destructor runs.
                std::mem::forget(self.twins.remove(&machine));
            }
        }
    }

    fn begin(&mut self, what: What) {
        let fault = match what {
            What::Client(client) => return self.send_client(client),
            What::HandOver(plan) => return self.hand_over(plan),
            What::Push { from, to, seed } => return self.push(from, to, seed),
            What::Lend { machine, host, seed } => return self.lend(machine, host, seed),
            What::Mend => return world::mend(),
            What::Cut { from, to } => {
                world::cut(from, to);
                "a network cut"
            }
            What::Reset => {
                world::reset_one();
                "a connection broken"
            }
            What::Gone { machine } => {
                if self.clients.remove(&machine).is_none() {
                    return;
                }
                world::crash(machine);
                "a client gone"
            }
            What::Crash { host, how, .. } => {
                if !self.alive[host] {
                    return;
                }
                self.crash(host, how)
            }
            What::Twin { host, machine, .. } => {
                world::note(&format!("{} joins as host-{host}", world::name(machine)));
                self.model().goes_by_clock_of(machine);
                self.twins.insert(machine, start(host, machine, self.hosts.len(), self.room, None, None));
                self.doubled.insert(host);
                "a twin"
            }
            What::DisksFail { failing, .. } => {
                self.fail_disks(failing);
                "disks that fail"
            }
            What::SetClock { machine, ahead } => {
                world::set_clock(machine, ahead);
                self.model().goes_by_clock_of(machine);
                "a clock set"
            }
            What::Pause { machine, lasts } => {
                if !self.pause(machine) {
                    return;
                }
                if lasts > MINUTE / 2 { "a pause of minutes" } else { "a pause" }
            }
        };
        self.model().counts.fault(fault);
    }

    fn fail_disks(&mut self, failing: Failing) {
        self.model().disks_failed |= failing != Failing::default();
        world::note(&format!("all disks fail as {failing:?}"));
        world::disks_fail(failing);
        self.failing = failing;
    }

    fn hand_over(&mut self, plan: HandOverPlan) {
        if !self.alive[plan.from] || !self.alive[plan.to] {
            return;
        }
        let mut chance = Chance::new(plan.seed);
        let reader = Reader { at: self.at(plan.to), plan, chance: Chance::new(chance.below(u64::MAX)) };
        let producer = Producer { at: self.at(plan.from), plan, chance };
        self.send_engine(plan.machine, "engine", move || producer.work());
        self.send_engine(plan.machine + 1, "engine", move || reader.work());
    }

    fn push(&mut self, from: usize, to: usize, seed: u64) {
        if self.asked().any(|host| host == from) {
            let at = self.at(from);
            self.send_engine(from, "push", move || engines::push(&at, to, Chance::new(seed)));
        }
    }

    fn lend(&mut self, machine: usize, host: usize, seed: u64) {
        if self.alive[host] {
            let at = self.at(host);
            self.send_engine(machine, "reader", move || read_in_place(&at, Chance::new(seed)));
        }
    }

    fn at(&self, host: usize) -> At {
        let (run, model) = (self.runs[host], Arc::clone(&self.model));
        At { host: Arc::clone(&self.hosts[host]), run, model }
    }

    fn send_engine(&mut self, machine: usize, name: &str, work: impl FnOnce() + Send + 'static) {
        self.engines.push(send(machine, name, work));
    }

    fn send_client(&mut self, plan: ClientPlan) {
        let ClientPlan { machine, host, .. } = plan;
        let client = Client::new(Host::data_port(host), Arc::clone(&self.model), plan);
        self.clients.insert(machine, send(machine, "client", move || client.work()));
    }

    /// Whether it stands still from now on, and did not before.
    fn pause(&mut self, machine: usize) -> bool {
        let is_host = machine < self.hosts.len();
        let runs = if is_host { self.alive[machine] } else { self.clients.contains_key(&machine) };
        if !runs || self.still.contains_key(&machine) {
            return false;
        }
        let kept: Vec<u32> = self.model().kept().collect();
        let has = world::at_once(|| {
            let has = kept.iter().filter(|n| is_host && self.keeps(machine, **n));
            let has: BTreeSet<u32> = has.copied().collect();
            has
        });
        world::pause(machine);
        self.still.insert(machine, has);
        true
    }

    /// A process has begun.
    fn enter(&self, host: usize) {
        let mut model = self.model();
        model.runs.insert(self.hosts[host].boot, self.runs[host]);
        model.goes_by_clock_of(host);
    }

    /// Ends the process of a host, and everything in its memory with it; of its disk, what its power or its own end takes.
    fn crash(&mut self, host: usize, how: How) -> &'static str {
        self.check_holders();
        let forgets = self.disks.is_none() || how == How::DiskLost;
        let how = match (&self.disks, how) {
            (Some(disks), How::DiskLost) => {
                world::crash(host);
                world::note("its disk is lost");
                let _ = std::fs::remove_dir_all(disk_folder(disks, host));
                "a disk lost"
            }
            (Some(_), How::PowerCut) => {
                world::cut_power(host);
                "a power cut"
            }
            _ => {
                world::crash(host);
                "a crash"
            }
        };
        self.still.remove(&host);
        self.alive[host] = false;
        {
            let mut model = self.model();
            model.ended.push(self.runs[host]);
            // A disk that failed may not have taken what was removed meanwhile.
            if forgets || model.disks_failed {
                model.forgotten.push(self.runs[host]);
            }
        }
        let kept: Vec<u32> = self.model().kept().collect();
        // What another host has, for whatever reason, is promised on.
        let is_there = |n: &u32| {
            self.asked().any(|host| self.keeps(host, *n)) || self.still.values().any(|has| has.contains(n))
        };
        let lost: Vec<u32> = world::at_once(|| kept.iter().filter(|n| !is_there(n)).copied().collect());
        lost.into_iter().for_each(|n| self.model().promise(n).is_lost = true);
        // No destructor runs.
        std::mem::forget(Arc::clone(&self.hosts[host]));
        how
    }

    /// Hosts that run, and do not stand still: what they know can be looked at.
    fn asked(&self) -> impl Iterator<Item = usize> {
        (0..self.hosts.len()).filter(|host| self.alive[*host] && !self.still.contains_key(host))
    }

    fn restart(&mut self, host: usize) {
        if self.alive[host] {
            return;
        }
        world::note(&format!("host-{host} starts again, with an empty pool"));
        self.runs[host].number += 1;
        // What cannot be read while it starts is lost, which is for `--disk` to look at.
        world::disks_fail(Failing::default());
        let disk = disk(&self.disks, self.seed, self.runs[host]);
        self.hosts[host] = start(host, host, self.hosts.len(), self.room, disk, self.bucket.as_ref());
        world::disks_fail(self.failing);
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

    /// A host that believes that another has a copy must be right, while neither was started again, the other has dropped none
    /// that it thought to be one too many, and nobody else spoke in its name.
    fn check_holders(&self) {
        let kept: Vec<u32> = self.model().kept().collect();
        world::at_once(|| {
            let first: Vec<usize> = self.asked().filter(|&host| self.runs[host].number == 0).collect();
            let trims = |peer: usize| self.hosts[peer].cluster.stats().trimmed > 0;
            let speaks_for_itself = |peer: &usize| !trims(*peer) && !self.doubled.contains(peer);
            let peers: Vec<usize> = first.iter().copied().filter(speaks_for_itself).collect();
            kept.iter().for_each(|&n| first.iter().for_each(|&host| self.check_holders_of(n, host, &peers)));
        });
    }

    fn check_limits(&self) {
        for host in self.asked() {
            if let Some(beyond) = self.hosts[host].beyond_limits(host, self.hosts.len() - 1) {
                violated(&format!("host-{host} has {beyond}"));
            }
        }
    }

    fn check_holders_of(&self, n: u32, host: usize, peers: &[usize]) {
        let holders = self.hosts[host].cluster.holders(key(n));
        for &peer in peers.iter().filter(|&&peer| peer != host && holders.contains(&Host::name(peer))) {
            if !holds(&self.hosts[peer], n) && !self.model().promise(n).removing {
                violated(&format!(
                    "host-{host} believes that host-{peer} has a copy of block {n}; it has none"
                ));
            }
        }
    }

    /// Hosts that have a copy and of which all others know it; `None` as long as any knows of a copy that is not there.
    fn copies(&self, n: u32) -> Option<usize> {
        let believed: Vec<_> = self.hosts.iter().map(|host| host.cluster.holders(key(n))).collect();
        let mut copies = 0;
        for (place, host) in self.hosts.iter().enumerate() {
            let name = Host::name(place);
            let known = believed.iter().filter(|holders| holders.contains(&name)).count();
            if known > 0 && !holds(host, n) {
                return None;
            }
            // Nobody counts itself among its peers.
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
            world.copies(n).is_some_and(|copies| copies >= COPIES.into())
        });
        let removed = self.model().removed();
        self.until_of(&removed, "was removed, and is still there", |world, n| {
            !world.hosts.iter().any(|host| holds(host, n))
        });
        let kept = self.with_those_in_bucket(kept);
        thread::scope(|scope| {
            for host in &self.hosts {
                let (kept, removed) = (&kept, &removed);
                scope.spawn(move || self.read_all(host, kept, removed));
            }
        });
    }

    /// What is in the bucket is found by all, too, if they have room for it.
    fn with_those_in_bucket(&self, mut kept: Vec<u32>) -> Vec<u32> {
        if let Some(bucket) = self.bucket.as_ref().filter(|_| self.room == Room::AMPLE) {
            let model = self.model();
            let asked_for = model.promises.iter().filter(|(_, promise)| promise.acknowledged.is_some());
            let stay = asked_for.filter(|(_, promise)| !promise.removing).map(|(n, _)| *n);
            kept.extend(stay.filter(|n| bucket.has(key(*n))));
        }
        kept
    }

    /// Also blocks of calls that were never answered, and those that nobody promises any more.
    fn read_all(&self, host: &Host, kept: &[u32], removed: &[u32]) {
        let put = self.put();
        let found: BTreeSet<u32> = put.chunks(READ).flat_map(|blocks| client::read(host, blocks)).collect();
        kept.iter().for_each(|&n| must(found.contains(&n), n, "was acknowledged, and is not found"));
        removed.iter().for_each(|&n| must(!found.contains(&n), n, "was removed, and is served"));
    }

    /// Removes everything, after which all tiers must be as empty as at the beginning.
    fn take_everything_out(&self) {
        // What clients had sent before they gave up is served, or is given up as well.
        thread::sleep(STALL * 2);
        let all: Vec<_> = self.put().into_iter().map(key).collect();
        self.model().is_over = true;
        let host = &self.hosts[0];
        let removed = host.tiering.remove(&all, host.clock.now_ms());
        world::note(&format!(
            "removes everything: {}",
            removed.map_or("failed".into(), |all| all.len().to_string())
        ));
        self.until("all space is free again", |world| {
            world.hosts.iter().all(|host| host.filled() == world.empty)
        });
        self.until("nothing is under way any more", |world| !world.hosts.iter().any(|host| host.is_busy()));
        self.check_limits();
    }

    fn until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let until = Instant::now() + SETTLED;
        while !is_so(self) {
            if Instant::now() > until {
                let is_there = |n: &u32| self.hosts.iter().any(|host| holds(host, *n));
                self.put().iter().filter(|n| is_there(n)).for_each(|n| self.say_who_has(*n));
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
                    self.say_who_has(n);
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

fn disk(disks: &Option<PathBuf>, seed: u64, run: Run) -> Option<Disk> {
    let mut chance = Chance::new(seed ^ ((run.host as u64) << 40) ^ (u64::from(run.number) << 56));
    Some(Disk { folder: disk_folder(disks.as_ref()?, run.host), seed: chance.below(u64::MAX) })
}

/// A thread of this machine.
fn send(machine: usize, name: &str, work: impl FnOnce() + Send + 'static) -> thread::JoinHandle<()> {
    let sent = world::on_host(machine, || thread::Builder::new().name(name.into()).spawn(work));
    sent.unwrap_or_else(|error| violated(&format!("no thread: {error}")))
}

fn start(
    host: usize,
    machine: usize,
    count: usize,
    room: Room,
    disk: Option<Disk>,
    bucket: Option<&Arc<Bucket>>,
) -> Arc<Host> {
    match world::on_host(machine, || Host::start(host, machine, count, room, disk, bucket)) {
        Ok(host) => Arc::new(host),
        Err(error) => violated(&format!("host-{host} does not start: {error:#}")),
    }
}
