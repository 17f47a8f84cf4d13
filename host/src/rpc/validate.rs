//! What callers may send, field by field: a value that makes no sense is refused here with the name of its
//! field, and goes no further. Who may call is not decided here.

use crate::policy::trust::{PAYLOAD_BYTES_MAX, SIGNATURES_MAX};
use crate::text::printable;
use kvasir_proto as proto;
use tonic::Status;

/// Longest chain of one call; what is beyond is the caller's to leave out.
const CHAIN_BLOCKS_MAX: usize = 1 << 16;
const NAME_BYTES_MAX: usize = 128;
/// A day in milliseconds: costs and deadlines beyond are mistakes of unit.
const MS_MAX: f64 = 86_400_000.0;
const TOKENS_MAX: u32 = 1 << 30;
/// 400 days: longer than any trace, and short of what tables of blocks can tell apart.
const CLOCK_MS_MAX: u64 = 400 * 86_400_000;
/// The most models of one instance.
const MODELS_MAX: usize = 64;
const ADAPTERS_MAX: usize = 1_024;
/// The most adapters that one instance can hold: as many as have a number.
const ADAPTERS_HELD_MAX: u32 = 1 << 16;
const SETTINGS_MAX: usize = 64;
const SETTING_BYTES_MAX: usize = 64 << 10;

pub(super) fn refuse(field: &str, why: impl std::fmt::Display) -> Status {
    Status::invalid_argument(format!("{field}: {why}"))
}

/// An instance that registers.
///
/// # Errors
/// A status that names the field.
pub fn register(request: &proto::RegisterRequest) -> Result<(), Status> {
    instance_name(&request.name)?;
    if !request.prefill && !request.decode {
        return Err(refuse(
            "prefill, decode",
            "the instance would do neither prefill nor decode; set at least one",
        ));
    }
    for (field, name) in [("host", &request.host), ("domain", &request.domain)] {
        if !name.is_empty() {
            name_in(field, name)?;
        }
    }
    names("models", &request.models, MODELS_MAX)?;
    names("adapters", &request.adapters, ADAPTERS_MAX)?;
    if request.adapters_max > ADAPTERS_HELD_MAX {
        let why = format_args!("is {}; at most {ADAPTERS_HELD_MAX}", request.adapters_max);
        return Err(refuse("adapters_max", why));
    }
    let Some(cost) = &request.cost else { return Ok(()) };
    let fields = [
        ("cost.prefill_fixed_ms", cost.prefill_fixed_ms),
        ("cost.prefill_per_token_ms", cost.prefill_per_token_ms),
        ("cost.prefill_per_pair_ms", cost.prefill_per_pair_ms),
        ("cost.transfer_fixed_ms", cost.transfer_fixed_ms),
        ("cost.transfer_per_block_ms", cost.transfer_per_block_ms),
        ("cost.step_fixed_ms", cost.step_fixed_ms),
        ("cost.step_per_sequence_ms", cost.step_per_sequence_ms),
        ("cost.step_per_token_ms", cost.step_per_token_ms),
        ("cost.handover_fixed_ms", cost.handover_fixed_ms.unwrap_or(0.0)),
        ("cost.handover_per_block_ms", cost.handover_per_block_ms.unwrap_or(0.0)),
    ];
    fields.into_iter().try_for_each(|(field, value)| milliseconds(field, value))
}

/// What an instance reports of itself.
///
/// # Errors
/// A status that names the field.
pub fn report(request: &proto::ReportLoadRequest) -> Result<(), Status> {
    instance_name(&request.name)?;
    request.adapters.as_ref().map_or(Ok(()), |loaded| names("adapters.names", &loaded.names, ADAPTERS_MAX))
}

fn names(field: &str, names: &[String], most: usize) -> Result<(), Status> {
    if names.len() > most {
        return Err(refuse(field, format_args!("{}; at most {most}", names.len())));
    }
    names.iter().enumerate().try_for_each(|(i, name)| name_in(&format!("{field}[{i}]"), name))
}

/// The name of an instance.
///
/// # Errors
/// A status that names the field.
pub fn instance_name(name: &str) -> Result<(), Status> {
    name_in("name", name)
}

/// Names reach logs, metrics and terminals.
///
/// # Errors
/// A status that names the field.
pub fn name_in(field: &str, name: &str) -> Result<(), Status> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"._:/@-".contains(&b);
    if (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(allowed) {
        return Ok(());
    }
    let given = printable(name, NAME_BYTES_MAX);
    Err(refuse(
        field,
        format_args!("must be 1 to {NAME_BYTES_MAX} of A-Z a-z 0-9 . _ : / @ -, not `{given}`"),
    ))
}

