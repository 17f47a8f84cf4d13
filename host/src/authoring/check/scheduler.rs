//! Clusters that schedulers are tried in.

use super::Trial;
use super::panel::{Failure, Panel};
use super::trials::World;
use crate::fleet::{
    Ask, Changes, DecodeCost, DecodeSpec, Fleet, Limits, Needs, PrefillCost, PrefillSpec, Report, Site, Told,
    TransferCost,
};
use crate::policy::record::{Call, Push, bits};
use crate::policy::scheduler::{SchedulerHook, push, pushes};
use kvasir_policy::scheduler::{Column, DECODE_ROW, Decision, LINK_ROW, PREFILL_ROW, Question, Request};
use rand::{Rng as _, RngExt as _};
use rand_chacha::ChaCha8Rng;

/// Prefill and decode instances, and what is the matter with them.
const KINDS: [(u16, u16, Matter); 8] = [
    (0, 0, Matter::Nothing),
    (1, 1, Matter::Peers),
    (3, 2, Matter::Nothing),
    (3, 2, Matter::AllDrained),
    (3, 2, Matter::NobodyServes),
    (5, 4, Matter::LaterHost),
    (64, 64, Matter::Peers),
    (512, 512, Matter::Nothing),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Matter {
    Nothing,
    /// Instances that do both.
    Peers,
    AllDrained,
    /// No instance serves the model that is asked for.
    NobodyServes,
    /// Rows have more values than are documented.
    LaterHost,
}

const BLOCK_SIZE_TOKENS: u32 = 16;
/// Requests on their way; the oldest ends when there are more.
const IN_FLIGHT: u64 = 40;

pub(super) struct Cluster {
    fleet: Fleet,
    told: Told,
    matter: Matter,
    rng: ChaCha8Rng,
    now_ms: u64,
    requests: u64,
}

impl World for Cluster {
    type Hook = SchedulerHook;
    const KINDS: &'static [&'static str] = &[
        "no instances",
        "one instance that does both",
        "3 prefill and 2 decode instances",
        "all instances drained",
        "nobody serves the model",
        "a later host, whose rows are longer",
        "64 instances that do both",
        "512 prefill and 512 decode instances",
    ];
    const ORDINARY: usize = 2;
    const SUCCESSOR_DECIDES_ALIKE: bool = true;

    fn new(kind: usize, _: &Trial, mut rng: ChaCha8Rng) -> Self {
        let (prefill, decode, matter) = KINDS[kind];
        let mut fleet = Fleet::new(Limits::default(), BLOCK_SIZE_TOKENS, 0);
        fleet.set_domains(2);
        for place in 0..prefill.max(decode) {
            let (p, d) = (prefill_spec(&mut rng), decode_spec(&mut rng));
            let site = Site { host: Some(u32::from(place) / 8), domain: u32::from(place) % 2 };
            let (p, d) = ((place < prefill).then_some(p), (place < decode).then_some(d));
            // The table has room, and the costs are such as instances report.
            let registered = match matter {
                Matter::Peers => fleet.register(p, d, site, 0).map(drop),
                _ => {
                    fleet.register(p, None, site, 0).and_then(|_| fleet.register(None, d, site, 0)).map(drop)
                }
            };
            debug_assert!(registered.is_ok());
        }
        let mut cluster = Self { fleet, told: Told::default(), matter, rng, now_ms: 0, requests: 0 };
        if matter == Matter::AllDrained {
            cluster.set_availability(|_| false);
        }
        cluster.told.catch_up(&cluster.fleet);
        cluster
    }

    fn told(&self) -> Vec<Push> {
        let thresholds = ("set-thresholds".to_owned(), bits(&[4.0]));
        pushes(&self.as_sent(self.told.all())).into_iter().chain([thresholds]).collect()
    }

    fn asked(&mut self) -> Call {
        let ask = self.request();
        Call::schedule(&self.question(&ask))
    }

    fn step(&mut self, panel: &mut Panel<SchedulerHook>) -> Result<(), Failure> {
        self.now_ms += self.rng.random_range(0..50);
        self.change();
        self.fleet.tick(self.now_ms);
        if let Some(changes) = self.told.catch_up(&self.fleet) {
            let changes = self.as_sent(changes);
            panel.tell("update", |engine| push(engine, &changes))?;
        }
        let ask = self.request();
        let question = self.question(&ask);
        if let Some(scores) = panel.ask_one("explain", |engine| engine.explain(&question))? {
            self.told.check_scores(&scores).map_err(|invalid| Failure::invalid("explain", invalid))?;
        }
        let decision = panel.ask("schedule", |engine| engine.schedule(&question))?;
        let checked = self.told.check(&decision, question.candidates());
        checked.map_err(|invalid| Failure::invalid("schedule", invalid))?;
        self.book(&ask, &decision, &question);
        Ok(())
    }
}

