//! Makes a component of a core module, as `wasm-tools component new` would, without tools.

use super::error::{Import, LOG};
use super::{Error, sdk};
use wasm_encoder::{Encode as _, RawSection, Section as _};
use wasmparser::{BinaryReader, BinaryReaderError, Parser, Payload};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::{Resolve, SourceMap, WorldId};

/// Interfaces of the contract that a policy exports, and the worlds of those that make a slot.
const INTERFACES: [(&str, Option<&str>); 6] = [
    ("scheduling", Some("scheduler")),
    ("eviction", Some("evictor")),
    ("admission", Some("admitter")),
    ("balancing", Some("balancer")),
    ("control", None),
    ("learning", None),
];
/// How deep modules lie in components. What lies deeper is left as it is; hosts refuse it.
const DEPTH_MAX: u32 = 16;
const HEADER_BYTES: usize = 8;
/// What runtimes that insist on WASI import, and `sdk/wasi-stub.wat`, which `build.rs` assembled.
const WASI: &str = "wasi_snapshot_preview1";
const WASI_STUB: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/wasi-stub.wasm"));
const CUSTOM_SECTION: u8 = 0;
const EXPORT_SECTION: u8 = 7;

/// A component of what a language's tools made: a core module whose exports have their canonical names (or those that
/// AssemblyScript can express), or a component already. Names and other sections for debuggers are taken out. With
/// `stub_wasi`, what a core module wants of WASI is answered by a stub that grants nothing.
///
/// # Errors
/// It imports what no host grants, or its exports are not those of a slot.
pub(super) fn of(compiled: &[u8], stub_wasi: bool) -> Result<Vec<u8>, Error> {
    check_imports(compiled, stub_wasi)?;
    let component = match Parser::is_component(compiled) {
        true => compiled.to_vec(),
        false => wrapped(compiled, stub_wasi)?,
    };
    stripped(&component, 0).map_err(malformed)
}

fn wrapped(module: &[u8], stub_wasi: bool) -> Result<Vec<u8>, Error> {
    let mut module = with_canonical_names(module).map_err(malformed)?;
    let no_policy = |error: &dyn std::fmt::Display| Error::Module { reason: error.to_string() };
    if !describes_itself(&module).map_err(malformed)? {
        let (resolve, world) = world_of(&module)?;
        embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8)
            .map_err(|e| no_policy(&format!("{e:#}")))?;
    }
    let mut encoder = ComponentEncoder::default();
    let encoder = encoder.validate(true).module(&module);
    let encoder = match stub_wasi {
        true => encoder.and_then(|encoder| encoder.adapter(WASI, WASI_STUB)),
        false => encoder,
    };
    encoder.and_then(|encoder| encoder.encode()).map_err(|e| no_policy(&format!("{e:#}")))
}

fn malformed(error: BinaryReaderError) -> Error {
    Error::Module { reason: error.to_string() }
}

