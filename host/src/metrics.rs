//! `/metrics`: the counts of a host in the Prometheus text format.
//!
//! Parts count for themselves, with plain atomics; their counts are read when the page is. Names end in `_total` for
//! counters, and in a unit where there is one: `_seconds`, `_bytes`, `_ratio`. Buckets of times that are not a block's
//! whole life are those of [`Times`](kvasir_dataplane::times::Times).

mod cluster;
mod control;
mod page;
mod store;

use self::page::Page;
use crate::host::Host;

/// All counts of a host, as text.
pub fn render(host: &Host) -> String {
    let mut page = Page::new(&host.config.node.name);
    store::store(&mut page, host);
    store::tiers(&mut page, host);
    if let Some(cluster) = host.node.cluster() {
        cluster::replicas(&mut page, cluster);
    }
    control::data_server(&mut page, host);
    control::eviction(&mut page, host);
    control::policies(&mut page, host);
    control::trials(&mut page, host);
    control::learning(&mut page, host);
    control::conductor(&mut page, host);
    control::explain(&mut page, host);
    control::traffic(&mut page, host);
    page.text()
}
