//! What policies answer, as numbers: a placement, behind the tables that it is about (`d`); scores (`s`); a verdict on a request
//! (`v`) or on blocks (`b`); thresholds (`t`). The host acts on none that is outside the contract.

use crate::input::Input;
use crate::kind;
use crate::text::told;
use kvasir::fleet::{Changes, RETRY_MAX_MS, Told, check_scores};
use kvasir::policy::{admitter, balancer};
use kvasir_policy::admitter::Verdict;
use kvasir_policy::scheduler::{
    Answer, Decision, DecodeRow, Layout, Placement, PrefillRow, Question, Transfer,
};

/// Slots of a table.
const SLOTS: u8 = 9;

pub(crate) fn run(data: &[u8]) {
    match kind(data) {
        Some((b'd', words)) => decision(&mut Input(words)),
        Some((b's', words)) => scores(&mut Input(words)),
        Some((b'v', bits)) => verdict(Input(bits).u64()),
        Some((b'b', words)) => stored(&mut Input(words)),
        Some((b't', words)) => thresholds(&mut Input(words)),
        _ => {}
    }
}

fn floats(input: &mut Input<'_>) -> Vec<f32> {
    input.0.chunks_exact(4).map(|word| f32::from_bits(Input(word).u32())).collect()
}

/// Which slots of both tables take requests, by bits.
struct Fleet {
    prefill: Vec<bool>,
    decode: Vec<bool>,
}

impl Fleet {
    fn of(input: &mut Input<'_>) -> Self {
        let mut table = || {
            let (slots, bits) = (input.byte() % SLOTS, input.u16());
            (0..slots).map(|slot| bits >> slot & 1 == 1).collect()
        };
        Self { prefill: table(), decode: table() }
    }

    fn told(&self) -> Told {
        let (prefill_slots, decode_slots) = (self.prefill.len() as u32, self.decode.len() as u32);
        let open = Some(Layout { prefill_slots, decode_slots, ..Layout::default() });
        let rows = |table: &[bool]| -> Vec<(u16, bool)> { (0..).zip(table.iter().copied()).collect() };
        let prefill = rows(&self.prefill).into_iter();
        let prefill =
            prefill.map(|(slot, available)| PrefillRow { slot, available, ..PrefillRow::default() });
        let decode = rows(&self.decode).into_iter();
        let decode = decode.map(|(slot, available)| DecodeRow { slot, available, ..DecodeRow::default() });
        let mut told = Told::default();
        told.apply(&Changes {
            open,
            prefill: prefill.flat_map(|row| row.encode()).collect(),
            decode: decode.flat_map(|row| row.encode()).collect(),
            links: Vec::new(),
        });
        told
    }
}

fn decision(input: &mut Input<'_>) {
    let fleet = Fleet::of(input);
    let [prefill, decode, transfer_blocks, source, reason, retry_after] = [(); 6].map(|()| input.u32());
    let (session_memo, tenant_charge) = (input.u64(), input.u64());
    let answer =
        Answer { prefill, decode, transfer_blocks, source, reason, retry_after, session_memo, tenant_charge };
    let words: Vec<u32> = input.0.chunks_exact(4).map(|word| Input(word).u32()).collect();
    let question = Question::of_words(0.0, &words, fleet.prefill.len(), fleet.decode.len());
    let (decision, candidates) = (Decision::from(answer), question.candidates());
    if let Err(refusal) = fleet.told().check(&decision, candidates) {
        return drop(told(&refusal));
    }
    match decision {
        Decision::Reject { retry_after_ms, .. } => assert!(retry_after_ms <= RETRY_MAX_MS),
        Decision::Run(Placement { prefill, decode, transfer, .. }) => {
            assert!(fleet.prefill[prefill as usize] && fleet.decode[decode as usize]);
            assert!(candidates.can_prefill(prefill as usize) && candidates.can_decode(decode as usize));
            let Some(Transfer { source, blocks }) = transfer else { return };
            assert!(fleet.prefill[source as usize] && source != prefill);
            let held = |slot: u32| candidates.prefix_of(slot as usize);
            assert!(held(prefill).checked_add(blocks).is_some_and(|blocks| blocks <= held(source)));
        }
    }
}

fn scores(input: &mut Input<'_>) {
    let (prefill, decode) = (usize::from(input.byte() % SLOTS), usize::from(input.byte() % SLOTS));
    let scores = floats(input);
    match check_scores(&scores, prefill, decode) {
        Ok(()) => {
            assert!([0, prefill, prefill + decode].contains(&scores.len()));
            // They can be put in an order.
            assert!(scores.iter().all(|score| score.partial_cmp(score).is_some()));
        }
        Err(refusal) => drop(told(&refusal)),
    }
}

fn verdict(bits: u64) {
    match admitter::verdict(bits) {
        Ok(verdict) => {
            assert_eq!(admitter::verdict(verdict.pack()).ok(), Some(verdict));
            if let Verdict::Reject { retry_after_ms, .. } = verdict {
                assert!(retry_after_ms <= RETRY_MAX_MS);
            }
        }
        Err(refusal) => drop(told(&refusal)),
    }
}

fn stored(input: &mut Input<'_>) {
    let blocks = usize::from(input.byte());
    let answers: Vec<u32> = input.0.chunks_exact(4).map(|word| Input(word).u32()).collect();
    match admitter::stored(&answers, blocks) {
        Ok(stored) => assert_eq!(stored.len(), blocks),
        Err(refusal) => drop(told(&refusal)),
    }
}

fn thresholds(input: &mut Input<'_>) {
    match balancer::checked(floats(input)) {
        Ok(thresholds) => assert!(thresholds.iter().all(|threshold| threshold.is_finite())),
        Err(refusal) => drop(told(&refusal)),
    }
}
