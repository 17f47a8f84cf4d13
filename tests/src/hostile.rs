//! Policies that do harm in any one of their exports, made from the contract itself: an export that is added to it is tried too.
//!
//! They are written in WebAssembly's text format, since no language's tools would make them. What they do not do harm in they
//! answer as shortly as the contract allows.

use std::fmt::Write as _;
use std::path::Path;
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::abi::{AbiVariant, WasmType};
use wit_parser::{Function, Resolve, Type, TypeDefKind, WorldId, WorldItem};

/// What an export does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harm {
    Loop,
    Trap,
    /// Takes memory until it is refused.
    Grow,
    Recurse,
    /// Answers with what lies outside of its memory.
    OutOfBounds,
    /// Answers at an address that is outside of its memory.
    Astray,
    /// Answers with megabytes.
    Huge,
    /// Answers with one element, however many were wanted.
    Short,
    /// Answers with text, and logs text, that is not UTF-8.
    Garbled,
    /// Logs megabytes, then answers.
    Flood,
    /// Every other answer is nonsense.
    Changes,
}

impl Harm {
    pub const ALL: [Self; 11] = [
        Self::Loop,
        Self::Trap,
        Self::Grow,
        Self::Recurse,
        Self::OutOfBounds,
        Self::Astray,
        Self::Huge,
        Self::Short,
        Self::Garbled,
        Self::Flood,
        Self::Changes,
    ];
}

/// What the host runs in a component beside its exports: when it is instantiated, and when it passes a list.
pub const BESIDE_EXPORTS: [&str; 2] = ["start", "cabi_realloc"];

/// Names of the functions that a policy of that world exports.
///
/// # Panics
/// The contract has no such world.
pub fn exports(world: &str) -> Vec<String> {
    let (resolve, world) = contract(world);
    functions(&resolve, world).into_iter().map(|(_, function)| function.name.clone()).collect()
}

/// A policy of that world that does `harm` in `place`, an export or one of [`BESIDE_EXPORTS`], once that was called `after` times.
/// It calls itself `hostile`, and has no settings.
///
/// # Panics
/// The contract has no such world, or it does not fit the few shapes of answers that are known here.
pub fn hostile(world: &str, place: &str, harm: Harm, after: u32) -> Vec<u8> {
    component(world, &body(world, Some((place, harm, after))))
}

/// A well-behaved policy of that world with more in its module, in the text format.
///
/// # Panics
/// The contract has no such world, or `more` is malformed.
pub fn with_more(world: &str, more: &str) -> Vec<u8> {
    component(world, &format!("{}{more}", body(world, None)))
}

fn contract(world: &str) -> (Resolve, WorldId) {
    let mut resolve = Resolve::default();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../wit/policy-0.1");
    let (package, _) = resolve.push_dir(folder).expect("the contract");
    let world = resolve.select_world(&[package], Some(world)).expect("a world of the contract");
    (resolve, world)
}

/// Each with the name of its interface.
fn functions(resolve: &Resolve, world: WorldId) -> Vec<(String, &Function)> {
    let mut found = Vec::new();
    for item in resolve.worlds[world].exports.values() {
        if let WorldItem::Interface { id, .. } = item {
            let name = resolve.id_of(*id).expect("a named interface");
            found.extend(resolve.interfaces[*id].functions.values().map(|f| (name.clone(), f)));
        }
    }
    found
}

fn component(world: &str, body: &str) -> Vec<u8> {
    let mut module = wat::parse_str(format!("(module {body})")).expect("text format");
    let (resolve, world) = contract(world);
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8).expect("metadata");
    let mut encoder = ComponentEncoder::default();
    let encoder = encoder.validate(true).module(&module).expect("a module");
    encoder.encode().expect("a component")
}

/// Where what is in memory.
mod at {
    pub(super) const NOTHING: u32 = 0;
    pub(super) const STATE: u32 = 0x100;
    pub(super) const DESCRIPTION: u32 = 0x200;
    pub(super) const TEXTS: u32 = 0x300;
    pub(super) const ODD: u32 = 0x400;
    pub(super) const HUGE_LIST: u32 = 0x500;
    pub(super) const HUGE_ERROR: u32 = 0x540;
    pub(super) const SHORT: u32 = 0x580;
    pub(super) const GARBLED_ERROR: u32 = 0x5c0;
    pub(super) const GARBLED_DESCRIPTION: u32 = 0x600;
    pub(super) const ONES: u32 = 0x680;
    pub(super) const HUGE_DESCRIPTION: u32 = 0x700;
    /// From here on lists are taken in.
    pub(super) const LISTS: u32 = 0x1_0000;
}

/// Pages of 64 KiB at the start: as much as a list of [`HUGE`] elements of four bytes needs.
const PAGES: u32 = 52;
const HUGE: u32 = 800_000;

