use super::*;
use kvasir_policy::scheduler::{Candidates, Column, Decision, Kept, LINK_ROW, Question, Request, Scheduler};
use kvasir_policy::{Description, scheduler::Cluster};
use proptest::prelude::*;

const BLOCK: u32 = 16;

fn prefill_spec() -> PrefillSpec {
    PrefillSpec {
        cost: PrefillCost { fixed_ms: 10.0, ms_per_token: 1.0, ms_per_pair: 0.0 },
        transfer: TransferCost { fixed_ms: 2.0, ms_per_block: 1.0 },
        capacity_blocks: 1_000,
    }
}

fn decode_spec() -> DecodeSpec {
    DecodeSpec {
        cost: DecodeCost { fixed_ms: 20.0, ms_per_sequence: 1.0, ms_per_context_token: 0.5 },
        handover: TransferCost { fixed_ms: 3.0, ms_per_block: 2.0 },
        capacity_blocks: 100,
    }
}

fn ask(prompt_tokens: u32) -> Ask {
    Ask { prompt_tokens, output_tokens: 16, ..Ask::default() }
}

/// Leading blocks by prefill slot.
fn found(prefix: &[u32]) -> Candidates<'_> {
    Candidates::with_prefix(prefix)
}

fn reported(free_blocks: u32) -> Report {
    Report { free_blocks, waiting: None }
}

fn fleet(prefill: usize, decode: usize) -> Fleet {
    let mut fleet = Fleet::new(Limits { instances: 8, requests: 64 }, BLOCK, 0);
    for slot in 0..prefill {
        assert_eq!(fleet.register_prefill(prefill_spec(), 0), Ok(slot as u16));
    }
    for slot in 0..decode {
        assert_eq!(fleet.register_decode(decode_spec(), 0), Ok(slot as u16));
    }
    fleet
}

fn admit(fleet: &mut Fleet, id: u64, decision: Decision, prefix: &[u32], now: u64) -> Admission {
    match fleet.admit(id, &ask(160), &decision, found(prefix), now) {
        Ok(Outcome::Admitted(admission)) => admission,
        other => panic!("{other:?}"),
    }
}

#[test]
fn bad_answers_are_refused_with_their_reason() {
    let mut c = fleet(3, 2);
    c.set_prefill_available(2, false).unwrap();
    c.unregister_decode(1).unwrap();
    let prefix = [2, 5, 9];
    let transfer = |source, blocks| Decision::run(0, 0).fetching(source, blocks);
    for (decision, reason) in [
        (Decision::run(3, 0), "prefill slot 3 is outside the table of 3"),
        (Decision::run(2, 0), "prefill slot 2 is unavailable"),
        (Decision::run(0, 9), "decode slot 9 is outside the table of 2"),
        (Decision::run(0, 1), "decode slot 1 is unavailable"),
        (transfer(0, 1), "transfer from prefill slot 0 to itself"),
        (transfer(2, 1), "prefill slot 2 is unavailable"),
        (transfer(65_000, 1), "prefill slot 65000 is outside the table of 3"),
        (Decision::run(65_536, 0), "prefill slot 65536 is outside the table of 3"),
        (Decision::run(0, u32::MAX), "decode slot 4294967295 is outside the table of 2"),
        (
            transfer(1, u32::MAX),
            "transfer of 4294967295 blocks from prefill slot 1, which holds 3 beyond the chosen one's own",
        ),
        (
            transfer(1, 4),
            "transfer of 4 blocks from prefill slot 1, which holds 3 beyond the chosen one's own",
        ),
        (
            Decision::Reject { reason: 1, retry_after_ms: u32::MAX },
            "rejection for 4294967295 ms; 86400000 at most, a day",
        ),
        (
            Decision::Reject { reason: 0, retry_after_ms: 1 },
            "rejection for reason 0; the contract has 1 to 5",
        ),
        (
            Decision::Reject { reason: 6, retry_after_ms: 1 },
            "rejection for reason 6; the contract has 1 to 5",
        ),
    ] {
        assert_eq!(c.check(&decision, found(&prefix)).unwrap_err().to_string(), reason);
        assert!(matches!(c.admit(1, &ask(160), &decision, found(&prefix), 0), Err(Error::Invalid(_))));
    }
    let question = Question::new(0.0, &Request::default(), 3, 2)
        .with(Column::EligiblePrefill, &[0, 1, 1])
        .with(Column::EligibleDecode, &[2, 0]);
    let refused = c.check(&Decision::run(0, 0), question.candidates()).unwrap_err().to_string();
    assert_eq!(refused, "the instance in prefill slot 0 does not serve the request's model");
    assert_eq!(c.check(&Decision::run(1, 0), question.candidates()), Ok(()));
    assert_eq!(c.check(&transfer(1, 3), found(&prefix)), Ok(()));
    assert_eq!(c.in_flight(), 0);
}

