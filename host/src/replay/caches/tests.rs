use super::super::generate::{Generator, Plan, Workload};
use super::super::trace::{BLOCK_SIZE_TOKENS, Request};
use super::*;
use crate::policy::Source;

fn recorded(requests: u64, tenants: u64) -> Recorded {
    let plan = Plan { workload: Workload::Chat, requests, rate_rps: 5.0, seed: 3 };
    let of_tenant = |(n, request): (u64, Request)| Ok(Request { tenant: (n % tenants) as u16, ..request });
    Recorded::read((0..).zip(Generator::new(&plan).unwrap()).map(of_tenant), BLOCK_SIZE_TOKENS).unwrap()
}

fn keepers(names: &[&str]) -> Vec<Keeper> {
    let config = PolicyConfig { evictor_slots: 500, ..PolicyConfig::unhurried() };
    let engine = Engine::new(&config, None).unwrap();
    let keeper = |name: &&str| match *name {
        OPTIMUM => Keeper::optimum(),
        name => Keeper::evictor(&engine, &config, Source::Native(name.into()), Vec::new()).unwrap(),
    };
    names.iter().map(keeper).collect()
}

fn fill(trace: &Recorded, names: &[&str], capacities: &[u32], split: Split) -> Table {
    Table::fill(("t", trace), &keepers(names), &rooms(capacities), split, || ()).unwrap()
}

fn rooms(capacities: &[u32]) -> Vec<Room> {
    capacities.iter().copied().map(Room::Blocks).collect()
}

/// What does not depend on the speed of the machine.
fn timeless(table: Table) -> Vec<Report> {
    table.rows.into_iter().map(|row| Report { evict_ns_mean: 0.0, evict_ns_p99: 0, ..row }).collect()
}

#[test]
fn rows_come_in_order_and_are_those_of_replays_alone() {
    let trace = recorded(400, 1);
    let table = fill(&trace, &["lru", "arc", "fifo"], &[300, 100], Split::default());
    let order: Vec<_> = table.rows.iter().map(|row| (row.capacity_blocks, row.evictor.as_str())).collect();
    let expected = [(300, "lru"), (300, "arc"), (300, "fifo"), (100, "lru"), (100, "arc"), (100, "fifo")];
    assert_eq!(order, expected);
    let together = timeless(table);
    for (row, (blocks, name)) in together.iter().zip(expected) {
        assert_eq!(timeless(fill(&trace, &[name], &[blocks], Split::default())), std::slice::from_ref(row));
        assert_eq!((row.requests, row.trace.as_str(), row.gap_closed_percent), (400, "t", None));
    }
}

#[test]
fn the_optimum_is_above_all_and_ends_the_gap() {
    let trace = recorded(1_000, 1);
    let names: Vec<_> = EVICTORS.iter().map(|policy| policy.name).chain([OPTIMUM]).collect();
    let replays = std::sync::atomic::AtomicUsize::new(0);
    let done = || _ = replays.fetch_add(1, Ordering::Relaxed);
    let keepers = keepers(&names);
    let table = Table::fill(("t", &trace), &keepers, &rooms(&[50, 400]), Split::default(), done).unwrap();
    assert_eq!(replays.into_inner(), Table::replays(&keepers, &rooms(&[50, 400])));
    for rows in table.rows.chunks(names.len()) {
        let gap_of = |name| rows.iter().find(|row| row.evictor == name).unwrap().gap_closed_percent;
        assert_eq!((gap_of("lru"), gap_of(OPTIMUM)), (Some(0.0), Some(100.0)));
        let best = rows.last().unwrap();
        assert!(rows.iter().all(|row| row.prefix_hits <= best.prefix_hits), "{rows:?}");
    }
    let alone = fill(&trace, &["arc", OPTIMUM], &[400], Split::default());
    let arc = |rows: &[Report]| rows.iter().rfind(|row| row.evictor == "arc").unwrap().gap_closed_percent;
    assert_eq!(alone.rows.len(), 2, "{alone:?}");
    assert_eq!(arc(&alone.rows), arc(&table.rows), "lru need not be asked for");
    let all_fits = fill(&trace, &["lru", OPTIMUM], &[100_000], Split::default());
    assert_eq!(all_fits.rows[0].gap_closed_percent, None, "there is no gap");
}

