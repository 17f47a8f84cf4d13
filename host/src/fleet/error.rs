use super::RETRY_MAX_MS;
use kvasir_policy::scheduler::REASONS;

/// Why an event could not be applied. The state is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the {table} table is full with {limit} instances; unregister one or raise the limit")]
    TableFull { table: &'static str, limit: usize },
    #[error("no {table} instance in slot {slot}; register it again")]
    NoInstance { table: &'static str, slot: u16 },
    #[error("{table} instance: cost coefficients must be finite and not negative")]
    Cost { table: &'static str },
    #[error("{limit} requests are in flight; finish or expire some, or raise the limit")]
    TooManyRequests { limit: usize },
    #[error("request {id} is in flight already; ids must be unique")]
    RequestExists { id: u64 },
    #[error("request {id} is not in flight: never admitted, finished or expired")]
    NoRequest { id: u64 },
    #[error("decision refused: {0}")]
    Invalid(#[from] Invalid),
}

/// Why a policy's answer is not acted on; the native fallback decides instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("{table} slot {slot} is outside the table of {slots}")]
    SlotOutside { table: &'static str, slot: u32, slots: u32 },
    #[error("{table} slot {slot} is unavailable")]
    Unavailable { table: &'static str, slot: u32 },
    #[error("the instance in {table} slot {slot} does not serve the request's model")]
    Ineligible { table: &'static str, slot: u32 },
    #[error("transfer from prefill slot {slot} to itself")]
    TransferToItself { slot: u32 },
    #[error(
        "transfer of {blocks} blocks from prefill slot {source_slot}, which holds {beyond} beyond the chosen one's own"
    )]
    TransferTooLong { source_slot: u32, blocks: u32, beyond: u32 },
    #[error("rejection for {retry_after_ms} ms; {RETRY_MAX_MS} at most, a day")]
    RetryTooLong { retry_after_ms: u32 },
    #[error("rejection for reason {reason}; the contract has {} to {}", REASONS.start(), REASONS.end())]
    UnknownReason { reason: u32 },
    #[error(
        "{scores} scores for {prefill} prefill and {decode} decode slots; give one for each prefill slot, for each slot of both, or none"
    )]
    Scores { scores: usize, prefill: usize, decode: usize },
    #[error("score {slot} is {score}, which is in no order with others")]
    Score { slot: usize, score: String },
}
