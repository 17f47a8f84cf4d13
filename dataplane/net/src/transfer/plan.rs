//! What goes next, over which rail, and how much of it at once. No I/O, no clock: time is an argument.
//!
//! Work waits in three classes. Decode-critical work goes first, always; prefill and replication share the rest by
//! weight (deficit round robin over bytes). A rail takes new slices only while less than a window waits on it, so the
//! choice of rail is made late, when it is known which one drained; lower classes may fill only part of that window,
//! so that something urgent never waits behind a full one. While a rail carries urgent work, and a little longer, lower
//! classes keep no more on it than it moves in [`PlanConfig::calm_time_us`]: the next urgent slice waits no longer.
//!
//! A piece's [`Order`] says which rails may carry it. Of those with room, a slice goes to the one that would finish it
//! first: `(queued + slice) / rate`. Rates are measured (bytes delivered between issue and completion), so a slow rail
//! gets less without being told. Slices are what a rail moves in [`PlanConfig::slice_time_us`], within bounds: long
//! enough that their cost vanishes, short enough that rails end together. Small pieces of one transfer travel together.

use std::collections::VecDeque;

use super::order::Order;

/// What work is for, most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(u8)]
pub enum Class {
    /// A decode step waits for it, so it goes before everything else.
    DecodeCritical = 0,
    /// A prefill waits for it, or produces it.
    #[default]
    Prefill = 1,
    /// Nobody waits: copies for safety and spread.
    Replication = 2,
}

/// The number of classes.
pub const CLASSES: usize = 3;

/// Settings of the planner. Sizes in bytes.
#[derive(Clone, Debug)]
pub struct PlanConfig {
    /// Slices are at least this long (the last of an entry may be shorter). Default 128 KiB.
    pub slice_min: u64,
    /// Slices are at most this long. Default 4 MiB.
    pub slice_max: u64,
    /// How long a slice should take its rail. Default 1,000 µs.
    pub slice_time_us: u64,
    /// At least this much may wait on a rail. Default 8 MiB.
    pub window_min: u64,
    /// The share of a window that classes other than decode-critical may fill, in 1/256. Default 192 (three quarters).
    pub window_share: u64,
    /// For this long after decode-critical work was on a rail, it is kept calm for more of it. Default
    /// 20,000 µs: about the time between two steps of a decode.
    pub calm_us: u64,
    /// What other classes may have on a calm rail: what it moves in this time, but at least half of
    /// `slice_min`. Default 25 µs.
    pub calm_time_us: u64,
    /// The weights of prefill and replication. Default 3 to 1.
    pub weights: [u64; 2],
    /// Pieces up to this length travel together. Default 16 KiB.
    pub small_max: u64,
    /// How many bytes such pieces have together at most. Default 256 KiB.
    pub merged_max: u64,
    /// How many ranges they have together at most. Default 256.
    pub ranges_max: u32,
    /// The rate assumed for a rail that was not measured yet, in bytes per second. Default 1 GB/s.
    pub rate_guess: u64,
}

impl Default for PlanConfig {
    fn default() -> Self {
        Self {
            slice_min: 128 << 10,
            slice_max: 4 << 20,
            slice_time_us: 1000,
            window_min: 8 << 20,
            window_share: 192,
            calm_us: 20_000,
            calm_time_us: 25,
            weights: [3, 1],
            small_max: 16 << 10,
            merged_max: 256 << 10,
            ranges_max: 256,
            rate_guess: 1_000_000_000,
        }
    }
}

/// A rail to one peer, as the planner sees it.
#[derive(Clone, Debug)]
pub struct Rail {
    pub usable: bool,
    /// Bytes issued and not completed.
    pub queued_bytes: u64,
    /// Measured bytes per second, smoothed.
    pub rate: u64,
    /// Bytes completed since the start.
    pub delivered_bytes: u64,
    pub slices: u64,
    pub failures: u64,
    /// Measurements that `rate` is made of, 8 at most.
    samples: u64,
    /// Decode-critical slices on it, and when there was one last.
    urgent: u64,
    urgent_at_ns: u64,
}

/// When a slice was issued: what its completion needs to measure the rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Issued {
    class: Class,
    at_ns: u64,
    delivered_bytes: u64,
}

