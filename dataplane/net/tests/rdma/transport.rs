//! The suite of all transports, over real verbs.

use std::sync::Arc;
use std::time::Duration;

use kvasir_memory::buffer::Buffer;
use kvasir_memory::region::Region;
use kvasir_net::transport::conformance::{self, Pair};
use kvasir_net::transport::node::Secret;
use kvasir_net::transport::rdma::{Rdma, RdmaConfig};
use kvasir_net::transport::tcp::Tls;
use kvasir_net::transport::tcp::authority::Authority;
use kvasir_net::transport::{Access, Endpoint, Error, Node, Transport};

use crate::side::patient;

/// An emulated machine may stand still for seconds; a dead peer is known by its stream's end, not by its silence.
const LONG: Duration = Duration::from_secs(60);

fn node(name: &str) -> Arc<Node> {
    Arc::new(Node::new(name, Secret::new(b"secret"), 1))
}

/// A transport on the `n`-th device of `RDMA_DEVICES`, reachable over the host's loopback interface.
fn transport(n: usize, node: &Arc<Node>) -> Arc<Rdma> {
    transport_with(n, node, None)
}

fn transport_with(n: usize, node: &Arc<Node>, tls: Option<Tls>) -> Arc<Rdma> {
    let names = std::env::var("RDMA_DEVICES").expect("RDMA_DEVICES names two devices");
    let name = names.split_whitespace().nth(n).expect("RDMA_DEVICES names two devices");
    let config = RdmaConfig {
        listen: Some("127.0.0.1:0".parse().unwrap()),
        connect_timeout: LONG,
        handshake_timeout: LONG,
        peer_timeout: LONG,
        queue: patient(),
        tls,
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

/// The key with which a peer's adapter reaches the first region of a segment.
fn key(endpoint: &dyn Endpoint, segment: &str) -> u64 {
    endpoint.open(segment).unwrap().regions[0].key
}

/// Renewing a grant pins nothing again, and no key outlives what it was granted for.
#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn a_renewed_grant_has_the_keys_of_the_one_it_renews_and_no_other_has() {
    let (server_node, lease) = (node("server"), Duration::from_secs(3600));
    let memory = Region::of_buffer(Buffer::zeroed(4096));
    for name in ["kv", "other"] {
        server_node.exports.export(name, vec![memory.clone()], Access::Read, lease).unwrap();
    }
    let server = transport(1, &server_node);
    let connect = |name| {
        let client = transport(0, &node(name));
        let endpoint = client.connect(&server.address().unwrap()).unwrap();
        (client, endpoint)
    };
    let ((_a, one), (_b, two)) = (connect("one"), connect("two"));
    let first = key(&*one, "kv");
    assert_eq!(key(&*one, "kv"), first, "renewed");
    let others = [key(&*one, "other"), key(&*two, "kv")];
    assert!(!others.contains(&first) && others[0] != others[1]);
    server_node.exports.export("kv", vec![memory], Access::Read, lease).unwrap();
    server.revoked();
    assert_ne!(key(&*one, "kv"), first, "the segment was replaced, and its grants with it");
    assert_eq!(key(&*one, "other"), others[0], "which concerns no other");
}

/// It knows the secret, and was removed from the cluster, or is in another.
#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn who_is_no_member_is_turned_away() {
    let of = |name: &str, cluster: &str| {
        let members = ["client", "server"].map(str::to_owned);
        Arc::new(Node::new(name, Secret::new(b"secret"), 1).of_cluster(cluster, members))
    };
    let server = transport(1, &of("server", "one"));
    let open = |node| {
        let client = transport(0, &node);
        client.connect(&server.address().unwrap()).map(|_| ())
    };
    open(of("client", "one")).unwrap();
    assert!(open(of("removed", "one")).is_err());
    let other = open(of("client", "two"));
    assert!(matches!(other, Err(Error::Authentication { .. })), "{other:?}");
    open(of("client", "one")).unwrap();
}

#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn keeps_the_rules_with_tls_on_the_control_stream() {
    let authority = Authority::new();
    let (client_tls, server_tls) = (authority.tls("client"), authority.tls("server"));
    conformance::run(&|| {
        let (client_node, server_node) = (node("client"), node("server"));
        let client = transport_with(0, &client_node, Some(client_tls.clone()));
        let server = transport_with(1, &server_node, Some(server_tls.clone()));
        let vanishing = Arc::clone(&server);
        Pair { client_node, server_node, client, server, kill: Arc::new(move || vanishing.shut_down()) }
    });
}

/// Where there are certificates, the secret does not suffice to pass for another member.
#[test]
#[ignore = "needs an RDMA device; cargo xtask test --rdma boots one"]
fn a_certificate_must_name_its_node() {
    let authority = Authority::new();
    let server = transport_with(1, &node("server"), Some(authority.tls("server")));
    let open = |tls| {
        let client = transport_with(0, &node("client"), tls);
        client.connect(&server.address().unwrap()).map(|_| ())
    };
    open(Some(authority.tls("client"))).unwrap();
    assert!(open(Some(authority.tls("another"))).is_err());
    for (tls, expected) in
        [(Some(Authority::new().tls("client")), "invalid peer certificate"), (None, "that one has TLS")]
    {
        let refused = open(tls).unwrap_err();
        assert!(
            matches!(&refused, Error::Certificate { reason, .. } if reason.contains(expected)),
            "{refused}"
        );
    }
}