#[test]
fn scores_are_one_for_each_slot_and_in_an_order() {
    let mut told = Told::default();
    told.catch_up(&fleet(3, 1));
    let check = |scores: &[f32], expected: &str| {
        let said =
            told.check_scores(scores).map_or_else(|invalid| invalid.to_string(), |()| "fine".to_owned());
        assert_eq!(said, expected);
    };
    check(&[], "fine");
    check(&[1.0, f32::INFINITY, -2.0], "fine");
    check(&[1.0, f32::INFINITY, -2.0, 3.0], "fine");
    check(
        &[1.0, 2.0],
        "2 scores for 3 prefill and 1 decode slots; give one for each prefill slot, for each slot of both, or none",
    );
    check(&[1.0, f32::NAN, 2.0], "score 1 is NaN, which is in no order with others");
    check(&[1.0, 2.0, f32::NEG_INFINITY], "score 2 is -inf, which is in no order with others");
}

#[test]
fn what_came_of_a_request_is_measured() {
    let mut c = fleet(1, 1);
    let placed = admit(&mut c, 1, Decision::run(0, 0), &[1, 0], 100);
    c.prefill_done(1, None, 350).unwrap();
    c.prefill_done(1, None, 360).unwrap(); // told twice
    c.progress(1, 3, 400).unwrap();
    c.progress(1, 1, 500).unwrap();
    let ended = c.finished(1, 550).unwrap();
    assert_eq!((ended.id, ended.ask, ended.admission), (1, ask(160), placed));
    assert_eq!((ended.ttft_ms, ended.tbt_ms, ended.decoded_tokens), (Some(250.0), Some(50.0), 4));
    assert_eq!(ended.identities, c.identities(&placed));

    for id in 2..=4 {
        admit(&mut c, id, Decision::run(0, 0), &[0, 0], 600);
    }
    c.prefill_done(3, None, 700).unwrap();
    c.prefill_done(4, None, 700).unwrap();
    c.progress(4, 9, 701).unwrap();
    let measured = |ended: Ended| (ended.id, ended.ttft_ms, ended.tbt_ms);
    assert_eq!(c.finished(2, 710).map(measured), Ok((2, None, None)), "it never came to its first token");
    let given_up: Vec<_> = c.expire(702, 9_000).into_iter().map(measured).collect();
    assert_eq!(given_up, [(3, Some(100.0), None), (4, Some(100.0), None)], "nobody knows when they ended");
}

