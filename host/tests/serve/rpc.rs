use kvasir::access::tokens::Tokens;
use kvasir::config::Config;
use kvasir::daemon::{Daemon, Running};
use kvasir_client::control::{Control, ControlAddr, PolicySource};
use kvasir_client::data::{Client, Endpoint, Options, Put};
use kvasir_dataplane::server::access::Role;
use kvasir_dataplane::{BlockKey, BlockMeta};
use kvasir_proto::{self as proto, complete_request::Stage, schedule_response::Decision};
use proto::exchange_request::call::Call;
use proto::exchange_response::answer::Answer;
use std::path::Path;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

fn start(dir: &Path, set: &[&str]) -> Running {
    let mut all = vec![
        format!("node.data_dir={}", dir.display()),
        "listen.http=127.0.0.1:0".into(),
        "listen.data=127.0.0.1:0".into(),
        "store.pool_bytes=8MiB".into(),
        "store.block_slots=1024".into(),
        // Times that a busy machine does not reach.
        "store.put_wait=60s".into(),
        "store.lease_ttl=300s".into(),
        "store.stall_timeout=60s".into(),
        "conductor.instance_ttl=1h".into(),
    ];
    all.extend(set.iter().map(|s| s.to_string()));
    Daemon::start(Config::load(None, [], &all).unwrap()).unwrap()
}

fn control(running: &Running) -> ControlAddr {
    ControlAddr::Unix(running.control_path().into())
}

fn block_on<R>(work: impl Future<Output = R>) -> R {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

fn content(n: u32) -> Vec<u8> {
    (0..16 << 10u32).map(|i: u32| (i.wrapping_mul(31) ^ n.wrapping_mul(0x9e37_79b9)) as u8).collect()
}

#[test]
fn a_full_pool_makes_room_and_a_swap_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let running = start(dir.path(), &[]);
    let client = Client::connect(&Endpoint::Unix(running.socket_path().into()), Options::default()).unwrap();
    let key = |n: u32| BlockKey::from_engine_hash("test", &n.to_le_bytes());
    // Four pools full, each under another evictor.
    for n in 0..2048u32 {
        if n % 512 == 0 {
            let name = ["lru", "sieve", "fifo", "workload-aware"][n as usize / 512];
            block_on(async {
                let mut control = Control::connect(&control(&running), "").await.unwrap();
                let loaded =
                    control.load_policy("evictor", PolicySource::Builtin(name.into()), &[]).await.unwrap();
                assert_eq!(loaded.name, name);
            });
        }
        let put = client.put(&BlockMeta::single(key(n), 16 << 10), &content(n)).unwrap();
        assert_eq!(put, Put::Stored);
    }
    let found = client.get(&(0..2048).map(key).collect::<Vec<_>>(), 0).unwrap();
    let mut resident = 0;
    for (n, block) in found.iter().enumerate() {
        if let Some(block) = block {
            assert!(block.bytes().unwrap() == content(n as u32), "block {n}");
            resident += 1;
        }
    }
    assert!((1..=512).contains(&resident), "{resident}");
    let metrics = running.host().node.store().metrics();
    assert_eq!((metrics.checksum_failures, metrics.pool_full), (0, 0));
    let refused = &running.host().eviction.counts().invalid;
    assert_eq!(refused.load(std::sync::atomic::Ordering::Relaxed), 0);
    for status in running.host().policies.list() {
        assert_eq!((status.counters.fallbacks, status.last_trip), (0, None), "{}", status.slot);
    }
}