impl Rail {
    pub fn new(config: &PlanConfig) -> Self {
        let rate = config.rate_guess.max(1);
        Self {
            usable: true,
            queued_bytes: 0,
            rate,
            delivered_bytes: 0,
            slices: 0,
            failures: 0,
            samples: 0,
            urgent: 0,
            urgent_at_ns: 0,
        }
    }

    // Inlined, as all of planning that is not generic: the schedule is generic, and so compiled where it is used.
    #[inline]
    pub fn issue(&mut self, class: Class, len: u64, now_ns: u64) -> Issued {
        self.queued_bytes += len;
        self.slices += 1;
        self.urgent += u64::from(class == Class::DecodeCritical);
        Issued { class, at_ns: now_ns, delivered_bytes: self.delivered_bytes }
    }

    /// Takes `len` bytes off the queue. `delivered` of them arrived.
    #[inline]
    pub fn complete(&mut self, issued: Issued, len: u64, delivered: u64, now_ns: u64) {
        /// Shorter slices say more about latency than about bandwidth.
        const TELLING: u64 = 64 << 10;
        self.queued_bytes = self.queued_bytes.saturating_sub(len);
        self.delivered_bytes += delivered;
        self.failures += u64::from(delivered < len);
        if issued.class == Class::DecodeCritical {
            self.urgent -= 1;
            self.urgent_at_ns = now_ns;
        }
        let elapsed = now_ns.saturating_sub(issued.at_ns).max(1);
        if delivered < TELLING {
            return;
        }
        // What the rail delivered in that time, this slice and those before it.
        let moved = u128::from(self.delivered_bytes - issued.delivered_bytes);
        let sample = u64::try_from(moved * 1_000_000_000 / u128::from(elapsed)).unwrap_or(u64::MAX);
        // The guess counts for nothing once there is a measurement, and the first few count alike.
        self.samples = (self.samples + 1).min(8);
        self.rate =
            (self.rate / self.samples * (self.samples - 1)).saturating_add(sample / self.samples).max(1);
    }

    /// How long a slice should be on this rail.
    #[inline]
    pub fn slice_bytes(&self, config: &PlanConfig) -> u64 {
        const STEP: u64 = 64 << 10;
        let wanted = self.bytes_in(config.slice_time_us);
        (wanted / STEP * STEP).clamp(config.slice_min, config.slice_max)
    }

    /// The longest slice of a class, and the queue length below which the rail takes one.
    #[inline]
    fn limits(&self, config: &PlanConfig, class: Class, now_ns: u64) -> (u64, u64) {
        let slice = self.slice_bytes(config);
        let window = config.window_min.max(slice * 4);
        if class == Class::DecodeCritical {
            return (slice, window);
        }
        let lower = window / 256 * config.window_share;
        if self.calm(config, now_ns) {
            let calm = self.bytes_in(config.calm_time_us).max(config.slice_min / 2);
            return (slice.min(calm), lower.min(calm));
        }
        (slice, lower)
    }

    /// Whether urgent work is on it, or was until just now.
    #[inline]
    fn calm(&self, config: &PlanConfig, now_ns: u64) -> bool {
        let ever = self.urgent_at_ns > 0;
        self.urgent > 0 || ever && now_ns < self.urgent_at_ns.saturating_add(config.calm_us * 1000)
    }

    #[inline]
    fn bytes_in(&self, time_us: u64) -> u64 {
        self.rate.saturating_mul(time_us) / 1_000_000
    }

    /// When it would be done with `len` more bytes, in ns.
    fn finish_ns(&self, len: u64) -> u64 {
        // Saturates: beyond 18 GB on a rail all rails look equally late.
        (self.queued_bytes + len).saturating_mul(1_000_000_000) / self.rate
    }
}

/// A piece of a transfer that waits. `token` is the caller's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work<T> {
    pub token: T,
    pub offset: u64,
    pub len: u64,
    /// Ranges of memory it consists of, the larger of both sides.
    pub ranges: u32,
    /// Pieces with equal keys may travel together: the caller's numbers for their transfer, and for where it goes.
    pub merge_key: (u64, u64),
    /// Rails on which it failed, one bit each.
    pub avoid: u64,
    pub order: Order,
}

/// Pieces that go over one rail together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice<T> {
    pub class: Class,
    pub rail: usize,
    pub len: u64,
    pub pieces: Vec<Work<T>>,
}

/// Why nothing goes now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Idle {
    /// Nothing waits.
    Empty,
    /// Something waits for room on a rail or in its class's budget: ask again after a completion.
    Full,
    /// No rail is usable: what waits cannot go.
    NoRail,
}