#[test]
fn admitted_work_is_booked_and_given_back() {
    let mut c = fleet(2, 1);
    let first = admit(&mut c, 1, Decision::run(0, 0).fetching(1, 4), &[1, 5], 100);
    assert_eq!((first.cached_tokens, first.transfer_ms, first.queue_ms), (80, 6.0, 0.0));
    assert_eq!((first.prefill_ms, first.ttft_ms), (90.0, 96.0));
    assert_eq!(first.tbt_ms, 20.0 + 1.0 + 80.0);
    let second = admit(&mut c, 2, Decision::run(0, 0), &[0, 0], 110);
    assert_eq!((second.queue_ms, second.prefill_ms, second.ttft_ms), (86.0, 170.0, 256.0));
    assert_eq!(second.tbt_ms, 20.0 + 2.0 + 160.0);
    assert_eq!(
        c.admit(2, &ask(1), &Decision::run(0, 0), found(&[]), 110),
        Err(Error::RequestExists { id: 2 })
    );

    // The first ends 20 ms late: what is queued behind it moves by as much.
    c.prefill_done(1, None, 216).unwrap();
    let third = admit(&mut c, 3, Decision::run(0, 0), &[10, 0], 216);
    assert_eq!(third.queue_ms, 170.0);
    // The second, late by the same 20 ms, brings no further error.
    c.prefill_done(2, None, 386).unwrap();
    assert_eq!(admit(&mut c, 4, Decision::run(0, 0), &[0, 0], 386).queue_ms, 10.0);
    c.progress(1, 5, 390).unwrap();
    assert_eq!(c.expire(300, 400).len(), 1, "of the third nothing was heard");
    assert_eq!(c.expire(388, 400).len(), 2, "the first goes on decoding");
    c.finished(1, 400).unwrap();
    assert_eq!(c.finished(4, 400), Err(Error::NoRequest { id: 4 }));
    let idle = admit(&mut c, 5, Decision::run(0, 0), &[0, 0], 500);
    assert_eq!((idle.queue_ms, idle.tbt_ms), (0.0, 101.0));
}

#[test]
fn a_port_is_shared_by_all_that_leaves_it() {
    let mut c = fleet(3, 2);
    let sending = |c: &Fleet, slot| c.prefill_row(slot).send_per_block;
    assert_eq!(sending(&c, 1), 1.0, "alone");
    let first = admit(&mut c, 1, Decision::run(0, 0).fetching(1, 4), &[1, 5, 0], 0);
    assert_eq!((first.transfer_ms, sending(&c, 1), sending(&c, 0)), (6.0, 2.0, 1.0));
    // To a receiver that nothing else is on its way to, from a sender that is at half its rate.
    let second = admit(&mut c, 2, Decision::run(2, 1).fetching(1, 4), &[1, 5, 0], 0);
    assert_eq!((second.transfer_ms, sending(&c, 1)), (10.0, 3.0));
    c.transfer_done(1, 5).unwrap();
    assert_eq!(sending(&c, 1), 2.0);
    // Its blocks go from prefill to decode until a token comes from there. Ten more of another request would have half the port, or
    // the receiver's own two ms each, whichever is slower.
    c.prefill_done(1, None, 90).unwrap();
    assert_eq!(sending(&c, 0), 2.0);
    let third = admit(&mut c, 3, Decision::run(0, 1), &[0, 0, 0], 90);
    assert_eq!(third.handover_ms, 3.0 + 10.0 * 2.0);
    c.progress(1, 1, 100).unwrap();
    assert_eq!(sending(&c, 0), 1.0);
    // What an instance sent is not on the account of who comes after it.
    c.unregister_prefill(1).unwrap();
    assert_eq!((c.register_prefill(prefill_spec(), 200), sending(&c, 1)), (Ok(1), 1.0));
    c.finished(2, 210).unwrap();
    assert_eq!(sending(&c, 1), 1.0);
}

