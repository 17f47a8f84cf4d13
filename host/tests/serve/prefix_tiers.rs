//! Instances say in which tiers their blocks lie, how long their prefills took and how many adapters they can hold, and
//! policies decide by it.

use crate::process::{Host, runtime};
use crate::replicas::until;
use kvasir::policy::record::Record;
use kvasir_client::control::{Control, PolicySource};
use kvasir_policy::scheduler::Column;
use kvasir_proto::{self as proto, BlockTier, complete_request::Stage, schedule_response::Decision};

fn instance(name: &str, prefill: bool, decode: bool) -> proto::RegisterRequest {
    proto::RegisterRequest {
        name: name.into(),
        prefill,
        decode,
        capacity_blocks: 1 << 20,
        ..Default::default()
    }
}

/// An instance that tells of its blocks, one message after the other.
struct Teller {
    name: &'static str,
    epoch: u64,
    sequence: u64,
}

impl Teller {
    async fn register(control: &mut Control, name: &'static str, both: bool) -> Self {
        let registered = control.conductor.register(instance(name, true, both)).await.unwrap();
        Self { name, epoch: registered.into_inner().epoch, sequence: 0 }
    }

    async fn stored(
        &mut self,
        control: &mut Control,
        tier: BlockTier,
        blocks: std::ops::RangeInclusive<u64>,
    ) {
        self.sequence += 1;
        let stored = proto::BlocksStoredRequest {
            name: self.name.into(),
            epoch: self.epoch,
            sequence: self.sequence,
            parent: blocks.start() - 1,
            blocks: blocks.collect(),
            tier: tier.into(),
        };
        control.conductor.blocks_stored(stored).await.unwrap();
    }

    async fn removed(
        &mut self,
        control: &mut Control,
        tier: BlockTier,
        blocks: std::ops::RangeInclusive<u64>,
    ) {
        self.sequence += 1;
        let removed = proto::BlocksRemovedRequest {
            name: self.name.into(),
            epoch: self.epoch,
            sequence: self.sequence,
            blocks: blocks.collect(),
            tier: tier.into(),
        };
        control.conductor.blocks_removed(removed).await.unwrap();
    }
}

/// A prompt of ten blocks: where its prefill goes, and the id of the decision.
async fn place(control: &mut Control) -> (String, u64) {
    let ask =
        proto::ScheduleRequest { prompt_tokens: 5_120, blocks: (1..=10).collect(), ..Default::default() };
    let answer = control.conductor.schedule(ask).await.unwrap().into_inner();
    let Some(Decision::Placement(placed)) = answer.decision else { panic!("{answer:?}") };
    assert_eq!(answer.fallback, "");
    complete(control, answer.request_id, Stage::Finished, None).await;
    (placed.prefill, answer.decision_id)
}

async fn complete(control: &mut Control, request_id: u64, stage: Stage, prefill_ms: Option<f64>) {
    let done = proto::CompleteRequest { request_id, stage: stage.into(), tokens: 0, prefill_ms };
    control.conductor.complete(done).await.unwrap();
}

async fn load(control: &mut Control, name: &str, settings: &[(&str, &str)]) {
    let settings: Vec<_> = settings.iter().map(|&(n, v)| (n.to_owned(), v.to_owned())).collect();
    control.load_policy("scheduler", PolicySource::Builtin(name.into()), &settings).await.unwrap();
}

/// A column of an explanation by instance; empty if it is not there.
fn column(candidates: Option<&proto::Candidates>, name: &str) -> Vec<(String, f32)> {
    let candidates = candidates.unwrap();
    let Some(at) = candidates.columns.iter().position(|column| column == name) else { return Vec::new() };
    candidates.rows.iter().map(|row| (row.instance.clone(), row.values[at])).collect()
}

async fn explained(control: &mut Control, id: u64) -> proto::ExplainDecisionResponse {
    let request = proto::ExplainDecisionRequest { id, record: true };
    control.explain.decision(request).await.unwrap().into_inner()
}