impl Cluster {
    fn change(&mut self) {
        if self.matter == Matter::AllDrained {
            return;
        }
        let lucky = self.rng.random_range(0..10);
        match lucky {
            0 => {
                let drained = self.rng.random_range(0..4);
                self.set_availability(|place| place % 4 != drained);
            }
            1 => self.set_availability(|_| true),
            _ => {}
        }
        let (prefill, decode) = (self.fleet.prefill_slots() as u16, self.fleet.decode_slots() as u16);
        let report = Report {
            free_blocks: self.rng.random_range(0..1 << 16),
            waiting: Some(self.rng.random_range(0..9)),
        };
        if prefill > 0 && decode > 0 {
            let (p, d) = (self.rng.random_range(0..prefill), self.rng.random_range(0..decode));
            // Their slots are never given up here.
            let _ = self.fleet.report_prefill(p, report, self.now_ms);
            let _ = self.fleet.report_decode(d, report, self.now_ms);
        }
    }

    fn set_availability(&mut self, available: impl Fn(u16) -> bool) {
        for slot in 0..self.fleet.prefill_slots() as u16 {
            let _ = self.fleet.set_prefill_available(slot, available(slot));
        }
        for slot in 0..self.fleet.decode_slots() as u16 {
            let _ = self.fleet.set_decode_available(slot, available(slot));
        }
    }

    fn request(&mut self) -> Ask {
        let rng = &mut self.rng;
        let slo = |rng: &mut ChaCha8Rng, most: f32| match rng.random_range(0..3) {
            0 => f32::INFINITY,
            1 => 0.001,
            _ => rng.random_range(1.0..most),
        };
        Ask {
            prompt_tokens: match rng.random_range(0..20) {
                0 => 0,
                1 => 1,
                2 => 10_000_000,
                _ => rng.random_range(1..30_000),
            },
            output_tokens: rng.random_range(0..2_000),
            class: rng.random_range(0..4),
            tenant: rng.random_range(0..3),
            priority: rng.random_range(0..3),
            session: rng.random_range(0..5) * 0x1_0000_0001,
            seed: rng.next_u64(),
            ttft_slo_ms: slo(rng, 10_000.0),
            tbt_slo_ms: slo(rng, 100.0),
            must_run: rng.random_bool(0.2),
            needs: Needs { model: Some(rng.random_range(0..3)), adapter: rng.random_range(0..3) },
        }
    }