#[test]
fn a_forecast_is_what_would_be_booked_and_books_nothing() {
    let mut c = fleet(2, 1);
    admit(&mut c, 1, Decision::run(0, 0), &[0, 0], 0);
    let mut seen = Version::default();
    c.changes_since(&mut seen);
    for decision in [Decision::run(0, 0), Decision::run(0, 0).fetching(1, 4)] {
        let forecast = c.forecast(&ask(160), &decision, found(&[1, 5]), 30);
        assert_eq!(c.changes_since(&mut seen), None);
        let id = c.in_flight() as u64 + 1;
        assert_eq!(c.admit(id, &ask(160), &decision, found(&[1, 5]), 30), forecast);
        c.changes_since(&mut seen);
    }
    let reject = Decision::Reject { reason: 2, retry_after_ms: 3 };
    let rejected = Ok(Outcome::Rejected { reason: 2, retry_after_ms: 3 });
    assert_eq!(c.forecast(&ask(160), &reject, found(&[]), 30), rejected);
}

#[test]
fn shares_and_memory_follow_what_is_booked() {
    let mut c = fleet(1, 2);
    assert_eq!((c.tenant_share(0), c.decode_memory_used()), (0.0, 0.0));
    for (id, tenant, tokens) in [(1, 5, 144), (2, 6, 304), (3, 5, 144)] {
        let ask = Ask { tenant, ..ask(tokens) }; // and 16 of output each
        c.admit(id, &ask, &Decision::run(0, (id % 2) as u32), found(&[0]), 0).unwrap();
    }
    assert_eq!((c.tenant_share(5), c.tenant_share(6), c.tenant_share(7)), (0.5, 0.5, 0.0));
    assert!((c.decode_memory_used() - 0.2).abs() < 1e-9, "40 of 200 blocks");
    c.finished(2, 0).unwrap();
    assert_eq!((c.tenant_share(5), c.tenant_share(6)), (1.0, 0.0));
    c.set_decode_available(0, false).unwrap();
    assert!((c.decode_memory_used() - 0.2).abs() < 1e-9, "20 of the 100 that are available");
    c.expire(u64::MAX, 0);
    assert_eq!((c.tenant_share(5), c.decode_memory_used()), (0.0, 0.0));
}

#[test]
fn a_tenant_with_a_quota_is_told_how_much_of_that_is_in_use() {
    let mut c = fleet(1, 2).with_quotas([(5, 320), (6, 80), (8, 100)]);
    for (id, tenant) in [(1, 5), (2, 6), (3, 7)] {
        let ask = Ask { tenant, ..ask(144) }; // and 16 of output
        c.admit(id, &ask, &Decision::run(0, 0), found(&[0]), 0).unwrap();
    }
    assert_eq!((c.tenant_share(5), c.tenant_share(6), c.tenant_share(8)), (0.5, 2.0, 0.0));
    assert!(
        (c.tenant_share(7) - 1.0 / 3.0).abs() < 1e-9,
        "without a quota, the part of all tokens in flight"
    );
}

#[test]
fn the_forecast_lets_sequences_grow_leave_and_arrive() {
    let mut c = fleet(2, 1); // a step takes 20 + sequences + context / 2 ms
    assert_eq!(c.decode_step_forecast_ms(0.0, 0), 20.0);
    admit(&mut c, 1, Decision::run(0, 0), &[0, 0], 0); // 16 tokens of output
    c.prefill_done(1, None, 170).unwrap();
    let step = 20.0 + 1.0 + 80.0;
    let at = |c: &Fleet, steps: f64| c.decode_step_forecast_ms(steps * step + 0.5, 170);
    assert_eq!(at(&c, 0.0), step);
    assert_eq!(at(&c, 4.0), step + 2.0, "grown by 4 tokens");
    assert_eq!(at(&c, 16.0), 20.0, "at its end");
    c.progress(1, 10, 170).unwrap();
    assert_eq!(c.decode_step_forecast_ms(6.0 * (step + 5.0) + 0.5, 170), 20.0, "6 tokens before its end");
    c.finished(1, 170).unwrap();

    admit(&mut c, 2, Decision::run(0, 0), &[0, 0], 200); // 160 tokens, arrives at 370
    assert_eq!(c.decode_step_forecast_ms(169.0, 200), 20.0);
    assert_eq!(c.decode_step_forecast_ms(170.0, 200), step);
    c.set_decode_available(0, false).unwrap();
    assert_eq!(c.decode_step_forecast_ms(0.0, 370), 0.0, "nowhere to decode");
}

