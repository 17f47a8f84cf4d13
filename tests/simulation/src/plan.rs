//! What a run does to its world, and when: a list that is made from the seed before anything begins, so that it can be shown,
//! and run again with steps left out.
//!
//! Each call of a client is a step, and each fault. They keep their numbers and times when others are left out.

use std::collections::BTreeSet;
use std::fmt;

use clap::ValueEnum;
use kvasir_os::time::Duration;
use kvasir_os::world::{self, CLIENTS_FROM, Chance, Failing, TWINS_FROM};

use crate::model::NAMES;

/// Clients of each host, and calls of each.
const CLIENTS: u32 = 2;
const CALLS: u32 = NAMES;

/// By then a host that hears nothing of another takes it for lost.
const LOST: Duration = Duration::from_secs(1);

/// Numbers of steps.
pub(crate) type Steps = BTreeSet<u32>;

#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) hosts: usize,
    /// Hosts have an NVMe tier below their pools.
    pub(crate) disks: bool,
    /// Below their pools they have a bucket that all share, instead of a tier on their disks.
    pub(crate) bucket: bool,
    /// They have less room than clients put.
    pub(crate) small: bool,
    /// In the order of time.
    pub(crate) events: Vec<Event>,
}

#[derive(Clone, Debug)]
pub(crate) struct Event {
    /// From when all hosts hear each other.
    pub(crate) at: Duration,
    /// So many turns of other threads later: a crash finds them anywhere, not only where all wait.
    pub(crate) turns: u64,
    pub(crate) what: What,
    /// The first step in it.
    pub(crate) first_step: u32,
}

#[derive(Clone, Debug)]
pub(crate) enum What {
    Client(ClientPlan),
    HandOver(HandOverPlan),
    /// Blocks that a host has go to another one.
    Push {
        from: usize,
        to: usize,
        seed: u64,
    },
    /// A process on this machine reads blocks of a host where they lie.
    Lend {
        machine: usize,
        host: usize,
        seed: u64,
    },
    /// Nothing that one machine sends reaches the other.
    Cut {
        from: usize,
        to: usize,
    },
    Mend,
    /// Any connection breaks.
    Reset,
    /// A client's process is gone.
    Gone {
        machine: usize,
    },
    Crash {
        host: usize,
        how: How,
        away: Duration,
    },
    /// Another process joins under the name of a host, as when its settings were copied to a new machine.
    Twin {
        host: usize,
        machine: usize,
        lasts: Duration,
    },
    /// A process stands still, and its connections stay open.
    Pause {
        machine: usize,
        lasts: Duration,
    },
    /// All disks.
    DisksFail {
        failing: Failing,
        lasts: Duration,
    },
    /// The clock on the wall of a machine is set, so far ahead of one that was never wrong.
    SetClock {
        machine: usize,
        ahead: Duration,
    },
}

/// A kind of faults, as it is named on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fault {
    Network,
    Clients,
    Crashes,
    Pauses,
    Twins,
    Disks,
    Clocks,
}

impl What {
    fn fault(&self) -> Option<Fault> {
        match self {
            Self::Client(_) | Self::HandOver(_) | Self::Push { .. } | Self::Lend { .. } => None,
            Self::Cut { .. } | Self::Mend | Self::Reset => Some(Fault::Network),
            Self::Gone { .. } => Some(Fault::Clients),
            Self::Crash { .. } => Some(Fault::Crashes),
            Self::Pause { .. } => Some(Fault::Pauses),
            Self::Twin { .. } => Some(Fault::Twins),
            Self::DisksFail { .. } => Some(Fault::Disks),
            Self::SetClock { .. } => Some(Fault::Clocks),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct ClientPlan {
    pub(crate) machine: usize,
    pub(crate) host: usize,
    pub(crate) seed: u64,
    /// Its blocks are named from here on.
    pub(crate) first_block: u32,
    /// Which of its calls it makes, of so many.
    pub(crate) calls: Vec<u32>,
    pub(crate) of: u32,
}

/// An engine at one host computes a block, and another reads it at another host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HandOverPlan {
    /// Of the two engines the first.
    pub(crate) machine: usize,
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// If it is a new one. Also the number of the request.
    pub(crate) block: u32,
    pub(crate) seed: u64,
}

/// A call of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// Of the block that has its number.
    Put,
    /// Of one that another has put.
    PutToo,
    Read,
    Hold,
    ReadSlowly,
    Remove,
}

impl ClientPlan {
    /// What a call is, and the chance of what it does. Each has its own, so that it stays the same if another is left out.
    pub(crate) fn call(&self, number: u32) -> (Call, Chance) {
        let mut chance = Chance::new(self.seed.wrapping_add(number.into()));
        let call = match chance.below(40) {
            0..16 => Call::Put,
            16..19 => Call::PutToo,
            19..34 => Call::Read,
            34..36 => Call::Hold,
            36 => Call::ReadSlowly,
            _ => Call::Remove,
        };
        (call, chance)
    }