    fn question(&mut self, ask: &Ask) -> Question {
        let (prefill, decode) = (self.fleet.prefill_slots(), self.fleet.decode_slots());
        let mut request = self.fleet.request(ask);
        if self.rng.random_bool(0.1) {
            request.hints |= Request::ASKED_AGAIN;
        }
        let mut question = Question::new(self.fleet.table_time(self.now_ms), &request, prefill, decode);
        let blocks = ask.prompt_tokens.div_ceil(BLOCK_SIZE_TOKENS);
        let prefix = self.column(prefill, blocks);
        if self.rng.random_bool(0.7) {
            question = question.with(Column::Prefix, &prefix);
            if self.rng.random_bool(0.5) {
                let in_hbm: Vec<_> = prefix.iter().map(|blocks| blocks / 4).collect();
                let in_dram: Vec<_> = prefix.iter().map(|blocks| blocks / 2).collect();
                question = question.with(Column::PrefixInHbm, &in_hbm).with(Column::PrefixInDram, &in_dram);
            }
        }
        let nobody = self.matter == Matter::NobodyServes;
        let known = nobody || self.rng.random_bool(0.5);
        let most = if nobody { 0 } else { 2 };
        if known {
            question = question.with(Column::EligiblePrefill, &self.column(prefill, most));
        }
        let at_decode = self.rng.random_bool(0.3).then(|| self.column(decode, blocks));
        if let Some(at_decode) = &at_decode {
            question = question.with(Column::PrefixAtDecode, at_decode);
        }
        if known {
            question = question.with(Column::EligibleDecode, &self.column(decode, most));
        }
        if let Some(at_decode) = at_decode.filter(|_| self.rng.random_bool(0.5)) {
            let [in_hbm, in_dram] = [4, 2].map(|part| at_decode.iter().map(|n| n / part).collect::<Vec<_>>());
            question = question
                .with(Column::PrefixAtDecodeInHbm, &in_hbm)
                .with(Column::PrefixAtDecodeInDram, &in_dram);
        }
        question
    }

    fn column(&mut self, slots: usize, most: u32) -> Vec<u32> {
        (0..slots).map(|_| self.rng.random_range(0..=most)).collect()
    }

    /// Tables move on as if the request ran.
    fn book(&mut self, ask: &Ask, decision: &Decision, question: &Question) {
        self.requests += 1;
        let _ = self.fleet.admit(self.requests, ask, decision, question.candidates(), self.now_ms);
        if let Some(oldest) = self.requests.checked_sub(IN_FLIGHT) {
            // It may have been rejected.
            let _ = self.fleet.prefill_done(oldest, None, self.now_ms);
            let _ = self.fleet.finished(oldest, self.now_ms);
        }
    }

    fn as_sent(&self, changes: Changes) -> Changes {
        if self.matter == Matter::LaterHost { longer(changes) } else { changes }
    }
}

/// The same as a host would send it whose contract has two more values in each row.
fn longer(changes: Changes) -> Changes {
    const MORE: usize = 2;
    let rows = |rows: Vec<f32>, len: usize| -> Vec<f32> {
        rows.chunks(len).flat_map(|row| row.iter().copied().chain([f32::INFINITY; MORE])).collect()
    };
    let Changes { open, prefill, decode, links } = changes;
    let open = open.map(|mut layout| {
        layout.prefill_row += MORE as u32;
        layout.decode_row += MORE as u32;
        layout.link_row += MORE as u32;
        layout
    });
    Changes {
        open,
        prefill: rows(prefill, PREFILL_ROW),
        decode: rows(decode, DECODE_ROW),
        links: rows(links, LINK_ROW),
    }
}

fn prefill_spec(rng: &mut ChaCha8Rng) -> PrefillSpec {
    let cost = PrefillCost {
        fixed_ms: rng.random_range(0.0..20.0),
        ms_per_token: rng.random_range(0.001..0.5),
        ms_per_pair: rng.random_range(0.0..0.000_01),
    };
    PrefillSpec { cost, transfer: transfer(rng), capacity_blocks: rng.random_range(1..1 << 18) }
}

fn decode_spec(rng: &mut ChaCha8Rng) -> DecodeSpec {
    let cost = DecodeCost {
        fixed_ms: rng.random_range(0.1..10.0),
        ms_per_sequence: rng.random_range(0.0..0.5),
        ms_per_context_token: rng.random_range(0.0..0.000_1),
    };
    DecodeSpec { cost, handover: transfer(rng), capacity_blocks: rng.random_range(1..1 << 18) }
}

fn transfer(rng: &mut ChaCha8Rng) -> TransferCost {
    TransferCost { fixed_ms: rng.random_range(0.0..5.0), ms_per_block: rng.random_range(0.001..1.0) }
}