/// A request that asks where to go; blocks have `block_size_tokens` tokens.
///
/// # Errors
/// A status that names the field.
pub fn schedule(request: &proto::ScheduleRequest, block_size_tokens: u32) -> Result<(), Status> {
    let tokens = request.prompt_tokens;
    if !(1..=TOKENS_MAX).contains(&tokens) {
        return Err(refuse("prompt_tokens", format_args!("must be 1 to {TOKENS_MAX}, not {tokens}")));
    }
    if request.output_tokens > TOKENS_MAX {
        return Err(refuse(
            "output_tokens",
            format_args!("is {}; at most {TOKENS_MAX}", request.output_tokens),
        ));
    }
    if request.class > u16::MAX.into() {
        return Err(refuse("class", format_args!("is {}; at most {}", request.class, u16::MAX)));
    }
    let (blocks, most) = (request.blocks.len(), tokens.div_ceil(block_size_tokens) as usize);
    if blocks > most {
        let why = format!("{blocks} for {tokens} tokens, which make {most} of {block_size_tokens} tokens");
        return Err(refuse("blocks", why));
    }
    chain(&request.blocks)?;
    for (field, name) in [("model", &request.model), ("adapter", &request.adapter)] {
        if !name.is_empty() {
            name_in(field, name)?;
        }
    }
    milliseconds("ttft_slo_ms", request.ttft_slo_ms)?;
    milliseconds("tbt_slo_ms", request.tbt_slo_ms)
}

/// What became of a request.
///
/// # Errors
/// A status that names the field.
pub fn complete(request: &proto::CompleteRequest) -> Result<(), Status> {
    use proto::complete_request::Stage;
    if request.stage() == Stage::Unspecified {
        return Err(refuse("stage", format_args!("{} is no known stage", request.stage)));
    }
    if request.tokens > TOKENS_MAX {
        return Err(refuse("tokens", format_args!("is {}; at most {TOKENS_MAX}", request.tokens)));
    }
    match request.prefill_ms {
        Some(_) if request.stage() != Stage::Prefill => {
            Err(refuse("prefill_ms", "comes with STAGE_PREFILL alone; leave it out of other stages"))
        }
        Some(ms) => milliseconds("prefill_ms", ms),
        None => Ok(()),
    }
}

/// Checks a message that tells of blocks.
///
/// # Errors
/// A status that names the field.
pub fn blocks_message(name: &str, sequence: u64, blocks: &[u64]) -> Result<(), Status> {
    instance_name(name)?;
    if sequence == 0 {
        return Err(refuse("sequence", "is 0; messages are numbered from 1"));
    }
    chain(blocks)
}

/// The blocks of a call.
///
/// # Errors
/// A status that names the field.
pub fn chain(blocks: &[u64]) -> Result<(), Status> {
    if blocks.len() <= CHAIN_BLOCKS_MAX {
        return Ok(());
    }
    let why =
        format!("{} of them; the most in one call is {CHAIN_BLOCKS_MAX}, give the first ones", blocks.len());
    Err(refuse("blocks", why))
}

/// A clock that is to be moved.
///
/// # Errors
/// A status that names the field.
pub fn move_clock(request: &proto::MoveClockRequest) -> Result<(), Status> {
    let to_ms = request.to_ms;
    if to_ms > CLOCK_MS_MAX {
        return Err(refuse("to_ms", format_args!("is {to_ms}; at most {CLOCK_MS_MAX}, which is 400 days")));
    }
    Ok(())
}

/// A policy to load.
///
/// # Errors
/// A status that names the field.
pub fn load(request: &proto::LoadRequest) -> Result<(), Status> {
    if request.name.len() > NAME_BYTES_MAX || printable(&request.name, NAME_BYTES_MAX) != request.name {
        return Err(refuse("name", format_args!("must be at most {NAME_BYTES_MAX} bytes on one line")));
    }
    signatures("signatures", &request.signatures)?;
    if let Some(proto::load_request::Source::Chain(chain)) = &request.source {
        for (i, part) in chain.parts.iter().enumerate() {
            settings(&format!("chain.parts[{i}].settings"), &part.settings)?;
            signatures(&format!("chain.parts[{i}].signatures"), &part.signatures)?;
        }
    }
    settings("settings", &request.settings)
}