    fn says(&self, number: u32) -> String {
        match self.call(number).0 {
            Call::Put => format!("puts block {}", self.first_block + number),
            Call::PutToo => "puts one that is known".into(),
            Call::Read => "reads one".into(),
            Call::Hold => "holds some".into(),
            Call::ReadSlowly => "reads many slowly".into(),
            Call::Remove => "removes one".into(),
        }
    }
}

/// How the process of a host ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    Killed,
    PowerCut,
    DiskLost,
}

/// What a world of so many hosts goes through. More than seven make fewer calls each and fail less at a time, so that all blocks
/// together still fit into the pool of one.
struct Size {
    rounds: usize,
    crashes: u64,
    clients: u32,
    calls: u32,
}

impl Size {
    fn of(hosts: usize) -> Self {
        let half = (hosts as u64 - 1) / 2 + u64::from(hosts == 2);
        if hosts <= 7 {
            Self { rounds: hosts / 2, crashes: half, clients: CLIENTS, calls: CALLS }
        } else {
            Self { rounds: 2, crashes: half.min(2), clients: 1, calls: CALLS / 2 }
        }
    }
}

struct Planner {
    plan: Plan,
    chance: Chance,
    size: Size,
    now: Duration,
    steps: u32,
    blocks: u32,
    /// Clients that are not gone, and their hosts.
    clients: Vec<(usize, usize)>,
    next_client: usize,
}

impl Plan {
    pub(crate) fn of(seed: u64, hosts: usize) -> Self {
        let mut chance = Chance::new(seed);
        let disks = chance.below(2) == 0;
        let bucket = disks && Chance::new(seed ^ 0x6275_636b_6574).below(4) == 0;
        let small = Chance::new(seed ^ 0x0073_6d61_6c6c).below(8) == 0;
        let mut planner = Planner {
            plan: Self { hosts, disks, bucket, small, events: Vec::new() },
            chance,
            size: Size::of(hosts),
            now: Duration::ZERO,
            steps: 0,
            blocks: 0,
            clients: Vec::new(),
            next_client: CLIENTS_FROM,
        };
        (0..hosts).for_each(|host| planner.send_clients(host));
        (0..planner.size.rounds).for_each(|_| planner.round());
        planner.set_clock_of_one_alone(Chance::new(seed ^ 0x0061_7061_7274));
        if disks {
            planner.fail_disks(Chance::new(seed ^ 0x6469_736b));
            planner.leave_alone(Chance::new(seed ^ 0x616c_6f6e));
        }
        planner.set_clocks(Chance::new(seed ^ 0x636c_6f63_6b73));
        planner.hand_over(Chance::new(seed ^ 0x6861_6e64));
        planner.lend(Chance::new(seed ^ 0x6c65_6e64));
        planner.plan.events.sort_by_key(|event| event.at);
        planner.plan
    }

    /// All of its steps.
    pub(crate) fn steps(&self) -> Steps {
        self.events.iter().flat_map(Event::steps).collect()
    }

    /// The same without what is not among these.
    pub(crate) fn only(mut self, steps: &Steps) -> Self {
        self.events.retain_mut(|event| event.keep(steps));
        self
    }

    /// The same with faults of these kinds alone.
    pub(crate) fn faults(mut self, kinds: &[Fault]) -> Self {
        self.events.retain(|event| event.what.fault().is_none_or(|fault| kinds.contains(&fault)));
        self
    }
}