#[test]
fn sequences_of_unknown_length_leave_by_the_mean_of_those_that_ended() {
    let mut c = fleet(1, 1); // a step takes 20 + sequences + context / 2 ms
    let unknown = Ask { output_tokens: 0, ..ask(160) };
    let decode = |c: &mut Fleet, ids: std::ops::Range<u64>| {
        for id in ids {
            c.admit(id, &unknown, &Decision::run(0, 0), found(&[0]), 0).unwrap();
            c.prefill_done(id, None, 0).unwrap();
        }
    };
    decode(&mut c, 0..2);
    assert!(c.decode_step_forecast_ms(1e6, 0) > 5_000.0, "as long as none has ended, they stay");
    c.progress(0, 50, 0).unwrap();
    c.progress(1, 150, 0).unwrap();
    c.finished(0, 0).unwrap();
    c.finished(1, 0).unwrap(); // 100 tokens on average
    decode(&mut c, 2..6);
    let step = 20.0 + 4.0 + 4.0 * 160.0 / 2.0;
    let after = |steps: f64| c.decode_step_forecast_ms(steps * step + 0.5, 0);
    assert_eq!(after(0.0), step);
    // Of 4 there are 4 / e = 1.47 left, each with 260 tokens.
    assert_eq!(after(100.0), 20.0 + 1.0 + (1.471_517_8_f64 * 260.0).round() / 2.0);
    assert_eq!(after(1_000.0), 20.0);
}

#[test]
fn completions_of_an_instance_that_left_do_not_touch_its_successor() {
    let mut c = fleet(1, 1);
    admit(&mut c, 1, Decision::run(0, 0), &[0], 0);
    c.unregister_prefill(0).unwrap();
    c.unregister_decode(0).unwrap();
    assert!(c.check(&Decision::run(0, 0), found(&[0])).is_err());
    assert_eq!(c.register_prefill(prefill_spec(), 5), Ok(0));
    assert_eq!(c.register_decode(decode_spec(), 5), Ok(0));
    c.prefill_done(1, None, 50).unwrap();
    c.progress(1, 7, 55).unwrap();
    c.finished(1, 60).unwrap();
    let fresh = admit(&mut c, 2, Decision::run(0, 0), &[0], 70);
    assert_eq!((fresh.queue_ms, fresh.tbt_ms), (0.0, 101.0));
}

#[test]
fn a_report_leaves_what_is_booked_and_has_not_arrived() {
    let mut c = fleet(1, 1); // 100 blocks of 16 tokens
    let free = |c: &Fleet| c.rows().1[0].free_blocks;
    admit(&mut c, 1, Decision::run(0, 0), &[0], 0); // 160 + 16 tokens: 11 blocks
    assert_eq!(free(&c), 89);
    c.report_decode(0, reported(100), 1).unwrap();
    assert_eq!(free(&c), 89, "the instance has not seen the request yet");
    c.prefill_done(1, None, 170).unwrap();
    c.report_decode(0, reported(90), 171).unwrap();
    assert_eq!(free(&c), 90, "now it counts it itself");
    admit(&mut c, 2, Decision::run(0, 0), &[0], 172);
    c.finished(2, 173).unwrap();
    c.report_decode(0, reported(90), 174).unwrap();
    assert_eq!(free(&c), 90, "given up before it arrived");
}

/// Domain 1 sends to domain 2 over a link that carries one transfer at a time.
fn linked() -> Fleet {
    let link = LinkSpec { from: 1, to: 2, fixed_ms: 5.0, factor: 2.0, parallel: 1 };
    let mut fleet = Fleet::new(Limits { instances: 8, requests: 64 }, BLOCK, 0).with_links(&[link]);
    fleet.set_domains(3);
    fleet
}