fn body(world: &str, harm: Option<(&str, Harm, u32)>) -> String {
    let (resolve, id) = contract(world);
    let mut text = format!(
        r#"(import "kvasir:policy/log@0.1.0" "log" (func $log (param i32 i32 i32)))
        (memory (export "memory") {PAGES})
        (global $calls (mut i32) (i32.const 0))
        (global $next (mut i32) (i32.const {lists}))
        (func $dig (param i32) (result i32)
          (i32.add (call $dig (i32.add (local.get 0) (i32.const 1))) (i32.const 1)))
        (func $more
          (loop $more
            (if (i32.eq (memory.grow (i32.const 16)) (i32.const -1)) (then (unreachable)))
            (memory.fill
              (i32.sub (i32.shl (memory.size) (i32.const 16)) (i32.const 1048576)) (i32.const 1) (i32.const 1048576))
            (br $more)))
        (func $chat (local $i i32)
          (loop $again
            (call $log (i32.const 3) (i32.const {lists}) (i32.const 4096))
            (local.set $i (i32.add (local.get $i) (i32.const 1)))
            (br_if $again (i32.lt_u (local.get $i) (i32.const 20000)))))
        "#,
        lists = at::LISTS,
    );
    let harm_in = |place: &str| harm.filter(|(at, ..)| *at == place).map(|(_, harm, after)| (harm, after));
    text += &memory(world.trim_start_matches("learning-"));
    text += &realloc(harm_in("cabi_realloc"));
    if let Some((harm, _)) = harm_in("start") {
        let _ = write!(text, "(func $start {}) (start $start)", act(harm, ""));
    }
    for (interface, function) in functions(&resolve, id) {
        let signature = resolve.wasm_signature(AbiVariant::GuestExport, function);
        let types = |types: &[WasmType]| types.iter().map(|t| format!(" {}", named(*t))).collect::<String>();
        let kind = Kind::of(&resolve, function, signature.retptr);
        let harmful = harm_in(&function.name).map(|(harm, after)| {
            format!(
                "(global.set $calls (i32.add (global.get $calls) (i32.const 1)))
                 (if (i32.gt_u (global.get $calls) (i32.const {after})) (then {}))",
                act(harm, &kind.harmful(harm))
            )
        });
        let _ = write!(
            text,
            r#"(func (export "{interface}#{}") (param{}) (result{}) {} {})"#,
            function.name,
            types(&signature.params),
            types(&signature.results),
            harmful.unwrap_or_default(),
            kind.healthy(),
        );
    }
    text
}

fn named(of: WasmType) -> &'static str {
    match of {
        WasmType::I32 | WasmType::Pointer | WasmType::Length => "i32",
        WasmType::I64 | WasmType::PointerOrI64 => "i64",
        WasmType::F32 => "f32",
        WasmType::F64 => "f64",
    }
}

/// Does harm, then goes on with `answer` if it gets there.
fn act(harm: Harm, answer: &str) -> String {
    match harm {
        Harm::Loop => "(loop $forever (br $forever)) (unreachable)".into(),
        Harm::Trap => "(unreachable)".into(),
        Harm::Grow => "(call $more)".into(),
        Harm::Recurse => "(drop (call $dig (i32.const 0)))".into(),
        Harm::Flood => "(call $chat)".into(),
        Harm::Garbled => format!("{answer} (call $log (i32.const 3) (i32.const {}) (i32.const 4))", at::ODD),
        Harm::Changes => {
            format!("(if (i32.and (global.get $calls) (i32.const 1)) (then {answer}))")
        }
        Harm::OutOfBounds | Harm::Astray | Harm::Huge | Harm::Short => answer.into(),
    }
}

/// Shapes of answers.
#[derive(Clone, Copy)]
enum Kind {
    Nothing,
    Number,
    Description,
    State,
    List,
    Error,
    Record,
}

impl Kind {
    fn of(resolve: &Resolve, function: &Function, behind_pointer: bool) -> Self {
        match (&*function.name, function.result) {
            (_, None) => Self::Nothing,
            ("describe", _) => Self::Description,
            ("export-state", _) => Self::State,
            (_, Some(Type::Id(id))) => match resolve.types[id].kind {
                TypeDefKind::List(_) => Self::List,
                TypeDefKind::Result(_) => Self::Error,
                TypeDefKind::Record(_) => Self::Record,
                ref other => panic!("`{}` answers with {other:?}", function.name),
            },
            (name, Some(_)) if behind_pointer => panic!("`{name}` answers with text"),
            (_, Some(_)) => Self::Number,
        }
    }

    fn healthy(self) -> String {
        match self {
            Self::Nothing => String::new(),
            Self::Number => "(i64.const 0)".into(),
            Self::Description => pointer(at::DESCRIPTION),
            Self::State => pointer(at::STATE),
            Self::List | Self::Error | Self::Record => pointer(at::NOTHING),
        }
    }