/// Steps as they are written on the command line: `0-3,7`.
pub(crate) fn to_text(steps: &Steps) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for &step in steps {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == step => *last = step,
            _ => ranges.push((step, step)),
        }
    }
    let range = |(first, last): (u32, u32)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    ranges.into_iter().map(range).collect::<Vec<_>>().join(",")
}

pub(crate) fn from_text(text: &str) -> Result<Steps, String> {
    let number = |text: &str| text.parse::<u32>().map_err(|error| format!("{text:?}: {error}"));
    let mut steps = Steps::new();
    for range in text.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        steps.extend(number(first)?..=number(last)?);
    }
    Ok(steps)
}

impl Event {
    pub(crate) fn steps(&self) -> Vec<u32> {
        match &self.what {
            What::Client(client) => client.calls.iter().map(|call| self.first_step + call).collect(),
            _ => vec![self.first_step],
        }
    }

    fn keep(&mut self, steps: &Steps) -> bool {
        let first = self.first_step;
        match &mut self.what {
            What::Client(client) => {
                client.calls.retain(|call| steps.contains(&(first + call)));
                !client.calls.is_empty()
            }
            _ => steps.contains(&first),
        }
    }
}

impl Planner {
    fn round(&mut self) {
        self.wait_up_to(800);
        self.break_network();
        self.wait_up_to(700);
        if self.chance.below(2) == 0 {
            self.break_client();
        }
        if self.chance.below(3) == 0 {
            self.pause();
        }
        if self.chance.below(12) == 0 {
            let (host, lasts) = (self.any(), Duration::from_millis(200 + self.chance.below(5000)));
            let machine = TWINS_FROM + self.steps as usize % (CLIENTS_FROM - TWINS_FROM);
            self.add(What::Twin { host, machine, lasts });
        }
        self.wait_up_to(800);
        self.crash_some();
    }

    /// Fewer than half of the hosts, at least one.
    fn crash_some(&mut self) {
        let crashes = 1 + self.chance.below(self.size.crashes);
        let crashed: BTreeSet<usize> = (0..crashes).map(|_| self.any()).collect();
        let mut downs = Vec::new();
        for host in crashed {
            downs.push((host, self.now));
            self.wait_up_to(300);
        }
        if self.chance.below(2) == 0 {
            self.add(What::Mend);
        }
        for (host, down) in downs {
            self.wait_up_to(4000);
            let how = match self.chance.below(4) {
                0 => How::DiskLost,
                1 => How::PowerCut,
                _ => How::Killed,
            };
            self.add_at(down, What::Crash { host, how, away: self.now - down });
            self.send_clients(host);
        }
    }

    fn break_network(&mut self) {
        let hosts = self.plan.hosts;
        let (one, other) = (self.any(), self.any());
        let other = if one == other { (one + 1) % hosts } else { other };
        match self.chance.below(4) {
            0 => self.add(What::Cut { from: one, to: other }),
            // From some of the others, of two hosts from the other.
            1 => {
                for other in (0..hosts).filter(|&host| host != one) {
                    if hosts == 2 || self.chance.below(2) == 0 {
                        self.add(What::Cut { from: one, to: other });
                        self.add(What::Cut { from: other, to: one });
                    }
                }
            }
            2 => (0..=self.chance.below(6)).for_each(|_| {
                self.add(What::Reset);
                self.wait_up_to(60);
            }),
            _ => {}
        }
    }

    /// A client is gone in the middle of whatever it does, or is not heard any more, or does not hear.
    fn break_client(&mut self) {
        let at = self.chance.below(self.clients.len().max(1) as u64) as usize;
        let Some(&(machine, host)) = self.clients.get(at) else { return };
        match self.chance.below(4) {
            0 => self.add(What::Cut { from: machine, to: host }),
            1 => self.add(What::Cut { from: host, to: machine }),
            _ => {
                self.clients.swap_remove(at);
                self.add(What::Gone { machine });
            }
        }
    }

