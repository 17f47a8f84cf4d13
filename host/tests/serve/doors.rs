//! Both doors of a host, the data protocol and gRPC, give the same answers to the same questions.

use crate::process::{content, runtime};
use kvasir::access::tokens::Tokens;
use kvasir::config::Config;
use kvasir::daemon::{Daemon, Running};
use kvasir_client::control::{Control, ControlAddr};
use kvasir_client::data::{Client, Endpoint, Options};
use kvasir_dataplane::server::access::Role;
use kvasir_dataplane::tier::store::Tier;
use kvasir_dataplane::{BATCH_MAX, BlockKey, BlockMeta};
use kvasir_proto::{self as proto, remove_response::Outcome};
use std::path::Path;

const SIZE: u32 = 10_000;

fn start(dir: &Path) -> Running {
    let set = [
        format!("node.data_dir={}", dir.display()),
        format!("nvme.dir={}", dir.join("blocks").display()),
        "nvme.segment_bytes=1MiB".into(),
        "nvme.capacity_bytes=64MiB".into(),
        "tiering.load_timeout=60s".into(),
        "tiering.shutdown_timeout=120s".into(),
        "listen.http=127.0.0.1:0".into(),
        "listen.grpc=127.0.0.1:0".into(),
        "listen.data=127.0.0.1:0".into(),
        "store.pool_bytes=8MiB".into(),
        "store.block_slots=1024".into(),
        "store.stall_timeout=60s".into(),
    ];
    Daemon::start(Config::load(None, [], &set).unwrap()).unwrap()
}

/// What a door says of a block: its size, its tiers, and its checksum and uses where the pool has it.
type Known = Option<(u32, u8, u64, u32)>;

trait Door {
    fn exists(&self, keys: &[BlockKey]) -> Result<Vec<bool>, String>;
    fn stat(&self, keys: &[BlockKey]) -> Result<Vec<Known>, String>;
    /// Whether each was there.
    fn remove(&self, keys: &[BlockKey]) -> Result<Vec<bool>, String>;
}

impl Door for Client {
    fn exists(&self, keys: &[BlockKey]) -> Result<Vec<bool>, String> {
        self.exists(keys).map_err(|error| error.to_string())
    }

    fn stat(&self, keys: &[BlockKey]) -> Result<Vec<Known>, String> {
        let stats = self.stat(keys).map_err(|error| error.to_string())?;
        Ok(stats.into_iter().map(|stat| stat.map(|s| (s.size, s.tiers, s.checksum, s.uses))).collect())
    }

    fn remove(&self, keys: &[BlockKey]) -> Result<Vec<bool>, String> {
        self.remove(keys).map_err(|error| error.to_string())
    }
}

struct Grpc {
    runtime: tokio::runtime::Runtime,
    control: Control,
}

impl Grpc {
    fn connect(addr: &ControlAddr, token: &str) -> Self {
        let runtime = runtime();
        let control = runtime.block_on(Control::connect(addr, token)).unwrap();
        Self { runtime, control }
    }
}

fn names(keys: &[BlockKey]) -> Vec<Vec<u8>> {
    keys.iter().map(|key| key.0.to_be_bytes().to_vec()).collect()
}

impl Door for Grpc {
    fn exists(&self, keys: &[BlockKey]) -> Result<Vec<bool>, String> {
        let mut store = self.control.store.clone();
        let answer = self.runtime.block_on(store.exists(proto::ExistsRequest { keys: names(keys) }));
        Ok(answer.map_err(|status| status.to_string())?.into_inner().resident)
    }

    fn stat(&self, keys: &[BlockKey]) -> Result<Vec<Known>, String> {
        let mut store = self.control.store.clone();
        let answer = self.runtime.block_on(store.stat(proto::StatRequest { keys: names(keys) }));
        let results = answer.map_err(|status| status.to_string())?.into_inner().results;
        let known = |block: proto::Block| (block.size_bytes, block.tiers as u8, block.checksum, block.uses);
        Ok(results.into_iter().map(|result| result.block.map(known)).collect())
    }

