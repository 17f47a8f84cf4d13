//! The network between the instances: transfers on their way, each at its fair share of the links that it crosses.
//!
//! Links are the ports of the instances, one in each direction, and those of their racks. Shares are max-min fair (Bertsekas and
//! Gallager, Data Networks, section 6.5.2): the rates of all grow alike until a link is full; whoever crosses it stays at that,
//! and the others go on.

use super::agenda::Event;

/// What floats may lose: a transfer that lacks so little, as time of a port of its own, has arrived.
const ROUNDING_MS: f64 = 1e-6;

/// Transfers between instances in racks. Capacities and rates are in ports of an instance.
pub(super) struct Network {
    /// The rack of each instance.
    racks: Vec<u32>,
    links: Vec<Link>,
    flows: Vec<Flow>,
    now_ms: f64,
    /// Distinguishes the next arrival that holds from those foreseen before it.
    plan: u64,
    /// Links that anybody crosses: a buffer that is used again.
    crossed: Vec<usize>,
}

struct Link {
    capacity: f64,
    /// While shares are given: what is left of it, and for how many.
    free: f64,
    sharing: u32,
}

struct Flow {
    /// What happens when it has arrived.
    then: Event,
    path: Vec<usize>,
    /// What is left of it, as time of a port of its own.
    left_ms: f64,
    rate: f64,
    /// Its rate is not known yet.
    open: bool,
}

impl Network {
    /// `racks`: that of each instance, from 0. `oversubscription`: the ports of a rack's instances together, in ports of the rack.
    pub(super) fn new(racks: Vec<u32>, oversubscription: f64) -> Self {
        let count = racks.iter().max().map_or(0, |&last| last + 1);
        let of_rack = |rack| racks.iter().filter(|&&of| of == rack).count() as f64 / oversubscription;
        let capacities = racks.iter().map(|_| 1.0).chain((0..count).map(of_rack));
        let link = |capacity| Link { capacity, free: 0.0, sharing: 0 };
        // One in each direction.
        let links = capacities.flat_map(|capacity| [link(capacity), link(capacity)]).collect();
        Self { racks, links, flows: Vec::new(), now_ms: 0.0, plan: 0, crossed: Vec::new() }
    }

    /// What is sent from the one to the other leaves the rack.
    pub(super) fn leaves_rack(&self, from: usize, to: usize) -> bool {
        self.racks[from] != self.racks[to]
    }

    /// Begins a transfer from one instance to another that would take `alone_ms` by itself.
    pub(super) fn begin(&mut self, now_ms: f64, (from, to): (usize, usize), alone_ms: f64, then: Event) {
        self.advance(now_ms);
        let mut path = vec![2 * from, 2 * to + 1];
        if self.leaves_rack(from, to) {
            let rack = |of: usize| self.racks.len() + self.racks[of] as usize;
            path.extend([2 * rack(from), 2 * rack(to) + 1]);
        }
        self.flows.push(Flow { then, path, left_ms: alone_ms, rate: 0.0, open: true });
        self.share();
    }

    /// Takes out what has arrived by now, in the order in which it was sent.
    pub(super) fn arrived(&mut self, now_ms: f64) -> Vec<Event> {
        self.advance(now_ms);
        let arrived = self.flows.extract_if(.., |flow| flow.left_ms <= ROUNDING_MS);
        let then = arrived.map(|flow| flow.then).collect();
        self.share();
        then
    }

    /// When something arrives next, if nothing else is sent before, and the number of that plan.
    pub(super) fn foresee(&mut self) -> Option<(f64, u64)> {
        self.plan += 1;
        let lasts = |flow: &Flow| flow.left_ms.max(0.0) / flow.rate;
        let first_ms = self.flows.iter().map(lasts).min_by(f64::total_cmp)?;
        Some((self.now_ms + first_ms, self.plan))
    }

    /// Whether nothing was sent and nothing has arrived since this plan.
    pub(super) fn holds(&self, plan: u64) -> bool {
        self.plan == plan
    }

    fn advance(&mut self, now_ms: f64) {
        for flow in &mut self.flows {
            flow.left_ms -= flow.rate * (now_ms - self.now_ms);
        }
        self.now_ms = now_ms;
    }

