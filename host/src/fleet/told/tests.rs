use super::*;
use crate::fleet::{
    Ask, DecodeCost, DecodeSpec, LinkSpec, Outcome, PrefillCost, PrefillSpec, Site, TransferCost,
};
use kvasir_policy::scheduler::{Column, Placement, Question, Transfer};

fn fleet() -> Fleet {
    let link = LinkSpec { from: 1, to: 2, fixed_ms: 3.0, factor: 2.0, parallel: 0 };
    let mut fleet = Fleet::new(Default::default(), 16, 0).with_links(&[link]);
    fleet.set_domains(3);
    for domain in [1, 2] {
        let transfer = TransferCost { fixed_ms: 1.0, ms_per_block: 0.5 };
        let cost = PrefillCost { fixed_ms: 5.0, ms_per_token: 0.25, ms_per_pair: 0.001 };
        let step = DecodeCost { fixed_ms: 10.0, ms_per_sequence: 0.5, ms_per_context_token: 0.125 };
        let prefill = PrefillSpec { cost, transfer, capacity_blocks: 1_000 };
        let decode = DecodeSpec { cost: step, handover: transfer, capacity_blocks: 1_000 };
        fleet.register(Some(prefill), Some(decode), Site { host: None, domain }, 0).unwrap();
    }
    fleet
}

fn question(fleet: &Fleet, ask: &Ask, now_ms: u64, prefix: &[u32]) -> Question {
    let request = fleet.request(ask);
    Question::new(fleet.table_time(now_ms), &request, 2, 2).with(Column::Prefix, prefix)
}

#[test]
fn an_outlook_on_what_was_told_is_the_forecast_of_the_host() {
    let mut fleet = fleet();
    let mut told = Told::default();
    let ask = Ask { prompt_tokens: 100, output_tokens: 10, ..Ask::default() };
    for id in 0..6 {
        let now_ms = 7 * id;
        told.catch_up(&fleet);
        let question = question(&fleet, &ask, now_ms, &[4, 1]);
        for (prefill, decode, blocks) in [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (1, 1, 3)] {
            let transfer = (blocks > 0).then_some(Transfer { source: 0, blocks });
            let placement = Placement { prefill, decode, transfer, ..Placement::default() };
            let decision = Decision::Run(placement);
            let forecast = fleet.forecast(&ask, &decision, question.candidates(), now_ms).unwrap();
            let Outcome::Admitted(admission) = forecast else { panic!("{forecast:?}") };
            let (seen, expected) = (told.outlook(&question, &placement).unwrap(), Outlook::from(&admission));
            assert_eq!(seen.cached_tokens, expected.cached_tokens);
            for (seen, expected) in [(seen.ttft_ms, expected.ttft_ms), (seen.tbt_ms, expected.tbt_ms)] {
                assert!((seen - expected).abs() < 1e-3, "{placement:?}: {seen} where {expected}");
            }
        }
        let decision = Decision::run((id % 2) as u32, 1);
        fleet.admit(id, &ask, &decision, question.candidates(), now_ms).unwrap();
    }
    let nowhere = Placement { prefill: 9, ..Placement::default() };
    assert_eq!(told.outlook(&question(&fleet, &ask, 0, &[0, 0]), &nowhere), None);
}

#[test]
fn from_one_telling_to_another_there_are_only_the_rows_that_differ() {
    let mut fleet = fleet();
    let mut before = Told::default();
    before.catch_up(&fleet);
    assert_eq!(before.changes_to(&before.clone()), None);
    let ask = Ask { prompt_tokens: 100, ..Ask::default() };
    let question = question(&fleet, &ask, 0, &[0, 0]);
    fleet.admit(1, &ask, &Decision::run(1, 0), question.candidates(), 0).unwrap();
    let mut after = before.clone();
    after.catch_up(&fleet);
    let changes = before.changes_to(&after).unwrap();
    assert_eq!((changes.open, changes.prefill.len(), changes.decode.len()), (None, PREFILL_ROW, DECODE_ROW));
    assert_eq!((changes.prefill[0], changes.decode[0]), (1.0, 0.0));
    assert_eq!(Told::default().changes_to(&after), Some(after.all()), "other tables are told anew");
}