#[test]
fn a_stream_of_calls_answers_each_and_ends_with_the_host() {
    let dir = tempfile::tempdir().unwrap();
    let running = start(dir.path(), &[]);
    let ended = block_on(async {
        let mut c = Control::connect(&control(&running), "").await.unwrap().conductor;
        let both = proto::RegisterRequest {
            name: "both".into(),
            prefill: true,
            decode: true,
            capacity_blocks: 1_000,
            ..Default::default()
        };
        c.register(both).await.unwrap();
        let ask = || Call::Schedule(proto::ScheduleRequest { prompt_tokens: 4096, ..Default::default() });
        let done = |request_id| {
            let stage = Stage::Finished.into();
            Call::Complete(proto::CompleteRequest { request_id, stage, ..Default::default() })
        };
        let message = |calls: Vec<Option<Call>>| proto::ExchangeRequest {
            calls: calls.into_iter().map(|call| proto::exchange_request::Call { call }).collect(),
        };
        let (send, calls) = tokio::sync::mpsc::channel(8);
        let mut answers = c.exchange(ReceiverStream::new(calls)).await.unwrap().into_inner();
        let unknown = 1 << 60;
        send.send(message(vec![Some(ask()), Some(done(unknown)), None, Some(ask())])).await.unwrap();
        let first = answers.message().await.unwrap().unwrap().answers;
        let [one, gone, none, two] = &first[..] else { panic!("{first:?}") };
        let request_id = |answer: &proto::exchange_response::Answer| match &answer.answer {
            Some(Answer::Scheduled(scheduled)) => scheduled.request_id,
            other => panic!("{other:?}"),
        };
        let code = |answer: &proto::exchange_response::Answer| match &answer.answer {
            Some(Answer::Refusal(refusal)) => Code::from(refusal.code),
            other => panic!("{other:?}"),
        };
        assert_eq!((code(gone), code(none)), (Code::NotFound, Code::InvalidArgument));
        let (one, two) = (request_id(one), request_id(two));
        assert!(one > 0 && two > one);
        send.send(message(vec![Some(done(one)), Some(done(two))])).await.unwrap();
        let second = answers.message().await.unwrap().unwrap().answers;
        assert!(second.iter().all(|a| matches!(a.answer, Some(Answer::Completed(_)))), "{second:?}");

        // A message that is no message ends its stream alone.
        let (other, calls) = tokio::sync::mpsc::channel(8);
        let mut refused = c.exchange(ReceiverStream::new(calls)).await.unwrap().into_inner();
        other.send(message(vec![Some(ask()); 257])).await.unwrap();
        let status = refused.message().await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().starts_with("calls: there are 257"), "{status}");
        send.send(message(vec![Some(ask())])).await.unwrap();
        assert_eq!(answers.message().await.unwrap().unwrap().answers.len(), 1);
        // An open stream does not keep the host.
        tokio::task::spawn_blocking(move || running.shutdown()).await.unwrap();
        answers.message().await
    });
    assert!(!matches!(ended, Ok(Some(_))), "{ended:?}");
}

