use super::*;

#[test]
fn decisions_survive_their_record() {
    let placement = Placement {
        prefill: 70_000,
        decode: u32::MAX,
        transfer: Some(Transfer { source: u32::MAX - 1, blocks: u32::MAX }),
        session_memo: u64::MAX,
        tenant_charge: 1 << 63,
    };
    for decision in [
        Decision::run(0, 0),
        Decision::run(u32::MAX - 1, u32::MAX),
        Decision::run(7, 9).fetching(3, 4),
        Decision::Run(placement),
        Decision::reject(Reason::Tbt, u32::MAX),
    ] {
        assert_eq!(Decision::from(Answer::from(decision)), decision);
    }
    assert_eq!(Decision::run(7, 9).fetching(3, 0), Decision::run(7, 9));
    let noise = Answer { prefill: 1, decode: 2, source: 77, reason: 3, retry_after: 4, ..Answer::default() };
    assert_eq!(Decision::from(noise), Decision::run(1, 2), "numbers that are not read may have any value");
}

#[test]
fn rows_land_in_columns_and_bad_slots_are_skipped() {
    let mut table = PrefillTable::default();
    table.reset(2);
    let row = PrefillRow {
        slot: 1,
        available: true,
        busy_until: 5.0,
        reported_at: 3.0,
        identity: 4,
        host: Some(7),
        adapters: Some(3),
        adapters_max: Some(3),
        ..Default::default()
    };
    let outside = PrefillRow { slot: 2, ..row };
    table.update(&[row.encode(), outside.encode()].concat(), PREFILL_ROW as u32);
    assert_eq!(table.available, [0.0, 1.0]);
    assert_eq!(table.busy_until, [0.0, 5.0]);
    assert_eq!(table.reported_at, [0.0, 3.0]);
    assert_eq!(table.free_at, [f32::INFINITY, 5.0]);
    assert_eq!((table.identity[1], table.host_of(1), table.peer_of(1)), (4.0, Some(7), None));
    assert_eq!((table.host_of(2), table.waiting_at(1)), (None, None));
    assert_eq!([0, 1, 2].map(|slot| table.holds_no_more_adapters(slot)), [false, true, false]);
    table.update(&[f32::NAN; PREFILL_ROW], PREFILL_ROW as u32); // NaN casts to slot 0; values are the host's to check
    assert_eq!(table.available[1], 1.0);
}

/// Answers with what it sees.
struct Mirror;

impl Scheduler for Mirror {
    fn describe(&self) -> Description {
        Description::scheduler("mirror", "0")
    }

    fn schedule(&mut self, cluster: &Cluster, request: &Request, candidates: Candidates<'_>) -> Decision {
        let prefix = candidates.prefix_of(1);
        Decision::Run(Placement {
            prefill: cluster.prefill.peer_of(1).map_or(99, |peer| peer as u32),
            decode: cluster.decode.handover_per_block.get(1).map_or(99, |cost| *cost as u32),
            transfer: Some(Transfer { source: request.prompt_tokens, blocks: prefix }),
            ..Placement::default()
        })
    }
}