/// The component type lies in the module: bindings that were generated left it there.
fn describes_itself(module: &[u8]) -> Result<bool, BinaryReaderError> {
    for payload in Parser::new(0).parse_all(module) {
        if let Payload::CustomSection(section) = payload?
            && section.name().starts_with("component-type")
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The world that the exports belong to.
fn world_of(module: &[u8]) -> Result<(Resolve, WorldId), Error> {
    let exports = exports(module).map_err(malformed)?;
    let has = |interface: &str| {
        let prefix = format!("kvasir:policy/{interface}@");
        exports.iter().any(|export| export.starts_with(&prefix))
    };
    let world = INTERFACES.into_iter().find_map(|(interface, world)| world.filter(|_| has(interface)));
    let world = world.ok_or_else(|| Error::Module {
        reason: "it exports no function of a slot, as kvasir:policy/eviction@0.1.0#open would be".into(),
    })?;
    let world = if has("learning") { format!("learning-{world}") } else { world.to_owned() };
    let contract =
        |e: &dyn std::fmt::Display| Error::Module { reason: format!("the contract in this binary: {e}") };
    let mut files = SourceMap::default();
    sdk::contract().for_each(|(path, text)| files.push_str(path, text));
    let package = files.parse().map_err(|(_, e)| contract(&e))?;
    let mut resolve = Resolve::default();
    let package = resolve.push_group(package).map_err(|e| contract(&e))?;
    let world = resolve.select_world(&[package], Some(&world)).map_err(|e| contract(&e))?;
    Ok((resolve, world))
}

fn exports(module: &[u8]) -> Result<Vec<&str>, BinaryReaderError> {
    let mut names = Vec::new();
    for payload in Parser::new(0).parse_all(module) {
        if let Payload::ExportSection(section) = payload? {
            for export in section {
                names.push(export?.name);
            }
        }
    }
    Ok(names)
}

/// `eviction__on_events` becomes `kvasir:policy/eviction@0.1.0#on-events`.
fn canonical(export: &str) -> Option<String> {
    let (interface, function) = export.split_once("__")?;
    INTERFACES.iter().find(|(known, _)| *known == interface)?;
    Some(format!("kvasir:policy/{interface}@0.1.0#{}", function.replace('_', "-")))
}

fn with_canonical_names(module: &[u8]) -> Result<Vec<u8>, BinaryReaderError> {
    rewritten(module, |id, content, out| {
        if id != EXPORT_SECTION {
            RawSection { id, data: content }.append_to(out);
            return Ok(());
        }
        let mut exports = BinaryReader::new(content, 0);
        let count = exports.read_var_u32()?;
        let mut data = Vec::with_capacity(content.len());
        count.encode(&mut data);
        for _ in 0..count {
            let name = exports.read_string()?;
            canonical(name).as_deref().unwrap_or(name).encode(&mut data);
            data.push(exports.read_u8()?); // function, memory, …
            exports.read_var_u32()?.encode(&mut data);
        }
        RawSection { id, data: &data }.append_to(out);
        Ok(())
    })
}

/// Takes out custom sections, in it and in the modules and components in it. They mean nothing to the code.
fn stripped(wasm: &[u8], depth: u32) -> Result<Vec<u8>, BinaryReaderError> {
    // Sections of a component that hold a module or a component.
    let nested: &[u8] = if Parser::is_component(wasm) && depth < DEPTH_MAX { &[1, 4] } else { &[] };
    rewritten(wasm, |id, content, out| {
        match id {
            CUSTOM_SECTION => {}
            _ if nested.contains(&id) => {
                RawSection { id, data: &stripped(content, depth + 1)? }.append_to(out)
            }
            _ => RawSection { id, data: content }.append_to(out),
        }
        Ok(())
    })
}

/// What `section` writes for each section (its id and its content), behind the header.
fn rewritten(
    wasm: &[u8],
    mut section: impl FnMut(u8, &[u8], &mut Vec<u8>) -> Result<(), BinaryReaderError>,
) -> Result<Vec<u8>, BinaryReaderError> {
    let mut reader = BinaryReader::new(wasm, 0);
    let mut out = reader.read_bytes(HEADER_BYTES)?.to_vec();
    while !reader.eof() {
        let id = reader.read_u8()?;
        let len = reader.read_var_u32()? as usize;
        section(id, reader.read_bytes(len)?, &mut out)?;
    }
    Ok(out)
}

/// Says what is wanted and where that usually comes from, before the encoder only says that it does not know it.
fn check_imports(wasm: &[u8], stub_wasi: bool) -> Result<(), Error> {
    let mut names = imports(wasm).map_err(malformed)?;
    names.retain(|name| name != LOG && !name.starts_with(&format!("{LOG}.")));
    names.retain(|name| !(stub_wasi && name.starts_with(&format!("{WASI}."))));
    names.sort();
    names.dedup();
    if names.is_empty() {
        return Ok(());
    }
    let import = |name: String| Import { cause: likely_cause(&name), name };
    Err(Error::Imports { imports: names.into_iter().map(import).collect() })
}

/// Names of the imports: those of a component itself, or `MODULE.NAME` of a core module.
pub(super) fn imports(wasm: &[u8]) -> Result<Vec<String>, BinaryReaderError> {
    let mut names = Vec::new();
    let is_component = Parser::is_component(wasm);
    let mut depth = 0;
    for payload in Parser::new(0).parse_all(wasm) {
        match payload? {
            Payload::ModuleSection { .. } | Payload::ComponentSection { .. } => depth += 1,
            Payload::End(_) => depth -= 1,
            Payload::ComponentImportSection(section) if depth == 0 => {
                for import in section {
                    names.push(import?.name.name.to_owned());
                }
            }
            Payload::ImportSection(section) if !is_component => {
                for import in section.into_imports() {
                    let import = import?;
                    names.push(format!("{}.{}", import.module, import.name));
                }
            }
            _ => {}
        }
    }
    Ok(names)
}

fn likely_cause(import: &str) -> &'static str {
    const CAUSES: [(&str, &str); 10] = [
        ("wasi:clocks", "something reads the time; a policy gets `now` with each call"),
        ("wasi:random", "something wants randomness, such as a hash table's seed; requests bring a seed"),
        ("wasi:filesystem", "something opens files"),
        ("wasi:sockets", "something uses the network"),
        ("wasi:http", "something uses the network"),
        (
            "wasi:",
            "the language's runtime starts as that of a program; build with its WASI stubbed out (sdk/*/compile.sh shows how)",
        ),
        (
            "wasi_snapshot_preview1",
            "it was compiled for WASI; compile for wasm32-unknown-unknown, or without libc",
        ),
        ("kvasir:policy/", "another version of the contract, or a function that it does not have"),
        ("env.", "a function that is declared, but defined nowhere"),
        ("", "no part of the contract"),
    ];
    CAUSES.iter().find(|(prefix, _)| import.starts_with(prefix)).map_or("", |(_, cause)| cause)
}