#[test]
fn requests_go_where_their_prefix_is() {
    let dir = tempfile::tempdir().unwrap();
    let running = start(dir.path(), &[]);
    block_on(async {
        let mut c = Control::connect(&control(&running), "").await.unwrap().conductor;
        let register = |name: &str, prefill, decode| proto::RegisterRequest {
            name: name.into(),
            prefill,
            decode,
            capacity_blocks: 1000,
            ..Default::default()
        };
        let nobody = proto::RegisterRequest { name: "x".into(), ..Default::default() };
        assert!(c.register(nobody).await.unwrap_err().message().contains("neither prefill nor decode"));
        let ask =
            proto::ScheduleRequest { prompt_tokens: 4096, blocks: (1..=8).collect(), ..Default::default() };
        let line = proto::RegisterRequest { name: "bad name\n".into(), ..register("x", true, true) };
        assert!(c.register(line).await.unwrap_err().message().starts_with("name: "));
        let long = proto::ScheduleRequest { prompt_tokens: 10, blocks: vec![1; 1_000], ..Default::default() };
        assert!(c.schedule(long).await.unwrap_err().message().starts_with("blocks: "));
        let alone = c.schedule(ask.clone()).await.unwrap().into_inner();
        assert!(
            matches!(alone.decision, Some(Decision::Rejection(r)) if r.reason() == proto::rejection::Reason::NoInstance)
        );

        let epoch = c.register(register("p0", true, false)).await.unwrap().into_inner().epoch;
        let other = c.register(register("p1", true, false)).await.unwrap().into_inner().epoch;
        c.register(register("d0", false, true)).await.unwrap();
        let stored = |sequence, blocks| proto::BlocksStoredRequest {
            name: "p1".into(),
            epoch: other,
            sequence,
            blocks,
            ..Default::default()
        };
        c.blocks_stored(stored(1, (1..=6).collect())).await.unwrap();
        let lookup = proto::LookupPrefixRequest { blocks: ask.blocks.clone() };
        let matches = c.lookup_prefix(lookup.clone()).await.unwrap().into_inner().matches;
        assert_eq!(matches.iter().map(|m| (m.name.as_str(), m.blocks)).collect::<Vec<_>>(), [("p1", 6)]);

        let answer = c.schedule(ask.clone()).await.unwrap().into_inner();
        assert_eq!((answer.policy.as_str(), answer.fallback.as_str()), ("mooncake", ""));
        let Some(Decision::Placement(placed)) = answer.decision else { panic!("{answer:?}") };
        assert_eq!((placed.prefill.as_str(), placed.decode.as_str(), placed.prefix_blocks), ("p1", "d0", 6));
        assert!(placed.ttft_ms > 0.0 && placed.tbt_ms > 0.0);
        let at = |stage: Stage| proto::CompleteRequest {
            request_id: answer.request_id,
            stage: stage.into(),
            tokens: 5,
            ..Default::default()
        };
        for stage in [Stage::Prefill, Stage::Progress, Stage::Finished] {
            c.complete(at(stage)).await.unwrap();
        }
        assert_eq!(c.complete(at(Stage::Finished)).await.unwrap_err().code(), tonic::Code::NotFound);

        let gap = c.blocks_stored(stored(3, vec![7])).await.unwrap_err();
        assert!(gap.message().contains("message 3 of instance `p1` where 2 is next"), "{gap}");
        assert!(c.lookup_prefix(lookup).await.unwrap().into_inner().matches.is_empty());
        let late = proto::ReportLoadRequest { name: "p0".into(), epoch: epoch + 100, ..Default::default() };
        assert!(c.report_load(late).await.unwrap_err().message().contains("is not the current"));
        c.reset_blocks(proto::ResetBlocksRequest { name: "p1".into(), epoch: other }).await.unwrap();
        c.blocks_stored(stored(1, vec![7])).await.unwrap();
        c.unregister(proto::UnregisterRequest { name: "p1".into(), epoch: other }).await.unwrap();
        let moved = c.schedule(ask).await.unwrap().into_inner();
        assert!(
            matches!(moved.decision, Some(Decision::Placement(p)) if p.prefill == "p0" && p.prefix_blocks == 0)
        );
    });
}

#[test]
fn requests_stay_on_an_instance_that_does_both_and_serves_their_model() {
    let dir = tempfile::tempdir().unwrap();
    let link = r#"conductor.links=[{from = "rack-1", to = "rack-2", fixed_ms = 40}]"#;
    let running = start(dir.path(), &[link]);
    block_on(async {
        let mut c = Control::connect(&control(&running), "").await.unwrap().conductor;
        let register = |name: &str, domain: &str, model: &str, prefill| proto::RegisterRequest {
            name: name.into(),
            prefill,
            decode: true,
            capacity_blocks: 1000,
            domain: domain.into(),
            models: vec![model.into()],
            ..Default::default()
        };
        let odd = proto::RegisterRequest { domain: "rack 1".into(), ..register("x", "", "m", true) };
        assert!(c.register(odd).await.unwrap_err().message().starts_with("domain: "));
        let epoch = c.register(register("a", "rack-1", "llama", true)).await.unwrap().into_inner().epoch;
        c.register(register("b", "rack-1", "qwen", true)).await.unwrap();
        let ask = |model: &str| proto::ScheduleRequest {
            prompt_tokens: 4096,
            model: model.into(),
            adapter: "sql".into(),
            ..Default::default()
        };
        for model in ["qwen", "llama"] {
            let answer = c.schedule(ask(model)).await.unwrap().into_inner();
            let Some(Decision::Placement(placed)) = answer.decision else { panic!("{answer:?}") };
            assert_eq!(placed.prefill, placed.decode);
            assert_eq!((placed.prefill == "a", placed.handover_ms), (model == "llama", 0.0), "{model}");
        }
        let nobody = c.schedule(ask("gemma")).await.unwrap().into_inner().decision;
        assert!(matches!(nobody, Some(Decision::Rejection(r)) if r.retry_after_ms > 0));

        // Its decode half is full: another instance decodes, and the blocks go there.
        c.register(register("d", "rack-2", "llama", false)).await.unwrap();
        let adapters = Some(proto::Adapters { names: vec!["sql".into()] });
        let full = proto::ReportLoadRequest {
            name: "a".into(),
            epoch,
            waiting: Some(3),
            adapters,
            ..Default::default()
        };
        c.report_load(full).await.unwrap();
        let answer = c.schedule(ask("llama")).await.unwrap().into_inner();
        let Some(Decision::Placement(placed)) = answer.decision else { panic!("{answer:?}") };
        assert_eq!((placed.prefill.as_str(), placed.decode.as_str()), ("a", "d"));
        assert_eq!(placed.handover_ms, 40.0 + 1.0 + 8.0 * 8.0, "8 blocks over the link");
    });
}

