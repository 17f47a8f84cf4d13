//! The simulated engines, and the requests on their way through them.

use super::super::pool::Touch;
use super::chunks::Chunks;
use super::decode::Decode;
use super::prefill::Prefill;
use super::tally::Parts;

/// A request in flight.
pub(super) struct Job {
    /// The request as the conductor knows it.
    pub(super) booked: u64,
    pub(super) arrived_us: u64,
    pub(super) chain: Vec<u64>,
    pub(super) touch: Touch,
    pub(super) prompt_tokens: u64,
    pub(super) output_tokens: u64,
    pub(super) prefill: usize,
    pub(super) decode: usize,
    /// Leading blocks at the prefill instance when it was decided, and those fetched behind them.
    pub(super) own_blocks: usize,
    pub(super) fetched_blocks: usize,
    /// `None` means that its prompt is not computed.
    pub(super) first_token_us: Option<u64>,
    /// What goes to where it is decoded, and whether that has arrived; all but the last layer, while it is computed.
    pub(super) handed_over_blocks: u32,
    pub(super) sent: bool,
    /// When the part of its way began that it is in; and how long those took that have ended.
    pub(super) part_us: u64,
    pub(super) parts: Parts,
}

/// One simulated engine.
pub(super) struct Instance<'e> {
    pub(super) name: String,
    pub(super) epoch: u64,
    /// How many messages about its blocks were sent.
    pub(super) sequence: u64,
    pub(super) prefill: Option<Prefill<'e>>,
    pub(super) decode: Option<Decode>,
    /// Distinguishes the plan that holds from those made before it.
    pub(super) plan: u64,
}

impl<'e> Instance<'e> {
    pub(super) fn new(
        name: String,
        epoch: u64,
        prefill: Option<Prefill<'e>>,
        decode: Option<Decode>,
    ) -> Self {
        Self { name, epoch, sequence: 0, prefill, decode, plan: 0 }
    }

    /// The prompt that can be begun between steps.
    pub(super) fn ready(&self) -> Option<u64> {
        self.prefill.as_ref()?.ready(self.sequences())
    }

    fn sequences(&self) -> usize {
        self.decode.as_ref().map_or(0, Decode::sequences)
    }

    /// Lets in requests that wait to be decoded, and fit.
    pub(super) fn admit(&mut self) {
        if let Some(decode) = &mut self.decode {
            decode.admit();
        }
    }

    /// Returns how many prompts at the head of the queue are computed, if the last step had chunks of such.
    pub(super) fn end_chunks(&mut self) -> usize {
        let Self { prefill: Some(prefill), decode: Some(decode), .. } = self else { return 0 };
        let chunks = prefill.chunks().filter(|chunks| chunks.is_under_way() && !decode.has_beside());
        chunks.map_or(0, Chunks::end_step)
    }

    /// Has the step that begins compute what there is in chunks.
    pub(super) fn begin_chunks(&mut self) {
        let sequences = self.sequences();
        let Self { prefill: Some(prefill), decode: Some(decode), .. } = self else { return };
        if let Some(chunks) = prefill.chunks() {
            decode.set_beside(chunks.step(sequences));
        }
    }

    /// Time at work until `now_ms`, which is not before anything that it was told.
    pub(super) fn busy_until_ms(&self, now_ms: f64) -> f64 {
        self.busy_ms() - self.prefill.as_ref().map_or(0.0, |prefill| prefill.ahead_ms(now_ms))
    }

    /// Time at work so far, and of the prompt that it computes now all.
    pub(super) fn busy_ms(&self) -> f64 {
        let decode = self.decode.as_ref().map_or(0.0, Decode::busy_ms);
        self.prefill.as_ref().map_or(0.0, Prefill::busy_ms) + decode
    }
}