fn site(domain: u32) -> Site {
    Site { host: Some(7), domain }
}

#[test]
fn an_instance_that_does_both_stands_in_both_tables_under_one_identity() {
    let mut c = linked();
    c.register_prefill(prefill_spec(), 0).unwrap();
    assert_eq!(c.register(Some(prefill_spec()), Some(decode_spec()), site(2), 0), Ok((Some(1), Some(0))));
    let (prefill, decode) = c.rows();
    assert_eq!((prefill[1].peer, decode[0].peer, prefill[0].peer), (Some(0), Some(1), None));
    assert_eq!(prefill[1].identity, decode[0].identity);
    assert_ne!(prefill[0].identity, prefill[1].identity);
    assert_eq!((prefill[1].host, decode[0].domain, prefill[0].host), (Some(7), 2, None));
    c.unregister_decode(0).unwrap();
    assert_eq!(c.rows().0[1].peer, None, "what has its slot next is another instance");
    c.register_decode(decode_spec(), 0).unwrap();
    assert_ne!(c.rows().1[0].identity, prefill[1].identity);
    let mut bad = decode_spec();
    bad.handover.ms_per_block = f32::NAN;
    let refused = c.register(Some(prefill_spec()), Some(bad), Site::default(), 0);
    assert_eq!(refused, Err(Error::Cost { table: "decode" }));
    assert_eq!(c.prefill_slots(), 2, "it is in neither table");
}

#[test]
fn what_stays_on_an_instance_moves_nothing_and_what_leaves_pays_for_the_way() {
    let mut c = linked();
    c.register(Some(prefill_spec()), Some(decode_spec()), site(1), 0).unwrap();
    c.register(Some(prefill_spec()), Some(decode_spec()), site(2), 0).unwrap();
    let expect = |c: &Fleet, decision: Decision| match c.forecast(&ask(160), &decision, found(&[5, 0]), 500) {
        Ok(Outcome::Admitted(admission)) => (admission.transfer_ms, admission.handover_ms),
        other => panic!("{other:?}"),
    };
    let (stays, leaves) = (Decision::run(0, 0), Decision::run(0, 1));
    assert_eq!(expect(&c, stays), (0.0, 0.0));
    assert_eq!(expect(&c, leaves), (0.0, 5.0 + 3.0 + 2.0 * 2.0 * 10.0), "10 blocks");
    assert_eq!(expect(&c, Decision::run(1, 0)), (0.0, 3.0 + 2.0 * 10.0), "there is no link back");
    let question = Question::new(0.0, &Request::default(), 2, 2).with(Column::PrefixAtDecode, &[0, 7]);
    let Ok(Outcome::Admitted(rest)) = c.forecast(&ask(160), &leaves, question.candidates(), 500) else {
        panic!("it can run there")
    };
    assert_eq!(rest.handover_ms, 5.0 + 3.0 + 2.0 * 2.0 * 3.0, "7 of its blocks are there");
    let fetches = Decision::run(1, 1).fetching(0, 5);
    assert_eq!(expect(&c, fetches), (5.0 + 2.0 + 2.0 * 5.0, 0.0));

    // While blocks are on their way, the next ones share the link and the receiver with them.
    admit(&mut c, 1, leaves, &[0, 0], 0);
    assert_eq!(expect(&c, leaves).1, 48.0, "nothing moves before the prefill is done");
    c.prefill_done(1, None, 170).unwrap();
    assert_eq!(expect(&c, leaves).1, 5.0 + 3.0 + 4.0 * 4.0 * 10.0);
    assert_eq!(c.rows().1[1].handover_per_block, 4.0);
    assert_eq!(expect(&c, fetches).0, 5.0 + 2.0 + 4.0 * 5.0, "the same link, another receiver's side");
    c.tick(217);
    assert_eq!(expect(&c, leaves).1, 168.0);
    c.tick(218);
    assert_eq!(expect(&c, leaves).1, 48.0, "it should have arrived");
    admit(&mut c, 2, leaves, &[0, 0], 300);
    c.prefill_done(2, None, 470).unwrap();
    c.progress(2, 1, 475).unwrap();
    assert_eq!(expect(&c, leaves).1, 48.0, "it has arrived: it decodes");
    admit(&mut c, 3, leaves, &[0, 0], 500);
    c.prefill_done(3, None, 670).unwrap();
    c.finished(3, 671).unwrap();
    assert_eq!(expect(&c, leaves).1, 48.0, "given up on the way");
    admit(&mut c, 4, fetches, &[5, 0], 700);
    assert_eq!(
        expect(&c, leaves).1,
        5.0 + 3.0 + 4.0 * 2.0 * 10.0,
        "a fetched prefix takes its part of the link"
    );
    c.transfer_done(4, 701).unwrap();
    assert_eq!(expect(&c, leaves).1, 48.0);
}