/// What waits for one peer.
#[derive(Debug)]
pub struct Schedule<T> {
    queues: [VecDeque<Work<T>>; CLASSES],
    /// Bytes that prefill and replication may send before the other's turn.
    deficits: [u64; 2],
    turn: usize,
}

impl<T> Default for Schedule<T> {
    fn default() -> Self {
        Self { queues: std::array::from_fn(|_| VecDeque::new()), deficits: [0; 2], turn: 0 }
    }
}

impl<T: Clone> Schedule<T> {
    pub fn push(&mut self, class: Class, work: Work<T>) {
        self.queues[class as usize].push_back(work);
    }

    /// For work that failed on one rail and goes before what has not been tried.
    pub fn push_front(&mut self, class: Class, work: Work<T>) {
        self.queues[class as usize].push_front(work);
    }

    pub fn is_empty(&self) -> bool {
        self.queues.iter().all(VecDeque::is_empty)
    }

    /// Removes the work for which `wanted` is true and returns it.
    pub fn extract(&mut self, mut wanted: impl FnMut(&Work<T>) -> bool) -> Vec<Work<T>> {
        let mut taken = Vec::new();
        for queue in &mut self.queues {
            queue.retain(|work| {
                let take = wanted(work);
                if take {
                    taken.push(work.clone());
                }
                !take
            });
        }
        taken
    }

    /// The next slice, at a time in ns. `room` gives the bytes that each class's budget (at least `slice_min`) still
    /// allows; pieces that travel together may exceed it by `merged_max`.
    pub fn next(
        &mut self,
        rails: &[Rail],
        config: &PlanConfig,
        room: [u64; CLASSES],
        now_ns: u64,
    ) -> Result<Slice<T>, Idle> {
        if self.is_empty() {
            return Err(Idle::Empty);
        }
        if !rails.iter().any(|rail| rail.usable) {
            return Err(Idle::NoRail);
        }
        if let Some(slice) = self.take(Class::DecodeCritical, rails, config, room, now_ns) {
            return Ok(slice);
        }
        self.take_by_weight(rails, config, room, now_ns).ok_or(Idle::Full)
    }

    fn take_by_weight(
        &mut self,
        rails: &[Rail],
        config: &PlanConfig,
        room: [u64; CLASSES],
        now_ns: u64,
    ) -> Option<Slice<T>> {
        const SHARED: [Class; 2] = [Class::Prefill, Class::Replication];
        // One visit to each, then one more to the first, whose deficit was topped up.
        for _ in 0..3 {
            let class = SHARED[self.turn];
            if self.deficits[self.turn] > 0
                && let Some(slice) = self.take(class, rails, config, room, now_ns)
            {
                self.deficits[self.turn] = self.deficits[self.turn].saturating_sub(slice.len);
                return Some(slice);
            }
            // A class that sends nothing does not save up its share.
            self.deficits[self.turn] = 0;
            self.turn = 1 - self.turn;
            self.deficits[self.turn] = config.weights[self.turn].max(1) * config.slice_max;
        }
        None
    }

    fn take(
        &mut self,
        class: Class,
        rails: &[Rail],
        config: &PlanConfig,
        room: [u64; CLASSES],
        now_ns: u64,
    ) -> Option<Slice<T>> {
        let queue = &mut self.queues[class as usize];
        let first = queue.front()?;
        let rail = choose(rails, config, class, first, now_ns)?;
        let len = cut(first.len, rails[rail].limits(config, class, now_ns).0);
        // Budgets are at least `slice_min`, so what has to wait here can go after a completion.
        let free = room[class as usize];
        if free == 0 || (free < len && free < config.slice_min) {
            return None;
        }
        let len = len.min(free);
        let mut slice = Slice { class, rail, len, pieces: Vec::with_capacity(1) };
        slice.pieces.push(split_front(queue, len)?);
        merge(queue, &mut slice, config);
        Some(slice)
    }
}

