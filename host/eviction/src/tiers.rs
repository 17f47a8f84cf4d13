//! Tiers as the contract of evictors and admitters has them.

use kvasir_policy::evictor::{DROP, TierRow};
use kvasir_store::store::Tier;
use kvasir_store::tiering::{Destination, LevelStats, Tiering};

/// The tier that the policy contract calls `number`.
pub(crate) fn destination(number: u8) -> Destination {
    let known = |tier: &Tier| tier.takes_victims() && number_of(*tier) == u32::from(number);
    match number {
        DROP => Destination::Drop,
        _ => Tier::ALL.into_iter().find(known).map_or(Destination::HostDecides, Destination::Tier),
    }
}

/// The pool and the tiers below that take victims, as an evictor is told of them.
pub(crate) fn rows(tiering: &Tiering) -> Vec<TierRow> {
    let mib = |bytes: u64| bytes as f32 / (1 << 20) as f32;
    let pressure = tiering.dram().pressure();
    let pool = TierRow {
        tier: number_of(Tier::Dram) as u8,
        capacity_mib: mib(pressure.pool_bytes),
        used_mib: mib(pressure.pool_bytes - pressure.free_bytes),
        load_fixed_ms: 0.0,
        load_ms_per_mib: 0.0,
        takes_copies: true,
    };
    let below = |level: &LevelStats| TierRow {
        tier: number_of(level.capabilities.tier) as u8,
        capacity_mib: mib(level.capabilities.capacity_bytes.unwrap_or(0)),
        used_mib: mib(level.store.used_bytes),
        load_fixed_ms: level.load_cost.fixed_ms as f32,
        load_ms_per_mib: level.load_cost.ms_per_mib as f32,
        takes_copies: level.takes_copies,
    };
    let stats = tiering.stats();
    let levels = stats.levels.iter().filter(|level| level.capabilities.tier.takes_victims());
    std::iter::once(pool).chain(levels.map(below)).collect()
}

/// What the contract calls a tier.
pub fn number_of(tier: Tier) -> u32 {
    tier as u32 + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_have_the_numbers_of_the_contract() {
        use Destination::{Drop, HostDecides};
        let given = [0, 1, 2, 3, 4, 5, 14, 15].map(destination);
        let [hbm, dram, nvme, remote] =
            [Tier::Hbm, Tier::Dram, Tier::Nvme, Tier::Remote].map(Destination::Tier);
        assert_eq!(given, [HostDecides, hbm, dram, nvme, remote, HostDecides, HostDecides, Drop]);
    }
}