#[test]
fn limits_hold() {
    let mut c = Fleet::new(Limits { instances: 1, requests: 1 }, BLOCK, 0);
    let bad =
        PrefillSpec { transfer: TransferCost { fixed_ms: f32::NAN, ms_per_block: 0.0 }, ..prefill_spec() };
    assert_eq!(c.register_prefill(bad, 0), Err(Error::Cost { table: "prefill" }));
    c.register_prefill(prefill_spec(), 0).unwrap();
    c.register_decode(decode_spec(), 0).unwrap();
    assert_eq!(c.register_prefill(prefill_spec(), 0), Err(Error::TableFull { table: "prefill", limit: 1 }));
    admit(&mut c, 1, Decision::run(0, 0), &[0], 0);
    let full = c.admit(2, &ask(1), &Decision::run(0, 0), found(&[0]), 0);
    assert_eq!(full, Err(Error::TooManyRequests { limit: 1 }));
}

/// Keeps the tables it was pushed and nothing else.
struct Nothing;

impl Scheduler for Nothing {
    fn describe(&self) -> Description {
        Description::scheduler("nothing", "0")
    }

    fn schedule(&mut self, _: &Cluster, _: &Request, _: Candidates<'_>) -> Decision {
        Decision::run(0, 0)
    }

    /// Shows the tables to the test.
    fn explain(&self, cluster: &Cluster, _: &Request, _: Candidates<'_>) -> Vec<f32> {
        let (p, d) = (&cluster.prefill, &cluster.decode);
        let prefill = [
            &p.available,
            &p.busy_until,
            &p.transfer_per_block,
            &p.send_per_block,
            &p.queued,
            &p.free_blocks,
        ];
        let same = [&p.identity, &p.peer, &p.domain, &p.waiting, &d.identity, &d.peer, &d.handover_per_block];
        let pairs = (0..9).map(|pair| cluster.links.between((pair / 3) as f32, (pair % 3) as f32));
        let links: Vec<f32> = pairs.flat_map(|link| [link.factor, link.under_way as f32]).collect();
        let decode = [&d.available, &d.sequences, &d.context_tokens, &d.free_blocks, &d.arriving_tokens];
        prefill.into_iter().chain(same).chain([&links]).chain(decode).flatten().copied().collect()
    }
}

/// A worker that follows the fleet.
struct Worker {
    kept: Kept<Nothing>,
    version: Version,
}

impl Worker {
    fn new() -> Self {
        Self { kept: Kept::new(Box::new(Nothing)), version: Version::default() }
    }

    fn follow(&mut self, fleet: &Fleet) {
        if let Some(changes) = fleet.changes_since(&mut self.version) {
            self.take(&changes);
        }
    }