fn signatures(field: &str, signatures: &[proto::PolicySignature]) -> Result<(), Status> {
    if signatures.len() > SIGNATURES_MAX {
        return Err(refuse(field, format_args!("{}; at most {SIGNATURES_MAX}", signatures.len())));
    }
    for (i, proto::PolicySignature { payload, signature }) in signatures.iter().enumerate() {
        if payload.len() > PAYLOAD_BYTES_MAX || signature.len() != 64 {
            let why = format!("a text of at most {PAYLOAD_BYTES_MAX} bytes and a signature of 64 are wanted");
            return Err(refuse(&format!("{field}[{i}]"), why));
        }
    }
    Ok(())
}

/// Settings to change.
///
/// # Errors
/// A status that names the field.
pub fn configure(request: &proto::ConfigureRequest) -> Result<(), Status> {
    if request.set.is_empty() && request.unset.is_empty() {
        return Err(refuse("set, unset", "no setting is named, so there is nothing to change"));
    }
    settings("set", &request.set)?;
    if request.unset.len() > SETTINGS_MAX {
        return Err(refuse("unset", format_args!("{}; at most {SETTINGS_MAX}", request.unset.len())));
    }
    request.unset.iter().enumerate().try_for_each(|(i, name)| setting_name(&format!("unset[{i}]"), name))
}

fn settings(field: &str, settings: &[proto::Setting]) -> Result<(), Status> {
    if settings.len() > SETTINGS_MAX {
        return Err(refuse(field, format_args!("{}; at most {SETTINGS_MAX}", settings.len())));
    }
    for (i, setting) in settings.iter().enumerate() {
        setting_name(&format!("{field}[{i}].name"), &setting.name)?;
        if setting.value.len() > SETTING_BYTES_MAX {
            let why = format!("has {} bytes; at most {SETTING_BYTES_MAX}", setting.value.len());
            return Err(refuse(&format!("{field}[{i}].value"), why));
        }
    }
    Ok(())
}

fn setting_name(field: &str, name: &str) -> Result<(), Status> {
    if name.len() > NAME_BYTES_MAX || printable(name, NAME_BYTES_MAX) != name {
        return Err(refuse(field, format_args!("must be at most {NAME_BYTES_MAX} bytes on one line")));
    }
    Ok(())
}