#[test]
fn no_share_is_told_of_a_gap_of_a_few_hits() {
    let told = |best| {
        let mut rows = fill(&recorded(10, 1), &["arc", OPTIMUM, "lru"], &[400], Split::default()).rows;
        for (row, hits) in rows.iter_mut().zip([5_000, best, 5_100]) {
            (row.prefix_hits, row.block_references, row.gap_closed_percent) = (hits, 10_000, None);
        }
        fill_gaps(&mut rows);
        rows[0].gap_closed_percent
    };
    assert_eq!([5_100, 5_109, 5_110].map(told), [None, None, Some(-1_000.0)]);
}

#[test]
fn parts_add_up() {
    let trace = recorded(500, 3);
    let split = Split { warm_up: 100, by_class: true, by_tenant: true };
    for row in fill(&trace, &["lru", OPTIMUM], &[200], split).rows {
        let warm_up = row.warm_up.unwrap();
        assert_eq!((warm_up.requests, row.requests), (100, 400));
        let sum = |parts: Option<std::collections::BTreeMap<u16, crate::replay::tally::Hits>>| {
            parts
                .unwrap()
                .values()
                .map(|hits| (hits.requests, hits.prefix_hits))
                .fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1))
        };
        assert_eq!(row.by_tenant.as_ref().unwrap().len(), 3);
        assert_eq!(sum(row.by_class), (row.requests, row.prefix_hits));
        assert_eq!(sum(row.by_tenant), (row.requests, row.prefix_hits));
        let plain = &fill(&trace, &[&row.evictor], &[200], Split::default()).rows[0];
        assert_eq!(plain.prefix_hits, warm_up.prefix_hits + row.prefix_hits);
        assert_eq!(plain.evictions, row.evictions);
    }
}

#[test]
fn tables_and_values_are_told() {
    let trace = recorded(300, 2);
    let split = Split { warm_up: 50, by_tenant: true, ..Split::default() };
    let mut table = fill(&trace, &["lru", OPTIMUM], &[100], split);
    table.rows[0].fault = Some("a \"trap\", it says".into());
    table.rows[0].fallback_evictions = 2;
    let text = table.text();
    for part in
        ["gap closed %", "   100  lru", "warm-up", "tenant 1", "lru at 100 blocks: 2 by the native fallback"]
    {
        assert!(text.contains(part), "no `{part}` in\n{text}");
    }
    let csv = table.csv();
    let lines: Vec<_> = csv.lines().collect();
    assert_eq!(lines.len(), 1 + 2 * (1 + 1 + 2), "{csv}");
    assert!(lines[1].starts_with("t,lru,native,100,all,250,"), "{csv}");
    assert!(lines[1].ends_with(",2,0,\"a \"\"trap\"\", it says\","), "{csv}");
    assert!(lines[2].starts_with("t,lru,native,100,warm-up,50,"), "{csv}");
    let columns = |line: &str| line.matches(',').count();
    assert!(lines.iter().all(|line| columns(line) == columns(lines[0]) || line.contains("trap")), "{csv}");
    let alone = table.rows[1].text();
    assert!(
        alone.contains("evictor           optimum (native)\n")
            && alone.contains("gap closed        100.0 %\n"),
        "{alone}"
    );
    assert!(!alone.contains("time per eviction"), "{alone}");
    assert_eq!(table.faults().len(), 1);
}

#[test]
fn a_capacity_out_of_range_fails_the_table() {
    let trace = recorded(10, 1);
    for name in ["lru", OPTIMUM] {
        let error = Table::fill(("t", &trace), &keepers(&[name]), &rooms(&[10, 0]), Split::default(), || ());
        assert!(error.unwrap_err().to_string().contains("capacity of 0 blocks"));
    }
}