    /// Returns what is not right; where there is no such answer, nothing.
    fn harmful(self, harm: Harm) -> String {
        let answer = match (harm, self) {
            (_, Self::Nothing) => return String::new(),
            (_, Self::Number) => "(i64.const -1)".into(),
            (Harm::Astray, _) => "(i32.const -4)".into(),
            (Harm::Huge, Self::List | Self::State) => pointer(at::HUGE_LIST),
            (Harm::Huge, Self::Error) => pointer(at::HUGE_ERROR),
            (Harm::Huge, Self::Description) => pointer(at::HUGE_DESCRIPTION),
            (Harm::Short | Harm::Changes, Self::List | Self::State) => pointer(at::SHORT),
            (Harm::Garbled, Self::Error) => pointer(at::GARBLED_ERROR),
            (Harm::Garbled, Self::Description) => pointer(at::GARBLED_DESCRIPTION),
            (Harm::Garbled | Harm::Short | Harm::Huge, _) => return String::new(),
            (Harm::Changes, _) => pointer(at::ONES),
            _ => pointer(at::ODD),
        };
        format!("(return {answer})")
    }
}

fn pointer(to: u32) -> String {
    format!("(i32.const {to})")
}

/// Lists are taken in one behind the other, and from the beginning again at the end of memory: none is looked at twice.
fn realloc(harm: Option<(Harm, u32)>) -> String {
    let harmful = harm.map(|(harm, after)| {
        format!(
            "(global.set $calls (i32.add (global.get $calls) (i32.const 1)))
             (if (i32.gt_u (global.get $calls) (i32.const {after})) (then {}))",
            act(harm, "(return (i32.const -4))")
        )
    });
    format!(
        r#"(func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32) (local $at i32)
          {}
          (local.set $at (i32.and (i32.add (global.get $next) (i32.const 15)) (i32.const -16)))
          (if (i32.gt_u (i32.add (local.get $at) (local.get 3)) (i32.shl (memory.size) (i32.const 16)))
            (then (local.set $at (i32.const {}))))
          (if (i32.gt_u (i32.add (local.get $at) (local.get 3)) (i32.shl (memory.size) (i32.const 16)))
            (then (drop (memory.grow (i32.add (i32.shr_u (local.get 3) (i32.const 16)) (i32.const 1))))))
          (global.set $next (i32.add (local.get $at) (local.get 3)))
          (local.get $at))
        "#,
        harmful.unwrap_or_default(),
        at::LISTS
    )
}

fn memory(slot: &str) -> String {
    const NAME: &str = "hostile";
    const VERSION: &str = "0.1.0";
    let texts = format!("{NAME}{VERSION}{slot}");
    let name = (at::TEXTS, NAME.len() as u32);
    let version = (name.0 + name.1, VERSION.len() as u32);
    let slot = (version.0 + version.1, slot.len() as u32);
    let described = |name: (u32, u32)| [name.0, name.1, version.0, version.1, slot.0, slot.1, 0, 0];
    let words: [(u32, &[u32]); 10] = [
        (at::STATE, &[at::STATE + 16, 8]),
        (at::DESCRIPTION, &described(name)),
        (at::ODD, &[u32::MAX; 16]),
        (at::HUGE_LIST, &[at::LISTS, HUGE]),
        (at::HUGE_ERROR, &[1, at::LISTS, HUGE]),
        (at::SHORT, &[at::STATE + 16, 1]),
        (at::GARBLED_ERROR, &[1, at::ODD, 4]),
        (at::GARBLED_DESCRIPTION, &described((at::ODD, 4))),
        (at::ONES, &[0x0101_0101; 16]),
        (at::HUGE_DESCRIPTION, &described((at::LISTS, HUGE))),
    ];
    let mut text = format!("(data (i32.const {}) \"{texts}\")", at::TEXTS);
    for (at, words) in words {
        let bytes: String =
            words.iter().flat_map(|w| w.to_le_bytes()).map(|b| format!("\\{b:02x}")).collect();
        let _ = write!(text, "(data (i32.const {at}) \"{bytes}\")");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_export_of_each_world_can_do_each_harm() {
        let found = exports("learning-scheduler");
        for name in ["describe", "import-state", "schedule", "explain", "update-links", "observe", "adopt"] {
            assert!(found.iter().any(|found| found == name), "{name} in {found:?}");
        }
        for world in ["learning-scheduler", "evictor", "learning-admitter", "balancer"] {
            let places = exports(world).into_iter().chain(BESIDE_EXPORTS.map(str::to_owned));
            for place in places {
                for harm in Harm::ALL {
                    hostile(world, &place, harm, 1);
                }
            }
        }
    }
}