#[test]
fn a_prefix_in_hbm_is_preferred_to_a_longer_one_below() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_with(dir.path(), &["conductor.instance_ttl=1h"]);
    runtime().block_on(async {
        let mut control = Control::connect(&host.control(), "").await.unwrap();
        load(&mut control, "overlap-cost", &[("dram-weight", "0.5"), ("below-weight", "0.1")]).await;
        let mut near = Teller::register(&mut control, "near", true).await;
        let mut far = Teller::register(&mut control, "far", false).await;
        let mut silent = Teller::register(&mut control, "silent", false).await;
        silent.stored(&mut control, BlockTier::Unspecified, 1..=2).await;
        let (_, before) = place(&mut control).await;
        let told = explained(&mut control, before).await;
        assert_eq!(column(told.prefill.as_ref(), "in HBM, blocks"), [], "nobody names a tier");

        near.stored(&mut control, BlockTier::Hbm, 1..=6).await;
        near.stored(&mut control, BlockTier::Dram, 5..=7).await;
        far.stored(&mut control, BlockTier::Nvme, 1..=8).await;
        far.stored(&mut control, BlockTier::Dram, 1..=1).await;
        near.removed(&mut control, BlockTier::Hbm, 6..=6).await;
        let (chosen, id) = place(&mut control).await;
        assert_eq!(chosen, "near");
        let told = explained(&mut control, id).await;
        let of = |values: [f32; 3]| ["near", "far", "silent"].map(str::to_owned).into_iter().zip(values);
        for (name, values) in [
            ("prefix, blocks", [7.0, 8.0, 2.0]),
            ("in HBM, blocks", [5.0, 0.0, 2.0]),
            ("in HBM or DRAM, blocks", [7.0, 1.0, 2.0]),
        ] {
            assert_eq!(column(told.prefill.as_ref(), name), of(values).collect::<Vec<_>>(), "{name}");
        }
        let at_decode = ("near".to_owned(), 5.0);
        assert_eq!(column(told.decode.as_ref(), "in HBM, blocks"), [at_decode], "the same memory");
        let record = Record::parse(&told.record).unwrap();
        let columns = record.asked.lists[0][kvasir_policy::scheduler::REQUEST_WORDS];
        for column in [Column::PrefixInHbm, Column::PrefixInDram, Column::PrefixAtDecodeInDram] {
            assert_ne!(columns & 1 << column as u32, 0, "{column:?} is recorded");
        }

        load(&mut control, "overlap-cost", &[]).await;
        assert_eq!(place(&mut control).await.0, "far", "where a block is a block");
        far.removed(&mut control, BlockTier::Unspecified, 1..=8).await;
        assert_eq!(place(&mut control).await.0, "near", "they left all tiers");

        let unknown = proto::BlocksStoredRequest {
            name: "far".into(),
            epoch: far.epoch,
            sequence: far.sequence + 1,
            blocks: vec![1],
            tier: 9,
            ..Default::default()
        };
        let refused = control.conductor.blocks_stored(unknown).await.unwrap_err();
        assert!(refused.message().starts_with("tier: 9"), "{refused}");
    });
    assert_eq!(host.terminate(), Some(0));
}

/// Both register the same costs; one measures that its prefills take five times as long.
#[test]
fn a_measured_prefill_teaches_which_instance_is_slow() {
    let dir = tempfile::tempdir().unwrap();
    let set = ["conductor.instance_ttl=1h", "conductor.balance_every=50ms"];
    let host = Host::start_with(dir.path(), &set);
    let cost = proto::CostModel {
        prefill_fixed_ms: 5.0,
        prefill_per_token_ms: 0.1,
        step_fixed_ms: 1.0,
        ..Default::default()
    };
    let runtime = runtime();
    let mut control = runtime.block_on(async {
        let mut control = Control::connect(&host.control(), "").await.unwrap();
        load(&mut control, "fitted-cost", &[]).await;
        for name in ["slow", "fast"] {
            let registered = proto::RegisterRequest { cost: Some(cost), ..instance(name, true, true) };
            control.conductor.register(registered).await.unwrap();
        }
        control
    });
    let mut first = None;
    until("the fast one is chosen", || {
        let chosen = (0..7).map(|n| runtime.block_on(serve_measured(&mut control, 500 + n * 300)));
        let chosen: Vec<String> = chosen.collect();
        first.get_or_insert(chosen[0].clone());
        chosen.iter().all(|name| name == "fast")
    });
    assert_eq!(first.as_deref(), Some("slow"), "nothing tells them apart at first");
    assert_eq!(host.terminate(), Some(0));
}

/// Schedules and ends a request; where its prefill went, which took five times as long as predicted if that was `slow`.
async fn serve_measured(control: &mut Control, prompt_tokens: u32) -> String {
    let ask = proto::ScheduleRequest { prompt_tokens, ..Default::default() };
    let answer = control.conductor.schedule(ask).await.unwrap().into_inner();
    let Some(Decision::Placement(placed)) = answer.decision else { panic!("{answer:?}") };
    let times = if placed.prefill == "slow" { 5.0 } else { 1.0 };
    let took_ms = times * (5.0 + 0.1 * f64::from(prompt_tokens));
    complete(control, answer.request_id, Stage::Prefill, Some(took_ms)).await;
    complete(control, answer.request_id, Stage::Finished, None).await;
    placed.prefill
}
