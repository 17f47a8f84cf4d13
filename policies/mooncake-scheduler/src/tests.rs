//! Pins the policy to a slow transcription of Algorithm 1, line by line, on random tables.

use super::*;
use kvasir_policy::scheduler::{
    Column, DecodeRow, Kept, Layout, Link, Placement, PrefillRow, Question, REQUEST_WORDS,
};
use proptest::prelude::*;

/// Domains of the instances; 0 is none of them.
const DOMAINS: u32 = 3;

/// Algorithm 1 of the Mooncake paper (FAST '25), lines 1 to 22. The host does line 1: `prefix_len`. With `links`, the way counts.
fn algorithm_1(
    prefill: &[PrefillRow],
    decode: &[DecodeRow],
    question: &Question,
    block: u32,
    kvcache_balancing_threshold: f32,
    links: Option<&[Link]>,
) -> Decision {
    let (now, r, candidates) = (question.now(), Request::decode(question.words()), question.candidates());
    let prefix_len: Vec<u32> = (0..prefill.len()).map(|i| candidates.prefix_of(i)).collect();
    let exceeds = |best: u32, own: u32| {
        // Lines 5 and 20: best / own > threshold; a prefix of nothing is shorter by any factor.
        best > own && (own == 0 || best as f32 > kvcache_balancing_threshold * own as f32)
    };
    let between =
        |from: u32, to: u32| links.map_or_else(Link::default, |links| links[(from * DOMAINS + to) as usize]);
    // 2
    let (mut ttft, mut p) = (f32::INFINITY, None);
    // 3: of those that can send it, the first of the longest
    let (mut best_len, mut best_instance) = (0, 0);
    for (i, instance) in prefill.iter().enumerate() {
        if instance.available && prefix_len[i] > best_len {
            (best_len, best_instance) = (prefix_len[i], i);
        }
    }
    // 4
    for (i, instance) in prefill.iter().enumerate() {
        if !instance.available || !candidates.can_prefill(i) {
            continue;
        }
        // 5 to 11
        let (prefix, t_transfer) = if exceeds(best_len, prefix_len[i]) {
            let transfer_len = best_len - prefix_len[i];
            let link = between(prefill[best_instance].domain, instance.domain);
            let fixed = link.fixed + instance.transfer_fixed;
            let sent = prefill[best_instance].send_per_block;
            let per_block = (link.factor * instance.transfer_per_block).max(sent);
            (best_len, fixed + per_block * transfer_len as f32)
        } else {
            (prefix_len[i], 0.0)
        };
        // 12
        let t_queue = (instance.busy_until - now).max(0.0);
        // 13
        let prompt = r.prompt_tokens as f32;
        let cached = (prefix as f32 * block as f32).min(prompt);
        let computed = prompt - cached;
        let per_token = instance.cost_per_token + instance.cost_per_pair * 0.5 * (prompt + cached);
        let t_prefill = instance.cost_fixed + computed * per_token;
        // 14 to 16
        let sum = t_transfer + t_queue + t_prefill;
        if ttft > sum {
            (ttft, p) = (sum, Some(i));
        }
    }
    // 17: the decode instance with the least time between tokens that has room; with links, until the next token
    let (mut tbt, mut least, mut d) = (f32::INFINITY, f32::INFINITY, None);
    let blocks = ((r.prompt_tokens as f32 + r.output_tokens as f32) / block as f32).ceil();
    for (i, instance) in decode.iter().enumerate() {
        let batch = instance.sequences as f32 + instance.arriving_sequences as f32 + 1.0;
        let context = instance.context_tokens as f32 + instance.arriving_tokens as f32;
        let joined =
            instance.step_fixed + instance.step_per_sequence * batch + instance.step_per_token * context;
        let attended = instance.step_per_token * r.prompt_tokens as f32;
        let handed_over = match (links, p) {
            (Some(_), Some(p)) if prefill[p].peer != Some(i as u16) => {
                let link = between(prefill[p].domain, instance.domain);
                let moved = r.prompt_tokens.div_ceil(block).saturating_sub(candidates.prefix_of_decode(i));
                let per_block = (link.factor * instance.handover_per_block).max(prefill[p].send_per_block);
                link.fixed + instance.handover_fixed + per_block * moved as f32
            }
            _ => 0.0,
        };
        let next = joined + handed_over + attended;
        let serves = instance.available && candidates.can_decode(i);
        if serves && instance.free_blocks as f32 >= blocks && least > next {
            (tbt, least, d) = (joined + attended, next, Some(i));
        }
    }
    let Some(p) = p else { return Decision::reject(Reason::NoInstance, 1_000) };
    let Some(d) = d else {
        let any = decode.iter().enumerate().any(|(i, d)| d.available && candidates.can_decode(i));
        return Decision::reject(if any { Reason::NoMemory } else { Reason::NoInstance }, 1_000);
    };
    // 18, 19
    if !r.must_run() {
        if ttft > r.ttft_slo {
            return Decision::reject(Reason::Ttft, (ttft - r.ttft_slo) as u32);
        }
        if tbt > r.tbt_slo {
            return Decision::reject(Reason::Tbt, 1_000);
        }
    }
    // 20, 21
    let decision = Decision::run(p as u32, d as u32);
    // 22
    if exceeds(best_len, prefix_len[p]) {
        decision.fetching(best_instance as u32, best_len - prefix_len[p])
    } else {
        decision
    }
}