fn mirrored(kept: &mut Kept<Mirror>, question: &[u32]) -> (u32, u32, u32, u32) {
    match kept.schedule(0.0, question) {
        Decision::Run(Placement { prefill, decode, transfer: Some(t), .. }) => {
            (prefill, decode, t.source, t.blocks)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_later_host_may_say_more_in_every_record() {
    let prefill = PrefillRow { slot: 1, peer: Some(3), ..PrefillRow::default() };
    let decode = DecodeRow { slot: 1, handover_per_block: 5.0, ..DecodeRow::default() };
    let request = Request { prompt_tokens: 640, ..Request::default() };
    let question = Question::new(0.0, &request, 2, 2).with(Column::Prefix, &[8, 9]);
    for more in [0, 1, 7] {
        let layout = Layout {
            prefill_row: (PREFILL_ROW + more) as u32,
            decode_row: (DECODE_ROW + more) as u32,
            request_words: (HEAD_WORDS + more) as u32,
            link_row: (LINK_ROW + more) as u32,
            domains: 2,
            ..Layout::of(2, 2, 16)
        };
        let mut kept = Kept::new(Box::new(Mirror));
        kept.open(&[&layout.encode()[..], &vec![77; more]].concat());
        let longer = |row: &[f32]| [row, &vec![88.0; more]].concat();
        let other = PrefillRow { slot: 0, ..PrefillRow::default() };
        kept.update_prefill(&[longer(&other.encode()), longer(&prefill.encode())].concat());
        kept.update_decode(&[longer(&DecodeRow::default().encode()), longer(&decode.encode())].concat());
        let link = Link { fixed: 1.0, factor: 2.0, under_way: 3 };
        kept.update_links(&[longer(&Link::default().encode(0, 0)), longer(&link.encode(1, 0))].concat());
        let (head, columns) = question.words().split_at(HEAD_WORDS);
        let question = [head, &vec![66; more], columns].concat();
        assert_eq!(mirrored(&mut kept, &question), (3, 5, 640, 9), "{more} more");
        assert_eq!(kept.cluster.links.between(1.0, 0.0), link);
        assert_eq!(kept.cluster.links.between(0.0, 1.0), Link::default());
    }
}

#[test]
fn lists_that_are_too_short_mean_what_was_not_said() {
    let layout = Layout::of(2, 2, 16).encode();
    for words in 0..=layout.len() {
        let mut kept = Kept::new(Box::new(Mirror));
        kept.open(&layout[..words]);
        for values in 0..40 {
            kept.update_prefill(&vec![1.0; values]);
            kept.update_decode(&vec![1.0; values]);
            kept.update_links(&vec![0.0; values]);
        }
        for question in 0..30 {
            kept.schedule(0.0, &vec![u32::MAX; question]);
            kept.explain(0.0, &vec![u32::MAX; question]);
        }
    }
    let mut kept = Kept::new(Box::new(Mirror));
    kept.open(&Layout { prefill_row: 0, decode_row: 0, link_row: 0, ..Layout::of(1, 1, 16) }.encode());
    kept.update_prefill(&[0.0; 5]);
    kept.update_decode(&[0.0; 5]);
    kept.update_links(&[0.0; 5]);
    assert_eq!(kept.cluster.prefill.peer_of(0), None, "not said");
    assert_eq!(kept.cluster.prefill.adapters_max, [-1.0], "not said");
    assert_eq!(kept.cluster.links.between(f32::NAN, f32::MAX), Link::default());
}

#[test]
fn what_stays_on_an_instance_costs_nothing_to_move() {
    let mut kept = Kept::new(Box::new(Mirror));
    kept.open(&Layout { domains: 2, ..Layout::of(2, 2, 16) }.encode());
    let prefill = |slot, domain, peer| PrefillRow {
        slot,
        domain,
        peer,
        transfer_fixed: 1.0,
        transfer_per_block: 2.0,
        ..PrefillRow::default()
    };
    let decode = |slot, domain| DecodeRow {
        slot,
        domain,
        handover_fixed: 3.0,
        handover_per_block: 4.0,
        ..DecodeRow::default()
    };
    kept.update_prefill(&[prefill(0, 0, Some(1)).encode(), prefill(1, 1, None).encode()].concat());
    kept.update_decode(&[decode(0, 1).encode(), decode(1, 0).encode()].concat());
    kept.update_links(&Link { fixed: 10.0, factor: 0.5, under_way: 0 }.encode(0, 1));
    let c = &kept.cluster;
    assert_eq!((c.fetch_ms(0, 0, 8), c.fetch_ms(0, 1, 0)), (0.0, 0.0));
    assert_eq!((c.fetch_ms(0, 1, 8), c.fetch_ms(1, 0, 8)), (10.0 + 1.0 + 8.0, 1.0 + 16.0));
    assert_eq!((c.handover_ms(0, 1, 8), c.handover_ms(0, 0, 8)), (0.0, 10.0 + 3.0 + 16.0));
    assert_eq!((c.handover_ms(1, 0, 8), c.handover_ms(1, 1, 8)), (3.0 + 32.0, 3.0 + 32.0));
}