    fn take(&mut self, changes: &Changes) {
        if let Some(layout) = changes.open {
            self.kept.open(&layout.encode());
        }
        self.kept.update_prefill(&changes.prefill);
        self.kept.update_decode(&changes.decode);
        self.kept.update_links(&changes.links);
    }

    fn sees(&mut self) -> Vec<f32> {
        self.kept.explain(0.0, &[])
    }
}

proptest! {
    /// Whatever happens, a worker that looks now and then sees what one that starts afresh sees, and
    /// when all requests are gone nothing stays booked.
    #[test]
    fn workers_that_follow_see_the_tables(
        events in prop::collection::vec((0u8..14, 0u64..6, 0u16..4, 0u64..400_000), 0..200),
    ) {
        let mut c = linked();
        for domain in 0..2 {
            c.register(Some(prefill_spec()), Some(decode_spec()), site(domain), 0).unwrap();
        }
        let (mut worker, mut told) = (Worker::new(), Told::default());
        let mut now = 0;
        for (kind, id, slot, passed) in events {
            now += if kind == 0 { passed } else { passed % 50 };
            c.tick(now);
            match kind {
                0 => {
                    worker.follow(&c);
                    told.catch_up(&c);
                }
                1 => drop(c.register_prefill(prefill_spec(), now)),
                2 => drop(c.register_decode(decode_spec(), now)),
                3 => drop(c.unregister_prefill(slot)),
                4 => drop(c.unregister_decode(slot)),
                5 => drop(c.prefill_done(id, None, now)),
                6 => drop(c.finished(id, now)),
                7 => drop(c.progress(id, 3, now)),
                8 => drop(c.set_prefill_available(slot, id > 1)),
                9 => {
                    let (prefill, decode) = (slot.into(), (slot % 2).into());
                    let decision = Decision::run(prefill, decode).fetching(prefill ^ 1, 2);
                    drop(c.admit(id, &ask(100), &decision, found(&[0, 9, 0, 9]), now));
                }
                10 => drop(c.register(Some(prefill_spec()), Some(decode_spec()), site((id % 3) as u32), now)),
                11 => drop(c.report_prefill(slot, Report { free_blocks: 3, waiting: Some(id as u32) }, now)),
                _ => {
                    let decision = Decision::run(slot.into(), (id % 4) as u32);
                    drop(c.admit(id, &ask(100), &decision, found(&[1, 2, 3, 4]), now));
                }
            }
        }
        worker.follow(&c);
        let mut fresh = Worker::new();
        fresh.follow(&c);
        prop_assert_eq!(worker.sees(), fresh.sees());
        prop_assert_eq!(c.changes_since(&mut worker.version), None);
        told.catch_up(&c);
        prop_assert_eq!(told.catch_up(&c), None);
        let mut successor = Worker::new();
        successor.take(&told.all());
        prop_assert_eq!(successor.sees(), fresh.sees());
        for slot in 0..8 {
            for decision in [Decision::run(slot, 0), Decision::run(0, slot).fetching(slot ^ 1, 2)] {
                prop_assert_eq!(told.check(&decision, found(&[1, 3])), c.check(&decision, found(&[1, 3])));
            }
        }

        c.expire(u64::MAX, now);
        prop_assert_eq!(c.in_flight(), 0);
        for slot in 0..c.decode_slots() as u16 {
            drop(c.set_decode_available(slot, true));
        }
        worker.follow(&c);
        let seen = worker.sees();
        let slots = c.decode_slots();
        let arriving = &seen[seen.len() - slots..];
        let (sequences, context) = (&seen[seen.len() - 4 * slots..][..slots], &seen[seen.len() - 3 * slots..][..slots]);
        let under_way: f32 = c.links.rows().chunks_exact(LINK_ROW).map(|link| link[4]).sum();
        prop_assert_eq!((under_way, c.handovers.len()), (0.0, 0));
        prop_assert!(arriving.iter().chain(sequences).chain(context).all(|&v| v == 0.0), "{:?}", seen);
    }
}
