//! What guests may do to whom enters their module.

use super::abi::{Abi, Asked, Told};
use super::module_of;
use crate::policy::SlotKind;
use crate::policy::guest::State;
use wasmtime::{Config, Engine, Instance, Linker, Module, Result, Store};

const COMPONENT: &[u8] = b"\0asm\x0d\0\x01\0";

/// A component of these modules and components.
fn component(parts: &[&[u8]]) -> Vec<u8> {
    let part = |part: &&[u8]| {
        let kind = if part.starts_with(COMPONENT) { 4 } else { 1 };
        let (low, high) = (part.len() as u8 & 0x7f | 0x80, (part.len() >> 7) as u8);
        [&[kind, low, high], *part].concat()
    };
    [COMPONENT.to_vec(), parts.iter().flat_map(part).collect()].concat()
}

#[test]
fn a_module_is_found_where_it_alone_makes_the_component() {
    let module = |text: &str| wat::parse_str(format!("(module {text})")).unwrap();
    let log = r#"(import "kvasir:policy/log@0.1.0" "log" (func (param i32 i32 i32)))"#;
    let open = r#"(func (export "kvasir:policy/eviction@0.1.0#open"))"#;
    let serves = module(open);
    let found = |parts: &[&[u8]]| module_of(SlotKind::Evictor, &component(parts)).map(<[u8]>::to_vec);
    assert_eq!(found(&[&serves]), Some(serves.clone()));
    let (logs, shim) = (module(&format!("{log}{open}")), module(r#"(import "" "0" (func))"#));
    assert_eq!(found(&[&logs, &shim]), Some(logs.clone()), "with what ties the log to it");
    let others = [
        component(&[&serves, &serves]),
        component(&[&shim]),
        component(&[&component(&[&serves])]),
        component(&[&module(&format!(r#"(import "env" "now" (func)){open}"#))]),
        component(&[&module(&format!(r#"{open}(func (export "_initialize"))"#))]),
        COMPONENT.to_vec(),
    ];
    for (i, other) in others.iter().enumerate() {
        assert_eq!(module_of(SlotKind::Evictor, other), None, "{i}");
    }
    assert_eq!(module_of(SlotKind::Scheduler, &component(&[&serves])), None, "of another slot");
    assert_eq!(module_of(SlotKind::Evictor, &component(&[&serves])[..40]), None, "cut off");
}

/// An instance with one page of memory, whose `realloc` and `ask` answer a constant.
fn guest(realloc: i64, ask: i64, more: &str) -> (Store<State>, Abi, Instance) {
    let module = format!(
        r#"(module
            (memory (export "memory") 1)
            (func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32) (i32.const {realloc}))
            (func (export "told") (param i32 i32))
            (func (export "ask") (result i32) (i32.const {ask}))
            {more})"#
    );
    let engine = Engine::new(&Config::new()).unwrap();
    let module = Module::new(&engine, wat::parse_str(module).unwrap()).unwrap();
    let mut store = Store::new(&engine, State::unlimited());
    let instance = Linker::new(&engine).instantiate(&mut store, &module).unwrap();
    let abi = Abi::new(&mut store, &instance).unwrap();
    (store, abi, instance)
}

/// What a guest is told of a list of seven words.
fn tell(realloc: i64) -> Result<()> {
    let (mut store, abi, instance) = guest(realloc, 0, "");
    Told::new(&mut store, &instance, "told")?.call(&abi, &mut store, &[7u32; 7])
}

/// What is read of an answer at an address, behind `data`.
fn read<R>(ask: i64, data: &str, read: impl FnOnce(super::abi::Answer<'_>, u32) -> Result<R>) -> Result<R> {
    let (mut store, abi, instance) = guest(0, ask, data);
    Asked::new(&mut store, &instance, "ask")?.call(&abi, &mut store, (), read)
}

#[test]
fn a_list_is_put_where_the_guest_says_if_that_is_its_memory() {
    assert!(tell(64).is_ok());
    assert!(tell((64 << 10) - 28).is_ok(), "to the end");
    let error = |realloc| tell(realloc).unwrap_err().to_string();
    assert!(error((64 << 10) - 24).contains("beyond end of memory"));
    assert!(error(-4).contains("beyond end of memory"));
    assert!(error(66).contains("not aligned"));
}

#[test]
fn an_answer_is_read_from_the_guests_memory_alone() {
    let list = |at: &str, len: &str| {
        let data = format!(r#"(data (i32.const 16) "{at}{len}")"#);
        read(16, &data, |answer, at| answer.list::<u32>(at)).map_err(|error| error.to_string())
    };
    assert_eq!(list(r"\20\00\00\00", r"\02\00\00\00"), Ok(vec![0, 0]));
    assert_eq!(list(r"\fc\ff\00\00", r"\01\00\00\00"), Ok(vec![0]), "to the end");
    assert!(list(r"\fc\ff\00\00", r"\02\00\00\00").unwrap_err().contains("out of bounds"));
    assert!(list(r"\fc\ff\ff\ff", r"\ff\ff\ff\ff").unwrap_err().contains("out of bounds"));
    assert!(list(r"\21\00\00\00", r"\01\00\00\00").unwrap_err().contains("not aligned"));
    for at in [-1, -4, (64 << 10) - 4] {
        assert!(read(at, "", |answer, at| answer.list::<u32>(at)).is_err(), "an answer at {at}");
    }
}

#[test]
fn a_text_must_be_one_and_a_refusal_too() {
    let outcome = |data: &str| {
        let data = format!(r#"(data (i32.const 16) "{data}") (data (i32.const 32) "no\ff")"#);
        read(16, &data, |answer, at| answer.outcome(at)).map_err(|error| error.to_string())
    };
    assert_eq!(outcome(r"\00"), Ok(Ok(())));
    assert_eq!(outcome(r"\01\00\00\00\20\00\00\00\02\00\00\00"), Ok(Err("no".into())));
    assert!(outcome(r"\01\00\00\00\20\00\00\00\03\00\00\00").unwrap_err().contains("utf-8"));
    assert!(outcome(r"\02").unwrap_err().contains("discriminant"));
}

#[test]
fn an_answer_that_names_the_same_memory_again_and_again_ends() {
    // The whole page, as often as is read.
    let data = r#"(data (i32.const 16) "\00\00\00\00\00\00\01\00")"#;
    let copied = |times: usize| {
        read(16, data, |answer, at| (0..times).try_for_each(|_| answer.list::<u8>(at).map(drop)))
    };
    assert!(copied(1_000).is_ok());
    assert!(copied(3_000).unwrap_err().to_string().contains("more than 134217728 bytes"));
}

#[test]
fn what_an_answer_holds_is_given_back() {
    let more = r#"(global $freed (export "freed") (mut i32) (i32.const 0))
        (func (export "cabi_post_ask") (param i32) (global.set $freed (local.get 0)))"#;
    let (mut store, abi, instance) = guest(0, 16, more);
    let ask = Asked::new(&mut store, &instance, "ask").unwrap();
    ask.call(&abi, &mut store, (), |answer, at| answer.list::<u8>(at)).unwrap();
    let freed = instance.get_global(&mut store, "freed").unwrap().get(&mut store);
    assert_eq!(freed.i32(), Some(16));
}