/// Chooses among the rails with room in the first set that works: the one that would finish a slice of this work first. A rail on
/// which the work failed is taken only if it failed on all.
fn choose<T>(
    rails: &[Rail],
    config: &PlanConfig,
    class: Class,
    work: &Work<T>,
    now_ns: u64,
) -> Option<usize> {
    let fresh =
        |n: usize| rails[n].usable && work.avoid.checked_shr(n as u32).is_none_or(|bits| bits & 1 == 0);
    let any_fresh = (0..rails.len()).any(fresh);
    let candidate = |n: usize| if any_fresh { fresh(n) } else { rails[n].usable };
    let first = work.order.first(rails.len(), candidate);
    (0..rails.len())
        .filter(|&n| first(n))
        .filter(|&n| rails[n].queued_bytes < rails[n].limits(config, class, now_ns).1)
        .min_by_key(|&n| rails[n].finish_ns(work.len.min(rails[n].slice_bytes(config))))
}

/// How much of `len` to take at once: a slice, or everything if little would be left.
fn cut(len: u64, slice: u64) -> u64 {
    if len <= slice.saturating_add(slice / 2) { len } else { slice }
}

fn split_front<T: Clone>(queue: &mut VecDeque<Work<T>>, len: u64) -> Option<Work<T>> {
    let front = queue.front_mut()?;
    if len >= front.len {
        return queue.pop_front();
    }
    let piece = Work { len, ..front.clone() };
    front.offset += len;
    front.len -= len;
    Some(piece)
}