/// Few distinct values, so that ties, empty and equal prefixes occur.
fn prefill_row() -> impl Strategy<Value = (PrefillRow, u32)> {
    let times = (0..4u32, 0..3u32, 0..3u32, 0..3u32, 0..4u32, 0..4u32, 0..4u32, 0..DOMAINS);
    let prefix = prop_oneof![Just(0u32), 0..5u32, 0..200u32];
    (prop::bool::weighted(0.8), times, prefix).prop_map(
        |(available, (busy, c0, c1, c2, t0, t1, sent, domain), prefix)| {
            let row = PrefillRow {
                available,
                busy_until: busy as f32 * 300.0,
                cost_fixed: c0 as f32 * 5.0,
                cost_per_token: c1 as f32 * 0.1,
                cost_per_pair: c2 as f32 * 1e-5,
                transfer_fixed: t0 as f32 * 3.0,
                transfer_per_block: t1 as f32 * 1.7,
                send_per_block: sent as f32 * 2.3,
                domain,
                ..PrefillRow::default()
            };
            (row, prefix)
        },
    )
}

fn decode_row() -> impl Strategy<Value = DecodeRow> {
    let hand_over = (0..3u32, 0..3u32, 0..DOMAINS);
    (prop::bool::weighted(0.8), 0..40u32, 0..9_000u64, 0..400u32, 0..3u32, 0..5u32, hand_over).prop_map(
        |(available, sequences, context_tokens, free_blocks, cost, arriving_sequences, (h0, h1, domain))| {
            DecodeRow {
                available,
                sequences,
                context_tokens,
                free_blocks,
                step_fixed: 10.0,
                step_per_sequence: cost as f32 * 0.3,
                step_per_token: 0.001 * cost as f32,
                arriving_sequences,
                arriving_tokens: u64::from(arriving_sequences) * 500,
                handover_fixed: h0 as f32,
                handover_per_block: h1 as f32 * 0.3,
                domain,
                ..DecodeRow::default()
            }
        },
    )
}

fn request() -> impl Strategy<Value = Request> {
    let slo = || prop_oneof![3 => Just(f32::INFINITY), 1 => 0.0..600.0f32, 1 => 10.0..40.0f32];
    (0..4_000u32, 0..500u32, slo(), slo(), prop::bool::weighted(0.2)).prop_map(
        |(prompt_tokens, output_tokens, ttft_slo, tbt_slo, must_run)| Request {
            prompt_tokens,
            output_tokens,
            ttft_slo,
            tbt_slo,
            hints: u32::from(must_run),
            ..Request::default()
        },
    )
}

/// Between any two domains, from and to, row by row.
fn links() -> impl Strategy<Value = Vec<Link>> {
    let link = (0..3u32, 0..4u32).prop_map(|(fixed, factor)| Link {
        fixed: fixed as f32 * 4.0,
        factor: factor as f32,
        under_way: 0,
    });
    prop::collection::vec(link, (DOMAINS * DOMAINS) as usize)
}