    /// Some are shorter than anybody notices, some outlast every patience.
    fn pause(&mut self) {
        let ms = match self.chance.below(12) {
            0 => 20_000 + self.chance.below(160_000),
            1..6 => 10 + self.chance.below(600),
            _ => 600 + self.chance.below(6000),
        };
        let at = self.chance.below(self.clients.len().max(1) as u64) as usize;
        let client = self.clients.get(at).map(|(machine, _)| *machine);
        let host = self.any();
        let machine = if self.chance.below(4) == 0 { client.unwrap_or(host) } else { host };
        self.add(What::Pause { machine, lasts: Duration::from_millis(ms) });
    }

    /// Some time, in half of all runs. With numbers of its own: all else is as it is without.
    fn fail_disks(&mut self, mut chance: Chance) {
        let mut one_in = || if chance.below(3) > 0 { 1 + chance.below(6) } else { 0 };
        let (reads, writes) = (one_in(), one_in());
        if chance.below(2) == 0 || reads + writes == 0 {
            return;
        }
        let mut up_to = |limit: Duration| Duration::from_micros(chance.below(limit.as_micros() as u64));
        let at = up_to(self.now / 2);
        let lasts = up_to(self.now);
        let mut one_in = |most| if chance.below(3) == 0 { 1 + chance.below(most) } else { 0 };
        let failing = Failing { reads, writes, syncs: one_in(20), bits: one_in(100) };
        self.add_at(at, What::DisksFail { failing, lasts });
    }

    /// In half of the runs with disks: at the end a host is alone. Its clients put and remove what nobody else hears of, and then
    /// it starts again.
    fn leave_alone(&mut self, mut chance: Chance) {
        if chance.below(2) == 0 {
            return;
        }
        let alone = self.cut_off(&mut chance);
        self.send_clients(alone);
        self.wait_up_to(3000);
        let how = if chance.below(2) == 0 { How::PowerCut } else { How::Killed };
        self.add(What::Crash { host: alone, how, away: Duration::from_millis(chance.below(1000)) });
    }

    /// In a third of all runs: clients of another put and remove what a host that is alone does not hear of. When it is not alone any
    /// more its clock is set, as that of a machine is that hears again what time it is.
    fn set_clock_of_one_alone(&mut self, mut chance: Chance) {
        if chance.below(3) > 0 {
            return;
        }
        let alone = self.cut_off(&mut chance);
        self.send_clients((alone + 1) % self.plan.hosts);
        self.wait_up_to(3000);
        let ahead = Duration::from_secs(chance.below(world::CLOCKS_DIFFER_S));
        self.add(What::SetClock { machine: alone, ahead });
        self.add(What::Mend);
    }

    /// Cuts a host off from all others, until it takes them for lost, which a removal does not wait for.
    fn cut_off(&mut self, chance: &mut Chance) -> usize {
        let alone = chance.below(self.plan.hosts as u64) as usize;
        for other in (0..self.plan.hosts).filter(|&host| host != alone) {
            self.add(What::Cut { from: alone, to: other });
            self.add(What::Cut { from: other, to: alone });
        }
        self.now += LOST;
        self.wait_up_to(1000);
        alone
    }

    /// In a third of all runs: back or on, within what hosts put up with.
    fn set_clocks(&mut self, mut chance: Chance) {
        if chance.below(3) > 0 {
            return;
        }
        for _ in 0..=chance.below(self.plan.hosts as u64) {
            let at = Duration::from_micros(chance.below(self.now.as_micros() as u64));
            let ahead = Duration::from_secs(chance.below(world::CLOCKS_DIFFER_S));
            let machine = chance.below(self.plan.hosts as u64) as usize;
            self.add_at(at, What::SetClock { machine, ahead });
        }
    }

    /// Some hand-overs and pushes, at any time.
    fn hand_over(&mut self, mut chance: Chance) {
        let hosts = self.plan.hosts as u64;
        let most = 8 + 8 * self.size.rounds as u64;
        let (hand_overs, pushes) = (chance.below(most), chance.below(most));
        for number in 0..(hand_overs + pushes) as u32 {
            let at = Duration::from_micros(chance.below(self.now.as_micros() as u64));
            let from = chance.below(hosts);
            let to = ((from + 1 + chance.below(hosts - 1)) % hosts) as usize;
            let (from, seed) = (from as usize, chance.below(u64::MAX));
            if u64::from(number) < hand_overs {
                let (machine, block) = (self.next_client, self.blocks + number);
                self.next_client += 2;
                self.add_at(at, What::HandOver(HandOverPlan { machine, from, to, block, seed }));
            } else {
                self.add_at(at, What::Push { from, to, seed });
            }
        }
        self.blocks += NAMES;
    }