fn merge<T>(queue: &mut VecDeque<Work<T>>, slice: &mut Slice<T>, config: &PlanConfig) {
    let (key, avoid, order, mut ranges) = match slice.pieces.first() {
        Some(first) if first.len <= config.small_max => {
            (first.merge_key, first.avoid, first.order, first.ranges)
        }
        _ => return,
    };
    while let Some(next) = queue.front() {
        let fits = next.len <= config.small_max
            && next.merge_key == key
            && next.avoid == avoid
            && next.order == order
            && slice.len + next.len <= config.merged_max
            && ranges + next.ranges <= config.ranges_max;
        if !fits {
            return;
        }
        slice.len += next.len;
        ranges += next.ranges;
        slice.pieces.extend(queue.pop_front());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UNLIMITED: [u64; CLASSES] = [u64::MAX; CLASSES];

    fn work(token: u32, len: u64) -> Work<u32> {
        Work {
            token,
            offset: 0,
            len,
            ranges: 1,
            merge_key: (token.into(), 0),
            avoid: 0,
            order: Order::default(),
        }
    }

    fn rails(rates: &[u64]) -> Vec<Rail> {
        let config = PlanConfig::default();
        rates.iter().map(|&rate| Rail { rate, ..Rail::new(&config) }).collect()
    }

    /// Serves everything in virtual time: each rail works off its queue at its true rate. Bytes per rail, and the end.
    fn simulate(schedule: &mut Schedule<u32>, rails: &mut [Rail], true_rates: &[u64]) -> (Vec<u64>, u64) {
        let config = PlanConfig::default();
        let (mut now, mut moved) = (0u64, vec![0; rails.len()]);
        let mut busy_until = vec![0u64; rails.len()];
        let mut flying: Vec<(u64, usize, u64, Issued)> = Vec::new();
        loop {
            while let Ok(slice) = schedule.next(rails, &config, UNLIMITED, now) {
                let issued = rails[slice.rail].issue(slice.class, slice.len, now);
                let took = slice.len * 1_000_000_000 / true_rates[slice.rail];
                busy_until[slice.rail] = busy_until[slice.rail].max(now) + took;
                flying.push((busy_until[slice.rail], slice.rail, slice.len, issued));
            }
            let Some(first) = (0..flying.len()).min_by_key(|&n| flying[n].0) else { return (moved, now) };
            let (end, rail, len, issued) = flying.swap_remove(first);
            now = end;
            moved[rail] += len;
            rails[rail].complete(issued, len, len, now);
        }
    }

    #[test]
    fn rails_share_by_what_they_can_do() {
        let mut schedule = Schedule::default();
        schedule.push(Class::Prefill, work(0, 4 << 30));
        let true_rates = [8_000_000_000, 1_000_000_000, 4_000_000_000];
        let (moved, end) = simulate(&mut schedule, &mut rails(&[1_000_000_000; 3]), &true_rates);
        assert_eq!(moved.iter().sum::<u64>(), 4 << 30);
        let ideal = (4u64 << 30) * 1_000_000_000 / true_rates.iter().sum::<u64>();
        assert!(end < ideal + ideal / 10, "{end} ns, {ideal} at best");
        for (moved, rate) in moved.iter().zip(true_rates) {
            let fair = (4u64 << 30) / 13 * (rate / 1_000_000_000);
            assert!(moved.abs_diff(fair) < fair / 4, "{moved} B at {rate}, fair is {fair}");
        }
    }

    #[test]
    fn urgent_work_goes_first_and_the_others_by_weight() {
        let mut schedule = Schedule::default();
        let mut rails = rails(&[1_000_000_000]);
        let config = PlanConfig::default();
        for _ in 0..100 {
            schedule.push(Class::Replication, work(2, 4 << 20));
            schedule.push(Class::Prefill, work(1, 4 << 20));
        }
        let mut sent = [0u64; CLASSES];
        for n in 0..400 {
            if n == 200 {
                schedule.push(Class::DecodeCritical, work(0, 100));
            }
            let slice = schedule.next(&rails, &config, UNLIMITED, 0).unwrap();
            assert_eq!(slice.class == Class::DecodeCritical, n == 200);
            sent[slice.class as usize] += slice.len;
        }
        assert!(sent[1] > 2 * sent[2] && sent[1] < 4 * sent[2], "{sent:?}");
        // A window that lower classes filled has room for what is urgent.
        while let Ok(slice) = schedule.next(&rails, &config, UNLIMITED, 0) {
            rails[0].issue(slice.class, slice.len, 0);
        }
        schedule.push(Class::DecodeCritical, work(0, 100));
        assert!(schedule.next(&rails, &config, UNLIMITED, 0).is_ok());
    }

    #[test]
    fn rails_stay_calm_beside_urgent_work() {
        let (mut schedule, mut rails, config) =
            (Schedule::default(), rails(&[1_000_000_000]), PlanConfig::default());
        let waiting = |schedule: &mut Schedule<u32>, rails: &mut [Rail], now| {
            let mut bytes = 0;
            while let Ok(slice) = schedule.next(rails, &config, UNLIMITED, now) {
                rails[0].issue(slice.class, slice.len, now);
                bytes += slice.len;
            }
            bytes
        };
        schedule.push(Class::DecodeCritical, work(0, 1000));
        let slice = schedule.next(&rails, &config, UNLIMITED, 1).unwrap();
        let urgent = rails[0].issue(slice.class, slice.len, 1);
        schedule.push(Class::Replication, work(2, 64 << 20));
        assert!(waiting(&mut schedule, &mut rails, 1) <= config.slice_min * 3 / 2);
        rails[0].complete(urgent, 1000, 1000, 100);
        assert_eq!(waiting(&mut schedule, &mut rails, 100), 0, "more urgent work may come");
        let later = 100 + config.calm_us * 1000;
        assert!(waiting(&mut schedule, &mut rails, later) > 4 * config.slice_min);
    }

    #[test]
    fn budgets_hold_back_their_class_only() {
        let mut schedule = Schedule::default();
        let (rails, config) = (rails(&[1_000_000_000]), PlanConfig::default());
        schedule.push(Class::Replication, work(2, 4 << 20));
        assert_eq!(schedule.next(&rails, &config, [u64::MAX, u64::MAX, 0], 0), Err(Idle::Full));
        schedule.push(Class::Prefill, work(1, 100));
        assert_eq!(schedule.next(&rails, &config, [u64::MAX, u64::MAX, 0], 0).unwrap().class, Class::Prefill);
        let slice = schedule.next(&rails, &config, [0, 0, 200 << 10], 0).unwrap();
        assert_eq!((slice.class, slice.len), (Class::Replication, 200 << 10));
    }

    #[test]
    fn failed_rails_are_avoided_while_there_are_others() {
        let mut schedule = Schedule::default();
        let (mut rails, config) = (rails(&[9_000_000_000, 1_000_000]), PlanConfig::default());
        let check = |schedule: &mut Schedule<u32>, rails: &[Rail], avoid, expected: Result<usize, Idle>| {
            schedule.push(Class::Prefill, Work { avoid, ..work(0, 100) });
            let found = schedule.next(rails, &config, UNLIMITED, 0).map(|slice| slice.rail);
            schedule.extract(|_| true);
            assert_eq!(found, expected);
        };
        check(&mut schedule, &rails, 0, Ok(0));
        check(&mut schedule, &rails, 0b01, Ok(1));
        check(&mut schedule, &rails, 0b11, Ok(0));
        rails[0].usable = false;
        check(&mut schedule, &rails, 0, Ok(1));
        rails[1].usable = false;
        check(&mut schedule, &rails, 0, Err(Idle::NoRail));
        assert_eq!(schedule.next(&rails, &config, UNLIMITED, 0), Err(Idle::Empty));
    }

    #[test]
    fn other_rails_carry_only_what_the_first_cannot() {
        let (mut rails, config) = (rails(&[1_000_000, 9_000_000_000, 9_000_000_000]), PlanConfig::default());
        let order = Order::of_ranks(&[0, 1, 1]);
        let carries = |rails: &[Rail], avoid| {
            let mut schedule = Schedule::default();
            schedule.push(Class::Prefill, Work { order, avoid, ..work(0, 100) });
            schedule.next(rails, &config, UNLIMITED, 0).map(|slice| slice.rail)
        };
        assert_eq!(carries(&rails, 0), Ok(0), "slow as it is");
        rails[0].queued_bytes = 1 << 40;
        assert_eq!(carries(&rails, 0), Err(Idle::Full), "full is not broken");
        assert_eq!(carries(&rails, 0b001), Ok(1), "what failed there goes elsewhere");
        rails[0].usable = false;
        rails[1].queued_bytes = 1 << 20;
        assert_eq!(carries(&rails, 0), Ok(2));
    }

    #[test]
    fn small_pieces_of_one_transfer_travel_together() {
        let mut schedule = Schedule::default();
        let (rails, config) = (rails(&[1_000_000_000]), PlanConfig::default());
        for n in 0..100u32 {
            schedule.push(Class::Prefill, Work { merge_key: (u64::from(n / 50), 0), ..work(n, 4096) });
        }
        let sizes: Vec<usize> = std::iter::from_fn(|| schedule.next(&rails, &config, UNLIMITED, 0).ok())
            .map(|s| s.pieces.len())
            .collect();
        assert_eq!(sizes, [50, 50], "merged up to 256 KiB, and not across transfers");
    }

    proptest! {
        /// Slices partition every entry exactly: no byte twice, none left out, whatever the rails do.
        #[test]
        fn slices_partition_entries(
            entries in prop::collection::vec((0usize..3, 1u64..40_000_000, 1u32..200), 1..20),
            rates in prop::collection::vec(1u64..20_000_000_000, 1..5),
            budget in 131_072u64..10_000_000,
            shuffle: u64,
        ) {
            let config = PlanConfig::default();
            let mut rails = rails(&rates);
            let mut schedule = Schedule::default();
            let classes = [Class::DecodeCritical, Class::Prefill, Class::Replication];
            for (n, &(class, len, ranges)) in entries.iter().enumerate() {
                let merge_key = (len % 2, 0);
                schedule.push(classes[class], Work { ranges, merge_key, ..work(n as u32, len) });
            }
            let mut seen = vec![Vec::new(); entries.len()];
            let mut flying: Vec<(Slice<u32>, Issued)> = Vec::new();
            let mut used = [0u64; CLASSES];
            let mut now = 0;
            while !(schedule.is_empty() && flying.is_empty()) {
                now += 1000;
                match schedule.next(&rails, &config, used.map(|used| budget.saturating_sub(used)), now) {
                    Ok(slice) => {
                        prop_assert_eq!(slice.len, slice.pieces.iter().map(|piece| piece.len).sum::<u64>());
                        prop_assert!(slice.len <= config.slice_max * 3 / 2);
                        used[slice.class as usize] += slice.len;
                        let issued = rails[slice.rail].issue(slice.class, slice.len, now);
                        flying.push((slice, issued));
                    }
                    Err(idle) => {
                        prop_assert!(idle != Idle::NoRail && !flying.is_empty(), "stuck: {idle:?}");
                        let (slice, issued) = flying.swap_remove(shuffle as usize % flying.len());
                        used[slice.class as usize] -= slice.len;
                        rails[slice.rail].complete(issued, slice.len, slice.len, now);
                        for piece in slice.pieces {
                            seen[piece.token as usize].push((piece.offset, piece.len));
                        }
                    }
                }
            }
            for (n, mut pieces) in seen.into_iter().enumerate() {
                pieces.sort();
                let end = pieces.iter().fold(0, |end, &(offset, len)| if offset == end { end + len } else { u64::MAX });
                prop_assert_eq!(end, entries[n].1, "entry {}", n);
            }
            prop_assert!(rails.iter().all(|rail| rail.queued_bytes == 0));
        }
    }
}
