//! The suite of all transports, over real verbs.

use std::sync::Arc;
use std::time::Duration;

use kvasir_net::transport::Node;
use kvasir_net::transport::conformance::{self, Pair};
use kvasir_net::transport::node::Secret;
use kvasir_net::transport::rdma::{Rdma, RdmaConfig};

/// An emulated machine may stand still for seconds; a dead peer is known by its stream's end, not by its silence.
const LONG: Duration = Duration::from_secs(60);

fn node(name: &str) -> Arc<Node> {
    Arc::new(Node::new(name, Secret::new(b"secret"), 1))
}

/// A transport on the `n`-th device of `RDMA_DEVICES`, reachable over the host's loopback interface.
fn transport(n: usize, node: &Arc<Node>) -> Arc<Rdma> {
    let names = std::env::var("RDMA_DEVICES").expect("RDMA_DEVICES names two devices");
    let name = names.split_whitespace().nth(n).expect("RDMA_DEVICES names two devices");
    let config = RdmaConfig {
        listen: Some("127.0.0.1:0".parse().unwrap()),
        connect_timeout: LONG,
        handshake_timeout: LONG,
        peer_timeout: LONG,
        ..RdmaConfig::of_device(name)
    };
    Arc::new(Rdma::new(Arc::clone(node), config).unwrap())
}

fn pair() -> Pair {
    let (client_node, server_node) = (node("client"), node("server"));
    let (client, server) = (transport(0, &client_node), transport(1, &server_node));
    let vanishing = Arc::clone(&server);
    Pair { client_node, server_node, client, server, kill: Arc::new(move || vanishing.shut_down()) }
}

#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn keeps_the_rules_of_all_transports() {
    conformance::run(&pair);
}
