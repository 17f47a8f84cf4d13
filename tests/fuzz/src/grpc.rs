//! Messages of the gRPC contract: a byte that chooses one, and its bytes. What decodes is held against what callers may send;
//! what is refused is refused with the name of a field, and what is accepted is within the bounds of what acts on it.

use crate::text::told;
use kvasir::rpc::validate;
use kvasir_proto as proto;
use prost::Message;
use std::fmt::Display;

/// Of the host that is asked.
const BLOCK_SIZE_TOKENS: u32 = 16;
/// A message on its way through a service.
type Tried = fn(&[u8]);

pub(crate) fn run(data: &[u8]) {
    /// Those that are checked as a whole.
    const CHECKED: [Tried; 9] = [
        |bytes| checked::<proto::RegisterRequest, _>(bytes, validate::register),
        |bytes| checked::<proto::ReportLoadRequest, _>(bytes, validate::report),
        |bytes| checked(bytes, |asked: &proto::ScheduleRequest| validate::schedule(asked, BLOCK_SIZE_TOKENS)),
        |bytes| checked::<proto::CompleteRequest, _>(bytes, validate::complete),
        |bytes| checked::<proto::LoadRequest, _>(bytes, validate::load),
        |bytes| checked::<proto::ConfigureRequest, _>(bytes, validate::configure),
        |bytes| checked(bytes, |told: &proto::LookupPrefixRequest| validate::chain(&told.blocks)),
        |bytes| {
            let check = |told: &proto::BlocksStoredRequest| {
                validate::blocks_message(&told.name, told.sequence, &told.blocks)
            };
            checked(bytes, check);
        },
        |bytes| {
            let check = |told: &proto::BlocksRemovedRequest| {
                validate::blocks_message(&told.name, told.sequence, &told.blocks)
            };
            checked(bytes, check);
        },
    ];
    /// Those of which the host looks at single fields, and what it answers to a client of ours.
    const READ: [Tried; 18] = [
        read::<proto::UnregisterRequest>,
        read::<proto::ResetBlocksRequest>,
        read::<proto::ExplainBlockRequest>,
        read::<proto::ExplainDecisionRequest>,
        read::<proto::FollowRequest>,
        read::<proto::FetchRequest>,
        read::<proto::PushRequest>,
        read::<proto::RemoveRequest>,
        read::<proto::StatRequest>,
        read::<proto::ExistsRequest>,
        read::<proto::StartRolloutRequest>,
        read::<proto::ChangeRolloutRequest>,
        read::<proto::HistoryRequest>,
        read::<proto::LogsRequest>,
        read::<proto::PromoteRequest>,
        read::<proto::ScheduleResponse>,
        read::<proto::LookupPrefixResponse>,
        read::<proto::RegisterResponse>,
    ];
    let Some((&which, bytes)) = data.split_first() else { return };
    let which = usize::from(which) % (CHECKED.len() + READ.len());
    CHECKED.iter().chain(&READ).nth(which).expect("one of them")(bytes);
}

/// What decodes is encoded, and decodes as the same.
fn again<M: Message + Default>(bytes: &[u8]) -> Option<M> {
    let message = M::decode(bytes).ok()?;
    let encoded = message.encode_to_vec();
    let second = M::decode(&encoded[..]).expect("what is written reads").encode_to_vec();
    assert_eq!(second, encoded);
    Some(message)
}

fn read<M: Message + Default>(bytes: &[u8]) {
    again::<M>(bytes);
}

fn checked<M: Message + Default, R: Display>(bytes: &[u8], check: impl Fn(&M) -> Result<(), R>) {
    let Some(message) = again::<M>(bytes) else { return };
    let Err(refusal) = check(&message) else { return };
    let text = told(&refusal);
    let of_field = |c: char| c.is_ascii_alphanumeric() || "_.[], ".contains(c);
    let field = text.split_once("message: \"").and_then(|(_, said)| said.split_once(": "));
    assert!(field.is_some_and(|(field, _)| field.chars().all(of_field)), "names no field: {text}");
}
