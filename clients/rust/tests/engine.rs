//! The example of an engine does what it says, against a real host.

use std::sync::Arc;

use kvasir_client::data::Endpoint;
use kvasir_protocol::clock::Clock;
use kvasir_server::access::OwnUser;
use kvasir_server::node::Node;
use kvasir_server::{Listen, Server, ServerConfig};
use kvasir_store::config::DramConfig;
use kvasir_store::dram::DramStore;

#[expect(dead_code, reason = "its `main` is for `cargo run`")]
#[path = "../examples/engine.rs"]
mod engine;

#[test]
fn the_example_saves_and_loads() {
    let dir = tempfile::tempdir().unwrap();
    let store = DramStore::open(DramConfig { pool_bytes: 8 << 20, ..DramConfig::default() }).unwrap();
    let listen = Listen {
        unix: Some(dir.path().join("data.sock")),
        tcp: Some(([127, 0, 0, 1], 0).into()),
        ..Listen::default()
    };
    let gate = Arc::new(OwnUser { token: Some("only for tests".into()) });
    let node = Node::dram_only(Arc::new(store), Clock::start());
    let server = Server::start(node, &listen, gate, ServerConfig::default()).unwrap();
    engine::run(&Endpoint::Unix(dir.path().join("data.sock")), "").unwrap();
    engine::run(&Endpoint::Tcp(server.tcp_addr().unwrap()), "only for tests").unwrap();
}