    fn lend(&mut self, mut chance: Chance) {
        for _ in 0..chance.below(2 + 2 * self.size.rounds as u64) {
            let at = Duration::from_micros(chance.below(self.now.as_micros() as u64));
            let host = chance.below(self.plan.hosts as u64) as usize;
            let machine = self.next_client;
            self.next_client += 1;
            self.add_at(at, What::Lend { machine, host, seed: chance.below(u64::MAX) });
        }
    }

    fn send_clients(&mut self, host: usize) {
        for _ in 0..self.size.clients {
            let of = self.size.calls;
            let client = ClientPlan {
                machine: self.next_client,
                host,
                seed: self.chance.below(u64::MAX),
                first_block: self.blocks,
                calls: (0..of).collect(),
                of,
            };
            self.next_client += 1;
            self.blocks += NAMES;
            self.clients.push((client.machine, host));
            self.add(What::Client(client));
        }
    }

    fn any(&mut self) -> usize {
        self.chance.below(self.plan.hosts as u64) as usize
    }

    fn wait_up_to(&mut self, ms: u64) {
        self.now += Duration::from_micros(self.chance.below(ms * 1000));
    }

    fn add(&mut self, what: What) {
        self.add_at(self.now, what);
    }

    fn add_at(&mut self, at: Duration, what: What) {
        let turns = self.chance.below(200);
        let steps = if let What::Client(client) = &what { client.of } else { 1 };
        self.plan.events.push(Event { at, turns, what, first_step: self.steps });
        self.steps += steps;
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>8.3} s  ", self.at.as_secs_f64())?;
        let name = world::name;
        match &self.what {
            What::Client(client) => {
                let calls: Vec<String> = client.calls.iter().map(|call| client.says(*call)).collect();
                write!(f, "{} begins, at {}: {}", name(client.machine), name(client.host), calls.join(", "))
            }
            What::HandOver(HandOverPlan { from, to, block, .. }) => {
                let (from, to) = (name(*from), name(*to));
                write!(f, "block {block}, or one that is known, is handed over from {from} to {to}")
            }
            What::Push { from, to, .. } => {
                write!(f, "{} pushes blocks to {}", name(*from), name(*to))
            }
            What::Lend { machine, host, .. } => {
                write!(f, "{} reads blocks of {} where they lie", name(*machine), name(*host))
            }
            What::Cut { from, to } => {
                write!(f, "nothing gets from {} to {} any more", name(*from), name(*to))
            }
            What::Mend => write!(f, "the network is whole again"),
            What::Reset => write!(f, "a connection breaks"),
            What::Gone { machine } => write!(f, "{} is gone, in the middle of what it does", name(*machine)),
            What::Crash { host, how, away } => {
                let how = match how {
                    How::Killed => "is killed",
                    How::PowerCut => "loses power",
                    How::DiskLost => "is killed, and its disk is lost",
                };
                write!(f, "{} {how}; it starts again {:.3} s later", name(*host), away.as_secs_f64())
            }
            What::Twin { host, machine, lasts } => {
                let (twin, host, lasts) = (name(*machine), name(*host), lasts.as_secs_f64());
                write!(f, "{twin} joins, which is called {host} as well, for {lasts:.3} s")
            }
            What::DisksFail { failing: Failing { reads, writes, syncs, bits }, lasts } => {
                write!(
                    f,
                    "of all disks one in {reads} reads, {writes} writes and {syncs} syncs fails, and one in {bits} reads finds a \
                     bit flipped (0 = none), for {:.3} s",
                    lasts.as_secs_f64()
                )
            }
            What::Pause { machine, lasts } => {
                write!(f, "{} stands still for {:.3} s", name(*machine), lasts.as_secs_f64())
            }
            What::SetClock { machine, ahead } => {
                write!(f, "the clock of {} is set, to {} s ahead", name(*machine), ahead.as_secs())
            }
        }
    }
}