#[test]
fn the_store_and_the_node_answer() {
    let dir = tempfile::tempdir().unwrap();
    let running = start(dir.path(), &["node.name=n1"]);
    let token = Tokens::in_folder(dir.path()).create(&[Role::Engine], 0, &[], None).unwrap();
    let tcp = Endpoint::Tcp(running.data_addr().unwrap());
    let client = Client::connect(&tcp, Options { token, ..Options::default() }).unwrap();
    let key = BlockKey::from_name("a");
    client.put(&BlockMeta::single(key, 3), b"abc").unwrap();
    block_on(async {
        let mut control = Control::connect(&control(&running), "").await.unwrap();
        let keys = vec![key.0.to_be_bytes().to_vec(), vec![0; 16]];
        let exists =
            control.store.exists(proto::ExistsRequest { keys: keys.clone() }).await.unwrap().into_inner();
        assert_eq!(exists.resident, [true, false]);
        let short = control.store.exists(proto::ExistsRequest { keys: vec![vec![1]] }).await.unwrap_err();
        assert!(short.message().contains("key 0 is not 16 bytes"), "{short}");
        let many = proto::ExistsRequest { keys: vec![vec![0; 16]; 4097] };
        assert!(control.store.exists(many).await.unwrap_err().message().contains("4097 keys"));
        let stat = control.store.stat(proto::StatRequest { keys }).await.unwrap().into_inner().results;
        assert_eq!(stat[0].block.as_ref().map(|b| b.size_bytes), Some(3));
        assert!(stat[1].block.is_none());
        let listed = control.store.list(proto::ListRequest { from: 0, max: 10 }).await.unwrap().into_inner();
        assert_eq!(listed.blocks.len(), 1);
        let info = control.node.info(proto::InfoRequest {}).await.unwrap().into_inner();
        assert_eq!((info.node.as_str(), info.data), ("n1", running.data_addr().unwrap().to_string()));
        assert!(control.node.ready(proto::ReadyRequest {}).await.unwrap().into_inner().ready);
        control.node.drain(proto::DrainRequest { resume: false }).await.unwrap();
        assert!(!control.node.ready(proto::ReadyRequest {}).await.unwrap().into_inner().ready);
        let refused = control.conductor.schedule(proto::ScheduleRequest::default()).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::Unavailable);
        let large = PolicySource::Component { name: "large".into(), bytes: vec![0; 33 << 20] };
        let error = control.load_policy("evictor", large, &[]).await.unwrap_err().to_string();
        assert!(error.contains("the host accepts at most 33554432 B"), "{error}");
    });
}

#[test]
fn a_client_connects_by_name_and_does_not_wait_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let running = start(dir.path(), &["listen.grpc=127.0.0.1:0"]);
    let token = Tokens::in_folder(dir.path()).create(&[Role::Observer], 0, &[], None).unwrap();
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    block_on(async {
        let port = running.grpc_addr().unwrap().port();
        let mut control =
            Control::connect(&format!("localhost:{port}").parse().unwrap(), &token).await.unwrap();
        assert!(control.node.ready(proto::ReadyRequest {}).await.unwrap().into_inner().ready);
        let unusable = "localhost".parse::<ControlAddr>().unwrap_err().to_string();
        assert!(unusable.contains("HOST:PORT"), "{unusable}");
        let soon = std::time::Duration::from_millis(10);
        let mut deaf =
            Control::connect_with(&ControlAddr::Tcp(silent.local_addr().unwrap().to_string()), "", soon)
                .await
                .unwrap();
        deaf.node.ready(proto::ReadyRequest {}).await.unwrap_err();
    });
}
