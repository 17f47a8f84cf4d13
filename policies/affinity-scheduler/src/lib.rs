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
        let at_prefill: Vec<Option<u32>> =
            (0..p.len()).map(|slot| can_prefill(slot).then(|| candidates.prefix_of(slot))).collect();
        let mut at_decode = vec![None; d.len()];
        cluster
            .decodes(request, candidates)
            .for_each(|slot| at_decode[slot] = Some(candidates.prefix_of_decode(slot)));

        let until = |slot: usize| p.busy_until[slot].max(cluster.now);
        let shortest = (0..p.len()).filter(|&slot| at_prefill[slot].is_some()).map(until);
        let latest = shortest.fold(f32::INFINITY, f32::min) + self.patience_ms;
        let near = self.holders(&at_prefill).map(|mut near| {
            near.iter_mut().enumerate().for_each(|(slot, near)| *near &= until(slot) <= latest);
            near
        });
        let near = near.filter(|near| near.contains(&true));
        let beside = |near: &Vec<bool>| {
            let on_host = |host| (0..p.len()).any(|slot| near[slot] && p.host_of(slot) == Some(host));
            let beside = |slot: usize| at_decode[slot].is_some() && d.host_of(slot).is_some_and(on_host);
            (0..d.len()).map(beside).collect()
        };
        let decode = self.holders(&at_decode).or_else(|| near.as_ref().map(beside));
        let decode = decode.filter(|decode| decode.contains(&true));
        let all = |stored: &[Option<u32>]| stored.iter().map(Option::is_some).collect();
        Staying {
            prefill: near.unwrap_or_else(|| all(&at_prefill)),
            decode: decode.unwrap_or_else(|| all(&at_decode)),
        }
    }

    /// Who stores enough of the longest prefix, of the slots that can be chosen, which are those with a number of blocks. `None` if nothing
    /// is stored.
    fn holders(&self, stored: &[Option<u32>]) -> Option<Vec<bool>> {
        let longest = stored.iter().flatten().copied().max().filter(|&blocks| blocks > 0)?;
        let enough = self.share * longest as f32;
        Some(stored.iter().map(|stored| stored.is_some_and(|blocks| blocks as f32 >= enough)).collect())
    }
}

kvasir_policy::export_scheduler!(Affinity);

#[cfg(test)]
mod tests;