    /// Gives everybody its rate.
    fn share(&mut self) {
        let Self { links, flows, crossed, .. } = self;
        crossed.clear();
        for flow in &mut *flows {
            flow.open = true;
            for &at in &flow.path {
                let link = &mut links[at];
                if link.sharing == 0 {
                    link.free = link.capacity;
                    crossed.push(at);
                }
                link.sharing += 1;
            }
        }
        loop {
            let left = crossed.iter().copied().filter(|&at| links[at].sharing > 0);
            let share = |at: usize| links[at].free / f64::from(links[at].sharing);
            let Some(full) = left.min_by(|&a, &b| share(a).total_cmp(&share(b))) else { return };
            let rate = share(full);
            for flow in flows.iter_mut().filter(|flow| flow.open && flow.path.contains(&full)) {
                (flow.rate, flow.open) = (rate, false);
                for &at in &flow.path {
                    links[at].free -= rate;
                    links[at].sharing -= 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn then(request: u64) -> Event {
        Event::HandedOver { request }
    }

    /// When each transfer arrives, ms. `sent`: when, from, to, and how long it would take alone.
    fn run(mut network: Network, sent: &[(f64, usize, usize, f64)]) -> Vec<f64> {
        let (mut arrivals, mut left) = (vec![f64::NAN; sent.len()], sent.iter().zip(0..).peekable());
        loop {
            let next = network.foresee().map(|(ms, _)| ms);
            let send = left.next_if(|((at_ms, ..), _)| next.is_none_or(|ms| *at_ms < ms));
            match (send, next) {
                (Some((&(at_ms, from, to, alone_ms), n)), _) => {
                    network.begin(at_ms, (from, to), alone_ms, then(n));
                }
                (None, Some(ms)) => {
                    for arrived in network.arrived(ms) {
                        let Event::HandedOver { request } = arrived else { unreachable!() };
                        arrivals[request as usize] = ms;
                    }
                }
                (None, None) => return arrivals,
            }
        }
    }

    #[test]
    fn shares_by_hand() {
        let network = || Network::new(vec![0; 4], 1.0);
        assert_eq!(run(network(), &[(5.0, 0, 1, 10.0)]), [15.0]);
        assert_eq!(run(network(), &[(0.0, 0, 1, 10.0), (0.0, 2, 3, 4.0)]), [10.0, 4.0], "no port in common");
        // Half of what is sent is there when the other comes; both have half of the port until the second is complete.
        assert_eq!(run(network(), &[(0.0, 0, 2, 10.0), (5.0, 1, 2, 2.0)]), [12.0, 9.0], "one receiver");
        assert_eq!(run(network(), &[(0.0, 2, 0, 10.0), (5.0, 2, 1, 2.0)]), [12.0, 9.0], "one sender");
        assert_eq!(run(network(), &[(0.0, 0, 1, 10.0), (0.0, 1, 0, 10.0)]), [10.0, 10.0], "two directions");
        // 0 sends to three, of whom one receives from another instance as well, which has what is left of that port.
        let sent = [(0.0, 0, 1, 10.0), (0.0, 0, 2, 10.0), (0.0, 3, 2, 10.0), (0.0, 0, 3, 10.0)];
        let [a, b, c, d] = run(network(), &sent)[..] else { unreachable!() };
        assert_eq!([a, b, d], [30.0; 3]);
        assert!((c - 15.0).abs() < 1e-9, "{c}");
        assert_eq!(run(network(), &[(1.0, 0, 1, 0.0)]), [1.0], "nothing takes no time");
    }

    #[test]
    fn racks_by_hand() {
        // Two of a rack have four ports, and the rack has half a port.
        let network = || Network::new(vec![0, 0, 1, 1], 4.0);
        assert_eq!(run(network(), &[(0.0, 0, 1, 10.0)]), [10.0], "within a rack");
        assert_eq!(run(network(), &[(0.0, 0, 2, 10.0)]), [20.0], "alone");
        let both = [(0.0, 0, 2, 10.0), (0.0, 1, 3, 10.0), (0.0, 1, 0, 6.0), (0.0, 2, 0, 10.0)];
        // The third has what its sender has left, three quarters of the port; the fourth goes the other way at half a port, of
        // which the receiver has a quarter left until the third is complete.
        assert_eq!(run(network(), &both)[..2], [40.0, 40.0]);
        assert!(network().leaves_rack(1, 2) && !network().leaves_rack(2, 3));
    }

    proptest! {
        /// What max-min fairness is: no link carries more than it can, and everybody crosses a full link on which nobody has more.
        #[test]
        fn shares_are_fair(
            racks in prop::collection::vec(0..4_u32, 2..12),
            pairs in prop::collection::vec((0..12_usize, 0..12_usize), 1..40),
            oversubscription in 1.0..8.0,
        ) {
            let count = racks.len();
            let mut network = Network::new(racks, oversubscription);
            for (from, to) in pairs {
                network.begin(0.0, (from % count, to % count), 1.0, then(0));
            }
            let carried = |at: usize| {
                let there = network.flows.iter().filter(move |flow| flow.path.contains(&at));
                there.map(|flow| flow.rate)
            };
            for (at, link) in network.links.iter().enumerate() {
                prop_assert!(carried(at).sum::<f64>() <= link.capacity + 1e-9);
            }
            for flow in &network.flows {
                let holds_up = |&at: &usize| {
                    let full = carried(at).sum::<f64>() >= network.links[at].capacity - 1e-9;
                    full && carried(at).all(|rate| rate <= flow.rate + 1e-9)
                };
                prop_assert!(flow.rate > 0.0 && flow.path.iter().any(holds_up));
            }
        }

        /// One port at which all arrive is never idle and never does more than it can.
        #[test]
        fn what_is_sent_arrives(sent in prop::collection::vec((0..50_u32, 0..3_usize, 1..100_u32), 1..30)) {
            let mut now_ms = 0.0;
            let sent: Vec<_> = sent.iter().map(|&(gap, from, ms)| {
                now_ms += f64::from(gap);
                (now_ms, from, 3, f64::from(ms))
            }).collect();
            let arrivals = run(Network::new(vec![0; 4], 1.0), &sent);
            let free_ms = sent.iter().fold(0.0_f64, |free_ms, &(at_ms, .., ms)| free_ms.max(at_ms) + ms);
            let last_ms = arrivals.iter().copied().fold(0.0, f64::max);
            prop_assert!((last_ms - free_ms).abs() < 1e-4, "{last_ms} {free_ms}");
            for (&(at_ms, .., ms), &arrived_ms) in sent.iter().zip(&arrivals) {
                prop_assert!(arrived_ms >= at_ms + ms - 1e-4);
            }
        }
    }
}