fn kept(prefill: &[PrefillRow], decode: &[DecodeRow], block: u32, threshold: f32) -> Kept<Mooncake> {
    let mut kept = Kept::new(Box::<Mooncake>::default());
    let layout = Layout::of(prefill.len() as u32, decode.len() as u32, block);
    kept.open(&Layout { domains: DOMAINS, ..layout }.encode());
    kept.update_prefill(&prefill.iter().flat_map(PrefillRow::encode).collect::<Vec<_>>());
    kept.update_decode(&decode.iter().flat_map(DecodeRow::encode).collect::<Vec<_>>());
    kept.set_thresholds(&[threshold]);
    kept
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn decides_as_algorithm_1(
        prefill in prop::collection::vec(prefill_row(), 0..20),
        mut decode in prop::collection::vec(decode_row(), 0..20),
        (now, request) in (0.0..500.0f32, request()),
        threshold in prop_oneof![Just(1.0f32), Just(1.5), 0.5..8.0f32],
        block in prop_oneof![Just(16u32), Just(512)],
        fits in prop_oneof![Just(vec![1; 40]), prop::collection::vec(0..3u32, 40)],
        (links, there) in (prop::option::of(links()), prop::collection::vec(0..9u32, 20)),
        same in prop::option::of((any::<prop::sample::Index>(), any::<prop::sample::Index>())),
    ) {
        let (mut rows, prefix): (Vec<PrefillRow>, Vec<u32>) = prefill.into_iter().unzip();
        rows.iter_mut().enumerate().for_each(|(slot, row)| row.slot = slot as u16);
        decode.iter_mut().enumerate().for_each(|(slot, row)| row.slot = slot as u16);
        // One instance may do both.
        if let Some((p, d)) = same.filter(|_| !rows.is_empty() && !decode.is_empty()) {
            let (p, d) = (p.index(rows.len()), d.index(decode.len()));
            (rows[p].peer, decode[d].peer) = (Some(d as u16), Some(p as u16));
        }
        let can = (&fits[..rows.len()], &fits[20..20 + decode.len()]);
        let mut policy = kept(&rows, &decode, block, threshold);
        if let Some(links) = &links {
            let pairs = (0..DOMAINS).flat_map(|from| (0..DOMAINS).map(move |to| (from, to)));
            let rows = links.iter().zip(pairs).map(|(link, (from, to))| link.encode(from, to));
            policy.update_links(&rows.collect::<Vec<_>>().concat());
        }
        let some = fits.contains(&0);
        let mut question = Question::new(now, &request, rows.len(), decode.len()).with(Column::Prefix, &prefix);
        if some {
            question = question.with(Column::EligiblePrefill, can.0);
        }
        question = question.with(Column::PrefixAtDecode, &there[..decode.len()]);
        if some {
            question = question.with(Column::EligibleDecode, can.1);
        }
        let expected = algorithm_1(&rows, &decode, &question, block, threshold, links.as_deref());
        prop_assert_eq!(policy.schedule(now, question.words()), expected);

        // The score column explains the choice: nothing is better than what was chosen.
        let scores = policy.explain(now, question.words());
        prop_assert_eq!(scores.len(), rows.len());
        if let Decision::Run(Placement { prefill, .. }) = expected {
            prop_assert!(scores.iter().all(|&score| score >= scores[prefill as usize]));
        }
    }

    /// Rows and requests are the host's responsibility; even so, nothing in them may stop a policy.
    #[test]
    fn no_input_panics(
        rows in prop::collection::vec(any::<f32>(), 0..120),
        slots in 0..12u32,
        (block, now) in (any::<u32>(), prop_oneof![any::<f32>(), Just(f32::NAN), Just(f32::INFINITY)]),
        question in prop::collection::vec(any::<u32>(), 0..80),
        columns in 0..64u32,
        thresholds in prop::collection::vec(any::<f32>(), 0..3),
    ) {
        let mut policy = Kept::new(Box::<Mooncake>::default());
        policy.open(&Layout { domains: DOMAINS, ..Layout::of(slots, slots, block) }.encode());
        policy.update_prefill(&rows);
        policy.update_decode(&rows);
        policy.update_links(&rows);
        policy.set_thresholds(&thresholds);
        let mut question = question;
        if let Some(present) = question.get_mut(REQUEST_WORDS) {
            *present = columns;
        }
        policy.explain(now, &question);
        if let Decision::Run(Placement { prefill, decode, .. }) = policy.schedule(now, &question) {
            prop_assert!(prefill < slots && decode < slots);
        }
    }
}

/// The cases that random tables seldom show one by one.
#[test]
fn both_branches_and_every_rejection() {
    let prefill = |slot, busy_until| PrefillRow {
        slot,
        available: true,
        busy_until,
        cost_per_token: 1.0,
        transfer_per_block: 2.0,
        ..PrefillRow::default()
    };
    let decode =
        |free_blocks| DecodeRow { available: true, free_blocks, step_fixed: 30.0, ..DecodeRow::default() };
    let request = Request { prompt_tokens: 160, ttft_slo: 200.0, tbt_slo: 50.0, ..Request::default() };
    let check = |busy: f32, room: u32, request: Request, expected: Decision| {
        let mut policy = kept(&[prefill(0, busy), prefill(1, 0.0)], &[decode(room)], 16, 1.5);
        let question = Question::new(0.0, &request, 2, 1).with(Column::Prefix, &[10, 2]);
        assert_eq!(policy.schedule(0.0, question.words()), expected);
    };
    check(0.0, 10, request, Decision::run(0, 0));
    check(100.0, 10, request, Decision::run(1, 0).fetching(0, 8));
    check(10.0, 9, request, Decision::reject(Reason::NoMemory, 1_000));
    check(10.0, 10, Request { tbt_slo: 29.0, ..request }, Decision::reject(Reason::Tbt, 1_000));
    check(100.0, 10, Request { ttft_slo: 6.0, ..request }, Decision::reject(Reason::Ttft, 10));
    check(10.0, 10, Request { ttft_slo: 6.0, hints: 1, ..request }, Decision::run(0, 0));
}
