//! Affinity, a filter for chains: a request stays where its KV is, unless the queue there is long.
//!
//! Of the prefill instances those stay that store at least `share` of the longest stored prefix, and whose queue is at most `patience-ms`
//! longer than the shortest; with them goes a session, as its past is stored where it was served. Of the decode instances
//! those stay that store as much of the longest prefix among them; else, so that nothing crosses the network, those on a machine whose
//! prefill instance stays. Where nothing is stored, or nobody would be left, all stay. Alone, without a picker behind it, it
//! takes the least busy of those.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::scheduler::{Candidates, Cluster, Decision, Reason, Request};
use kvasir_policy::{Description, Scheduler, Settings};

/// See the module documentation.
pub struct Affinity {
    share: f32,
    patience_ms: f32,
}

impl Default for Affinity {
    fn default() -> Self {
        Self { share: 0.8, patience_ms: 1_000.0 }
    }
}

/// Who stays, by slot.
struct Staying {
    prefill: Vec<bool>,
    decode: Vec<bool>,
}

impl Scheduler for Affinity {
    fn describe(&self) -> Description {
        let Self { share, patience_ms } = Self::default();
        Description::scheduler("affinity", env!("CARGO_PKG_VERSION"))
            .setting("share", share, "of the longest stored prefix that is enough to stay")
            .setting("patience-ms", patience_ms, "how much longer than the shortest a queue may be")
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.share = settings.number("share", 0.0..=1.0)? as f32;
        self.patience_ms = settings.number("patience-ms", 0.0..=1e9)? as f32;
        Ok(())
    }

    fn schedule(&mut self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Decision {
        let Staying { prefill, decode } = self.staying(cluster, request, candidates);
        let least_busy = |stays: &[bool], busy: &[f32]| {
            let left = (0..stays.len()).filter(|&slot| stays[slot]);
            left.min_by(|&a, &b| busy[a].total_cmp(&busy[b])).map(|slot| slot as u32)
        };
        let Some(prefill) = least_busy(&prefill, &cluster.prefill.busy_until) else {
            return Decision::reject(Reason::NoInstance, 1_000);
        };
        let Some(decode) = least_busy(&decode, &cluster.decode.sequences) else {
            return cluster.no_decode(candidates);
        };
        Decision::run(prefill, decode)
    }

    /// 0 for who stays, +infinity for others.
    fn explain(&self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Vec<f32> {
        let Staying { prefill, decode } = self.staying(cluster, request, candidates);
        prefill.into_iter().chain(decode).map(|stays| if stays { 0.0 } else { f32::INFINITY }).collect()
    }
}

impl Affinity {
    fn staying(&self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Staying {
        let (p, d) = (&cluster.prefill, &cluster.decode);
        let can_prefill = |slot: usize| p.available[slot] == 1.0 && candidates.can_prefill(slot);
        let can_decode = |slot: usize| cluster.has_room(slot, request) && candidates.can_decode(slot);
        let shortest =
            (0..p.len()).filter(|&slot| can_prefill(slot)).map(|slot| p.busy_until[slot].max(cluster.now));
        let latest = shortest.fold(f32::INFINITY, f32::min) + self.patience_ms;
        let holds = self.longest(p.len(), can_prefill, |slot| candidates.prefix_of(slot));
        let near =
            holds.map(|holds| (0..p.len()).map(|slot| holds(slot) && p.busy_until[slot] <= latest).collect());
        let near: Option<Vec<bool>> = near.filter(|near: &Vec<bool>| near.contains(&true));
        let at_decode = self.longest(d.len(), can_decode, |slot| candidates.prefix_of_decode(slot));
        let decode: Vec<bool> = match (at_decode, &near) {
            (Some(holds), _) => (0..d.len()).map(holds).collect(),
            (None, Some(near)) => {
                let beside = |host| (0..p.len()).any(|slot| near[slot] && p.host_of(slot) == Some(host));
                (0..d.len()).map(|slot| can_decode(slot) && d.host_of(slot).is_some_and(beside)).collect()
            }
            (None, None) => Vec::new(),
        };
        let all_decode = || (0..d.len()).map(can_decode).collect();
        Staying {
            prefill: near.unwrap_or_else(|| (0..p.len()).map(can_prefill).collect()),
            decode: if decode.contains(&true) { decode } else { all_decode() },
        }
    }

    /// Whether a slot can be chosen and stores enough of the longest prefix. `None` if nothing is stored.
    fn longest<'a>(
        &self,
        slots: usize,
        can: impl Fn(usize) -> bool + 'a,
        prefix: impl Fn(usize) -> u32 + 'a,
    ) -> Option<impl Fn(usize) -> bool + 'a> {
        let longest = (0..slots).filter(|&slot| can(slot)).map(&prefix).max().filter(|&blocks| blocks > 0)?;
        let enough = self.share * longest as f32;
        Some(move |slot| can(slot) && prefix(slot) as f32 >= enough)
    }
}

kvasir_policy::export_scheduler!(Affinity);

#[cfg(test)]
mod tests;
