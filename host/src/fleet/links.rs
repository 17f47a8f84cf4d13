//! What lies between the domains of the network that instances stand in.

use super::changes::ChangeLog;
use super::cost::{TransferCost, usable};
use hashbrown::HashMap;
use kvasir_policy::scheduler::{LINK_ROW, Link as Row};

/// The most links that a fleet knows.
pub const LINKS_MAX: usize = 1_024;

/// One direction between two domains.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkSpec {
    /// Number of the domain that sends.
    pub from: u32,
    /// Number of the domain that receives.
    pub to: u32,
    /// Added to every transfer, ms.
    pub fixed_ms: f32,
    /// On the receiver's time per block.
    pub factor: f32,
    /// Transfers that run beside each other without slowing one another; 0 = any number.
    pub parallel: u32,
}

/// From one domain to another.
pub(super) type Path = (u32, u32);

/// What one more transfer pays for the way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Toll {
    fixed_ms: f32,
    factor: f32,
}

impl Toll {
    /// The way between domains for which no link is set.
    pub(super) const FREE: Self = Self { fixed_ms: 0.0, factor: 1.0 };

    /// Time of a transfer of `blocks` to a receiver that `active` other transfers are on their way to, ms. `sent`: what a block takes
    /// to leave its sender, ms.
    pub(super) fn transfer_ms(self, cost: &TransferCost, blocks: u32, active: u32, sent: f32) -> f64 {
        if blocks == 0 {
            return 0.0;
        }
        let per_block = (self.factor * cost.congested_ms_per_block(active)).max(sent);
        let fixed = f64::from(self.fixed_ms) + f64::from(cost.fixed_ms);
        fixed + f64::from(per_block) * f64::from(blocks)
    }
}

#[derive(Debug)]
struct Link {
    spec: LinkSpec,
    under_way: u32,
}

impl Link {
    /// Links carry `parallel` transfers at full speed and share it evenly among more.
    fn factor(&self) -> f32 {
        let LinkSpec { factor, parallel, .. } = self.spec;
        if parallel == 0 {
            return factor;
        }
        factor * ((self.under_way + 1) as f32 / parallel as f32).max(1.0)
    }
}

/// All links, and which of them changed.
#[derive(Debug)]
pub(super) struct Links {
    links: Vec<Link>,
    by_path: HashMap<Path, u16>,
    log: ChangeLog,
}

impl Links {
    /// Leaves out links beyond [`LINKS_MAX`], and those whose values are not times. Of two with one path the later counts.
    pub(super) fn new(specs: &[LinkSpec]) -> Self {
        let sensible = |spec: &&LinkSpec| usable(&[spec.fixed_ms, spec.factor]);
        let links: Vec<Link> =
            specs.iter().filter(sensible).take(LINKS_MAX).map(|&spec| Link { spec, under_way: 0 }).collect();
        let by_path = links.iter().zip(0..).map(|(link, at)| ((link.spec.from, link.spec.to), at)).collect();
        Self { links, by_path, log: ChangeLog::new(2 * LINKS_MAX) }
    }

    pub(super) fn toll(&self, path: Path) -> Toll {
        let link = self.by_path.get(&path).map(|&at| &self.links[usize::from(at)]);
        link.map_or(Toll::FREE, |link| Toll { fixed_ms: link.spec.fixed_ms, factor: link.factor() })
    }

    /// One more transfer is on its way.
    pub(super) fn begin(&mut self, path: Path) {
        self.change(path, |under_way| under_way + 1);
    }

    /// A transfer that was begun has ended.
    pub(super) fn end(&mut self, path: Path) {
        self.change(path, |under_way| under_way.saturating_sub(1));
    }

    fn change(&mut self, path: Path, f: impl FnOnce(u32) -> u32) {
        if let Some(&at) = self.by_path.get(&path) {
            let link = &mut self.links[usize::from(at)];
            link.under_way = f(link.under_way);
            self.log.push(at);
        }
    }

    pub(super) fn version(&self) -> u64 {
        self.log.version()
    }

    /// Rows of the links that changed after `version`. Returns `None` if that is not known any more.
    pub(super) fn changed_since(&self, version: u64) -> Option<Vec<f32>> {
        let changed = self.log.since(version)?;
        Some(changed.into_iter().flat_map(|at| row(&self.links[usize::from(at)])).collect())
    }

    pub(super) fn rows(&self) -> Vec<f32> {
        self.links.iter().flat_map(row).collect()
    }
}

fn row(link: &Link) -> [f32; LINK_ROW] {
    let row = Row { fixed: link.spec.fixed_ms, factor: link.factor(), under_way: link.under_way };
    row.encode(link.spec.from, link.spec.to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_slows_down_when_more_share_it_than_fit() {
        let spec = LinkSpec { from: 1, to: 2, fixed_ms: 5.0, factor: 2.0, parallel: 2 };
        let mut links = Links::new(&[spec, LinkSpec { to: 3, parallel: 0, ..spec }]);
        let cost = TransferCost { fixed_ms: 1.0, ms_per_block: 10.0 };
        let ms = |links: &Links, path| links.toll(path).transfer_ms(&cost, 3, 0, 0.0);
        assert_eq!((ms(&links, (2, 1)), ms(&links, (1, 2))), (31.0, 66.0), "a link has a direction");
        let seen = links.version();
        for expected in [66.0, 96.0, 126.0] {
            links.begin((1, 2));
            links.begin((1, 3));
            assert_eq!((ms(&links, (1, 2)), ms(&links, (1, 3))), (expected, 66.0));
        }
        assert_eq!(links.changed_since(seen), Some(links.rows()));
        links.end((1, 2));
        links.begin((7, 8)); // no link
        let row = Row { fixed: 5.0, factor: 3.0, under_way: 2 }.encode(1, 2);
        assert_eq!(links.changed_since(links.version() - 1), Some(row.to_vec()));
    }
}