    fn remove(&self, keys: &[BlockKey]) -> Result<Vec<bool>, String> {
        let mut store = self.control.store.clone();
        let answer = self.runtime.block_on(store.remove(proto::RemoveRequest { keys: names(keys) }));
        let answer = answer.map_err(|status| status.to_string())?.into_inner();
        Ok(answer.outcomes().map(|outcome| outcome == Outcome::Removed).collect())
    }
}

/// One step of a sequence.
#[derive(Clone, Copy, Debug)]
enum Ask {
    Exists,
    Stat,
    Remove,
}

/// The answer in words, so that answers of all kinds compare.
fn ask(door: &dyn Door, ask: Ask, keys: &[BlockKey]) -> Result<String, String> {
    match ask {
        Ask::Exists => door.exists(keys).map(|answer| format!("{answer:?}")),
        Ask::Stat => door.stat(keys).map(|answer| format!("{answer:?}")),
        Ask::Remove => door.remove(keys).map(|answer| format!("{answer:?}")),
    }
}

#[test]
fn both_doors_answer_alike() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = Tokens::in_folder(dir.path());
    let tenant = tokens.create(&[Role::Engine, Role::Observer, Role::Operator], 3, &[], None).unwrap();
    // For each door its own blocks: on disk alone, in the pool, and never stored.
    let keys = |door: &str| {
        ["disk", "pool", "never"].map(|place| BlockKey::from_name(&format!("{door} {place}"))).to_vec()
    };
    let connect = |running: &Running, token: &str| {
        let (data, grpc) = match token {
            "" => (
                Endpoint::Unix(running.socket_path().into()),
                ControlAddr::Unix(running.control_path().into()),
            ),
            _ => (
                Endpoint::Tcp(running.data_addr().unwrap()),
                ControlAddr::Tcp(running.grpc_addr().unwrap().to_string()),
            ),
        };
        let options = Options { token: token.into(), ..Options::default() };
        (Client::connect(&data, options).unwrap(), Grpc::connect(&grpc, token))
    };
    let put = |client: &Client, door: &str, place: usize| {
        client.put(&BlockMeta::single(keys(door)[place], SIZE), &content(place as u32, SIZE)).unwrap();
    };
    let callers = ["", tenant.as_str()];
    let running = start(dir.path());
    for token in callers {
        let (client, _) = connect(&running, token);
        ["data", "grpc"].iter().for_each(|door| put(&client, door, 0));
    }
    // A planned stop saves to disk what only the pool has.
    running.shutdown();

    let running = start(dir.path());
    for token in callers {
        let (client, grpc) = connect(&running, token);
        ["data", "grpc"].iter().for_each(|door| put(&client, door, 1));
        let steps = [Ask::Exists, Ask::Stat, Ask::Stat, Ask::Remove, Ask::Exists, Ask::Stat, Ask::Remove];
        for (n, step) in steps.into_iter().enumerate() {
            let told = ask(&client, step, &keys("data"));
            assert_eq!(told, ask(&grpc, step, &keys("grpc")), "step {n}, {step:?}, token {token:?}");
            let told = told.unwrap();
            match n {
                0 | 3 => assert_eq!(told, "[true, true, false]", "{step:?}"),
                1 => {
                    assert!(told.starts_with(&format!("[Some(({SIZE}, {},", 1 << Tier::Nvme as u8)), "{told}")
                }
                4 | 6 => assert_eq!(told, "[false, false, false]", "{step:?}"),
                _ => {}
            }
        }
        let many = vec![BlockKey(1); BATCH_MAX + 1];
        for step in [Ask::Exists, Ask::Stat, Ask::Remove] {
            assert!(ask(&client, step, &many).is_err() && ask(&grpc, step, &many).is_err(), "{step:?}");
        }
    }
}
