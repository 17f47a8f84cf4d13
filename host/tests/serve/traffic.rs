//! A host records what it is asked, and the replays read it.

use crate::process::{Host, runtime};
use crate::replicas::until;
use kvasir_client::control::Control;
use kvasir_proto::{self as proto, complete_request::Stage};

async fn asked(control: &mut Control, blocks: Vec<u64>, session: u64) -> u64 {
    let ask = proto::ScheduleRequest {
        prompt_tokens: 512 * blocks.len() as u32 + 1,
        output_tokens: 100,
        blocks,
        session,
        tenant: 7,
        ..Default::default()
    };
    control.conductor.schedule(ask).await.unwrap().into_inner().request_id
}

async fn told(control: &mut Control, request_id: u64, stage: Stage, tokens: u32) {
    let done = proto::CompleteRequest { request_id, stage: stage.into(), tokens, prefill_ms: None };
    control.conductor.complete(done).await.unwrap();
}

#[test]
fn what_a_host_was_asked_is_a_trace() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("traffic.jsonl");
    let host = Host::start_with(dir.path(), &[&format!("record.file={}", file.display())]);
    let runtime = runtime();
    runtime.block_on(async {
        let mut control = Control::connect(&host.control(), "").await.unwrap();
        let rejected = asked(&mut control, vec![11, 12], 3).await;
        assert_eq!(rejected, 0, "nobody is there");
        let both = proto::RegisterRequest {
            name: "both".into(),
            prefill: true,
            decode: true,
            capacity_blocks: 1 << 20,
            ..Default::default()
        };
        control.conductor.register(both).await.unwrap();
        let first = asked(&mut control, vec![11, 12], 3).await;
        let second = asked(&mut control, vec![11, 12, 13], 3).await;
        for stage in [Stage::Prefill, Stage::Progress, Stage::Progress, Stage::Finished] {
            told(&mut control, first, stage, if stage == Stage::Progress { 21 } else { 0 }).await;
        }
        told(&mut control, second, Stage::Finished, 0).await;
    });
    let text = || std::fs::read_to_string(&file).unwrap();
    until("three lines are written", || text().lines().count() == 3);
    let text = text();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let [rejected, first, second] = &lines[..] else { panic!("{text}") };
    assert_eq!((first["input_length"].as_u64(), first["output_length"].as_u64()), (Some(1_025), Some(42)));
    assert_eq!(
        (rejected["output_length"].as_u64(), second["output_length"].as_u64()),
        (Some(100), Some(100))
    );
    for n in [0, 1] {
        assert_eq!(rejected["hash_ids"][n], first["hash_ids"][n]);
        assert_eq!(second["hash_ids"][n], first["hash_ids"][n]);
    }
    assert_ne!(rejected["hash_ids"][2], first["hash_ids"][2], "the rest of a prompt has no hash to compare");
    assert_eq!((&first["tenant"], &first["session"]), (&7.into(), &second["session"]));
    assert_ne!(first["session"], 3);
}