fn milliseconds(field: &str, value: f64) -> Result<(), Status> {
    if (0.0..=MS_MAX).contains(&value) {
        return Ok(());
    }
    Err(refuse(field, format_args!("must be 0 to {MS_MAX} ms, not {value}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(result: Result<(), Status>, field: &str) {
        match result {
            Ok(()) => assert_eq!(field, "", "accepted"),
            Err(status) => {
                assert_eq!(status.code(), tonic::Code::InvalidArgument);
                let named = !field.is_empty() && status.message().starts_with(&format!("{field}: "));
                assert!(named && status.message().len() < 1_000, "`{field}`: {status}");
            }
        }
    }

    #[test]
    fn every_field_is_refused_by_name() {
        let good =
            proto::RegisterRequest { name: "p-0.rack_1:80/a@b".into(), prefill: true, ..Default::default() };
        check(register(&good), "");
        for name in ["", "bad name\n", "é", &"x".repeat(129), &"\u{1b}".repeat(1 << 20)] {
            check(register(&proto::RegisterRequest { name: name.into(), ..good.clone() }), "name");
        }
        check(register(&proto::RegisterRequest { prefill: false, ..good.clone() }), "prefill, decode");
        check(register(&proto::RegisterRequest { host: "a b".into(), ..good.clone() }), "host");
        check(register(&proto::RegisterRequest { domain: "\n".into(), ..good.clone() }), "domain");
        let cost = proto::CostModel { handover_per_block_ms: Some(-1.0), ..Default::default() };
        let negative = proto::RegisterRequest { cost: Some(cost), ..good.clone() };
        check(register(&negative), "cost.handover_per_block_ms");
        let many = proto::RegisterRequest { models: vec!["m".into(); 65], ..good.clone() };
        check(register(&many), "models");
        let odd = proto::RegisterRequest { adapters: vec!["a".into(), "".into()], ..good.clone() };
        check(register(&odd), "adapters[1]");
        let loaded = Some(proto::Adapters { names: vec!["a b".into()] });
        let told = proto::ReportLoadRequest { name: "a".into(), adapters: loaded, ..Default::default() };
        check(report(&told), "adapters.names[0]");
        for value in [f64::NAN, -1.0, f64::INFINITY, 1e40] {
            let cost = proto::CostModel { step_fixed_ms: value, ..Default::default() };
            check(
                register(&proto::RegisterRequest { cost: Some(cost), ..good.clone() }),
                "cost.step_fixed_ms",
            );
        }

        let ask = proto::ScheduleRequest { prompt_tokens: 10, blocks: vec![1], ..Default::default() };
        let asked = |ask: proto::ScheduleRequest| schedule(&ask, 16);
        check(asked(ask.clone()), "");
        check(asked(proto::ScheduleRequest { prompt_tokens: 0, ..ask.clone() }), "prompt_tokens");
        check(asked(proto::ScheduleRequest { output_tokens: u32::MAX, ..ask.clone() }), "output_tokens");
        check(asked(proto::ScheduleRequest { class: 65_535, ..ask.clone() }), "");
        check(asked(proto::ScheduleRequest { class: 65_536, ..ask.clone() }), "class");
        check(asked(proto::ScheduleRequest { blocks: vec![1; 1_000], ..ask.clone() }), "blocks");
        check(asked(proto::ScheduleRequest { ttft_slo_ms: f64::NAN, ..ask.clone() }), "ttft_slo_ms");
        check(asked(proto::ScheduleRequest { tbt_slo_ms: -1.0, ..ask.clone() }), "tbt_slo_ms");
        check(asked(proto::ScheduleRequest { model: "meta/llama-3".into(), ..ask.clone() }), "");
        check(asked(proto::ScheduleRequest { model: "a b".into(), ..ask.clone() }), "model");
        check(asked(proto::ScheduleRequest { adapter: "x".repeat(129), ..ask }), "adapter");

        let done = proto::CompleteRequest { request_id: 1, stage: 4, tokens: 0, prefill_ms: None };
        check(complete(&done), "");
        check(complete(&proto::CompleteRequest { stage: 77, ..done }), "stage");
        check(complete(&proto::CompleteRequest { tokens: u32::MAX, ..done }), "tokens");
        check(complete(&proto::CompleteRequest { prefill_ms: Some(1.0), ..done }), "prefill_ms");
        let prefilled = |ms| proto::CompleteRequest { stage: 2, prefill_ms: Some(ms), ..done };
        check(complete(&prefilled(0.5)), "");
        for ms in [-1.0, f64::NAN, f64::INFINITY, 1e9] {
            check(complete(&prefilled(ms)), "prefill_ms");
        }

        check(name_in("to", "a\nb"), "to");
        check(blocks_message("a", 1, &[]), "");
        check(blocks_message("a b", 1, &[]), "name");
        check(blocks_message("a", 0, &[]), "sequence");
        check(blocks_message("a", 1, &vec![0; CHAIN_BLOCKS_MAX + 1]), "blocks");

        let setting = |name: &str, value: &str| proto::Setting { name: name.into(), value: value.into() };
        let given = |name: &str, settings| {
            load(&proto::LoadRequest { name: name.into(), settings, ..Default::default() })
        };
        check(given("my policy", vec![setting("slack", "1")]), "");
        check(given("a\nb", Vec::new()), "name");
        check(given("a", vec![setting("x", ""); 65]), "settings");
        check(given("a", vec![setting("x", ""), setting("\u{1b}", "")]), "settings[1].name");
        check(given("a", vec![setting("x", &"1".repeat(1 << 20))]), "settings[0].value");

        let changed = |set, unset: &[&str]| {
            let unset = unset.iter().map(|&name| name.to_owned()).collect();
            configure(&proto::ConfigureRequest { set, unset, ..Default::default() })
        };
        check(changed(vec![setting("slack", "1")], &["other"]), "");
        check(changed(Vec::new(), &[]), "set, unset");
        check(changed(vec![setting("\n", "")], &[]), "set[0].name");
        check(changed(Vec::new(), &["a", "\u{1b}"]), "unset[1]");
        check(changed(Vec::new(), &["a"; 65]), "unset");
        let signature = |text: usize, bytes: usize| proto::PolicySignature {
            payload: vec![b'x'; text],
            signature: vec![0; bytes],
        };
        let signed = |signatures| load(&proto::LoadRequest { signatures, ..Default::default() });
        check(signed(vec![signature(PAYLOAD_BYTES_MAX, 64); SIGNATURES_MAX]), "");
        check(signed(vec![signature(1, 64); SIGNATURES_MAX + 1]), "signatures");
        check(signed(vec![signature(1, 64), signature(1, 63)]), "signatures[1]");
        check(signed(vec![signature(PAYLOAD_BYTES_MAX + 1, 64)]), "signatures[0]");
    }
}
