//! A request as schedulers and admitters are told it: words 0 to 17 of a question
//! (`scheduling.schedule` in `wit/policy-0.1/scheduler.wit`).

/// Words of [`Request::encode`].
pub const REQUEST_WORDS: usize = 18;

/// One request. Times in ms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    pub prompt_tokens: u32,
    /// Expected; 0 = unknown.
    pub output_tokens: u32,
    /// 0 = unknown.
    pub class: u32,
    pub tenant: u32,
    /// Larger is sooner.
    pub priority: u32,
    /// Bits, see [`Request::must_run`] and [`Request::asked_again`].
    pub hints: u32,
    /// Equal for requests of one conversation; 0 = none.
    pub session: u64,
    /// Fresh with every request.
    pub seed: u64,
    /// +infinity = none.
    pub ttft_slo: f32,
    /// +infinity = none.
    pub tbt_slo: f32,
    /// Dense number from 1; 0 = the request names none.
    pub model: u32,
    /// LoRA adapter, dense number from 1; 0 = none.
    pub adapter: u32,
    /// What the decision for the last booked request of this session left; 0 = nothing, or it was forgotten.
    pub session_memo: u64,
    /// The sum of what decisions for this tenant charged; 0 = nothing, or it was forgotten.
    pub tenant_memo: u64,
}

/// A request of which nothing is known, without SLOs.
impl Default for Request {
    fn default() -> Self {
        Self {
            prompt_tokens: 0,
            output_tokens: 0,
            class: 0,
            tenant: 0,
            priority: 0,
            hints: 0,
            session: 0,
            seed: 0,
            ttft_slo: f32::INFINITY,
            tbt_slo: f32::INFINITY,
            model: 0,
            adapter: 0,
            session_memo: 0,
            tenant_memo: 0,
        }
    }
}

impl Request {
    /// Bit 0 of `hints`: the host asks not to reject, because the request has waited already.
    pub const MUST_RUN: u32 = 1;
    /// Bit 1 of `hints`: another decision overtook the last answer.
    pub const ASKED_AGAIN: u32 = 2;

    pub fn must_run(&self) -> bool {
        self.hints & Self::MUST_RUN != 0
    }

    pub fn asked_again(&self) -> bool {
        self.hints & Self::ASKED_AGAIN != 0
    }

    pub fn encode(&self) -> [u32; REQUEST_WORDS] {
        let halves = |long: u64| (long as u32, (long >> 32) as u32);
        let (session, seed) = (halves(self.session), halves(self.seed));
        let (session_memo, tenant_memo) = (halves(self.session_memo), halves(self.tenant_memo));
        [
            self.prompt_tokens,
            self.output_tokens,
            self.class,
            self.tenant,
            self.priority,
            self.hints,
            session.0,
            session.1,
            seed.0,
            seed.1,
            self.ttft_slo.to_bits(),
            self.tbt_slo.to_bits(),
            self.model,
            self.adapter,
            session_memo.0,
            session_memo.1,
            tenant_memo.0,
            tenant_memo.1,
        ]
    }

    /// Words beyond those known are ignored; absent ones are as in [`Request::default`].
    #[inline]
    pub fn decode(words: &[u32]) -> Self {
        match words.first_chunk() {
            Some(words) => Self::of_words(words),
            None => {
                let mut padded = Self::default().encode();
                padded[..words.len()].copy_from_slice(words);
                Self::of_words(&padded)
            }
        }
    }

    #[inline]
    fn of_words(words: &[u32; REQUEST_WORDS]) -> Self {
        let long = |at: usize| u64::from(words[at]) | u64::from(words[at + 1]) << 32;
        Self {
            prompt_tokens: words[0],
            output_tokens: words[1],
            class: words[2],
            tenant: words[3],
            priority: words[4],
            hints: words[5],
            session: long(6),
            seed: long(8),
            ttft_slo: f32::from_bits(words[10]),
            tbt_slo: f32::from_bits(words[11]),
            model: words[12],
            adapter: words[13],
            session_memo: long(14),
            tenant_memo: long(16),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_survive_their_words() {
        let request = Request {
            prompt_tokens: 1,
            output_tokens: 2,
            class: 3,
            tenant: 4,
            priority: 5,
            hints: 3,
            session: 6 << 40 | 7,
            seed: u64::MAX - 8,
            ttft_slo: 9.5,
            tbt_slo: 10.5,
            model: 11,
            adapter: 12,
            session_memo: 13 << 50 | 14,
            tenant_memo: 15 << 60,
        };
        let words = request.encode();
        assert_eq!(Request::decode(&words), request);
        assert!(request.must_run() && request.asked_again());
        assert_eq!(Request::decode(&[&words[..], &[99, 98]].concat()), request, "a later host says more");
        assert_eq!(Request::decode(&[]), Request::default());
        let short = Request::decode(&words[..11]);
        assert_eq!((short.ttft_slo, short.tbt_slo, short.model), (9.5, f32::INFINITY, 0));
    }
}
