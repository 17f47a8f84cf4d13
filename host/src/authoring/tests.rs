use super::*;
use crate::policy::{PolicyConfig, SlotKind};
use kvasir_tests::{guest, import_not_granted};
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Every file below a folder, as text.
fn texts(folder: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(texts(&path));
        } else {
            found.push((path.display().to_string(), fs::read_to_string(&path).unwrap()));
        }
    }
    found
}

#[test]
fn every_language_has_a_project_for_every_slot() {
    let dir = tempfile::tempdir().unwrap();
    for language in &LANGUAGES {
        for slot in SlotKind::ALL {
            let at = dir.path().join(format!("{} {slot}", language.name));
            let project = create((language, None), slot, "brand-new", &at).unwrap();
            assert_eq!(
                (project.name.as_str(), project.slot, project.language),
                ("brand-new", slot, language)
            );
            assert_eq!(project.component(), at.join("brand-new.wasm"));
            let files = texts(&at);
            for wanted in ["README.md", &format!("sdk/{}/compile.sh", language.folder), "sdk/wit/common.wit"]
            {
                assert!(files.iter().any(|(path, _)| path.ends_with(wanted)), "{wanted} in {}", at.display());
            }
            for (path, text) in files.iter().filter(|(path, _)| !path.contains("/sdk/")) {
                assert!(!text.contains("../../.."), "{path}");
                assert!(!text.contains("my-lru") && !text.contains(&format!("my-{slot}")), "{path}");
            }
            let named =
                files.iter().filter(|(path, text)| !path.contains("/sdk/") && text.contains("\"brand-new\""));
            assert!(named.count() >= 2, "{}: in the manifest and in the source", at.display());
        }
    }
}

#[test]
fn a_dialect_has_sources_of_its_own_name() {
    let dir = tempfile::tempdir().unwrap();
    for (name, source, not, manifest) in [
        ("c++", "policy.cpp", "policy.c", "language = \"c\""),
        ("typescript", "policy.ts", "policy.js", "language = \"javascript\""),
    ] {
        for slot in SlotKind::ALL {
            let at = dir.path().join(format!("{name} {slot}"));
            let project = create(Language::find_with_dialect(name).unwrap(), slot, "brand-new", &at).unwrap();
            assert!(fs::read_to_string(at.join(MANIFEST)).unwrap().contains(manifest), "{name}");
            assert!(texts(&at).iter().all(|(_, text)| !text.contains("cppp")), "{name}: replaced twice");
            assert!(at.join(source).exists() && !at.join(not).exists(), "{name}");
            let test =
                texts(&at).into_iter().filter(|(path, _)| path.contains("/test.")).map(|(_, text)| text);
            assert!(test.collect::<String>().contains(source), "{name} {slot}: its test is of its source");
            assert_eq!(project.slot, slot);
        }
    }
    assert_eq!(Language::find_with_dialect("zig").unwrap().1, None);
}

#[test]
fn a_project_is_made_whole_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let c = Language::find("c").unwrap();
    let make = |name: &str, at: &Path| {
        create((c, None), SlotKind::Evictor, name, at).map(drop).map_err(|e| e.to_string())
    };
    for (name, reason) in [
        ("", "1 to 64 characters"),
        (&"x".repeat(65), "1 to 64 characters"),
        ("Lru", "must consist of a-z 0-9 -"),
        ("../lru", "must consist of a-z 0-9 -"),
        ("2q", "must begin with a letter"),
        ("kvasir-policy", "are the SDK's"),
    ] {
        let refused = make(name, &dir.path().join("at")).unwrap_err();
        assert!(refused.contains(reason), "{refused}");
    }
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "nothing is left of what was refused");
    let taken = dir.path().join("taken");
    fs::create_dir(&taken).unwrap();
    make("lru", &taken).unwrap();
    let files = texts(&taken);
    for at in [&taken, &taken.join("README.md")] {
        assert!(make("lru", at).unwrap_err().contains("there is something in"), "{}", at.display());
    }
    assert_eq!(texts(&taken), files, "as it was");
    make("lru", &dir.path().join("a/b/c")).unwrap();
    let unknown = Language::find("cobol").unwrap_err();
    assert!(
        unknown
            .to_string()
            .contains("languages: assemblyscript, c, go, javascript, python, rust, zig, c++, typescript"),
        "{unknown}"
    );
    assert!(unknown.is_usage());
}

#[test]
fn a_manifest_is_read_with_care() {
    let dir = tempfile::tempdir().unwrap();
    let read = |text: &str| {
        fs::write(dir.path().join(MANIFEST), text).unwrap();
        Project::open(dir.path())
    };
    let missing = Project::open(&dir.path().join("none")).unwrap_err().to_string();
    assert!(missing.contains("`kvasir policy new` makes a project"), "{missing}");
    let good = "name = \"a\"\nversion = \"0.1.0\"\nlanguage = \"c\"\nslot = \"evictor\"\n";
    let project = read(&format!(
        "{good}memory = \"32MiB\"\ndeadline = \"1s\"\n[settings]\nshare = 0.5\nmode = \"x\"\n"
    ))
    .unwrap();
    let limits = project.limits();
    assert_eq!((limits.memory_bytes, limits.hot_deadline.as_secs()), (32 << 20, 1));
    assert_eq!(project.settings, [("mode".into(), "x".into()), ("share".into(), "0.5".into())]);
    for (from, to, reason) in [
        ("\"c\"", "\"cobol\"", "unknown language `cobol`"),
        ("\"evictor\"", "\"victor\"", "unknown slot `victor`"),
        ("name", "nmae", "unknown field `nmae`"),
        ("name = \"a\"\n", "", "missing field `name`"),
        ("slot", "memory = \"x\"\nslot", "`x` is not a size"),
        ("slot", "memory = \"10B\"\nslot", "`memory` must be 64KiB or more"),
        ("slot", "deadline = \"1us\"\nslot", "`deadline` must be 1ms or more"),
    ] {
        let refused = read(&good.replacen(from, to, 1)).unwrap_err().to_string();
        assert!(refused.contains(reason) && refused.contains(MANIFEST), "{refused}");
    }
}

/// What a recipe of a project makes that is not run by tools: a script in their place.
fn build_by(script: &str, extra: &[(&str, &[u8])]) -> (Result<Built, Error>, tempfile::TempDir) {
    // A language without tools: the script needs none.
    const NO_TOOLS: Language = Language::C_WITHOUT_TOOLS;
    build_in(&NO_TOOLS, script, extra)
}

fn build_in(
    language: &'static Language,
    script: &str,
    extra: &[(&str, &[u8])],
) -> (Result<Built, Error>, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("with a space");
    let known = Language::find(language.name).unwrap();
    let mut project = create((known, None), SlotKind::Scheduler, "bad", &at).unwrap();
    fs::write(at.join("sdk").join(language.folder).join("compile.sh"), script).unwrap();
    for (name, bytes) in extra {
        fs::write(at.join(name), bytes).unwrap();
    }
    project.language = language;
    let built = build(&project, &project.component());
    (built, dir)
}

#[test]
fn what_is_compiled_is_looked_at() {
    const COPY: &str = "cp made.wasm \"$2\"";
    let fails = |script: &str, made: &[u8], reason: &str| {
        let (built, dir) = build_by(script, &[("made.wasm", made)]);
        let error = built.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
        assert!(!dir.path().join("with a space/bad.wasm").exists(), "{reason}");
    };
    fails("exit 3", b"", "does not compile (exit status: 3)");
    fails(COPY, &import_not_granted(), "wasi:sockets/tcp@0.2.10: something uses the network");
    fails(COPY, &importing("wasi_snapshot_preview1", "clock_time_get"), "it was compiled for WASI");
    fails(COPY, &importing("env", "memcpy"), "env.memcpy: a function that is declared, but defined nowhere");
    fails(COPY, &importing("kvasir:policy/log@0.1.0", "log"), "exports no function of a slot");
    fails(COPY, b"no module", "what was compiled is no policy");
    fails(COPY, guest("describe-traps"), "failed in `describe`");
    let (built, dir) = build_by(COPY, &[("made.wasm", guest("scheduler"))]);
    let built = built.unwrap();
    assert_eq!((built.found.slot, built.found.description.name.as_str()), (SlotKind::Scheduler, "bad"));
    let at = dir.path().join("with a space");
    let written = fs::read(at.join("bad.wasm")).unwrap();
    assert!(written.len() <= guest("scheduler").len());
    assert!(kvasir_tests::component_names(&written).unwrap().0.iter().all(|import| import == error::LOG));
}

#[test]
fn a_component_of_another_slot_than_the_manifest_says_is_not_written() {
    let (built, dir) = build_by("cp made.wasm \"$2\"", &[("made.wasm", guest("evictor"))]);
    let error = built.map(|_| ()).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("names the slot scheduler"), "{error}");
    assert!(!dir.path().join("with a space/bad.wasm").exists());
}

#[test]
fn a_source_that_changed_after_the_component_was_made_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("lru");
    let project = create((Language::find("rust").unwrap(), None), SlotKind::Evictor, "lru", &at).unwrap();
    assert_eq!(project.source_changed(), None, "nothing was made");
    fs::write(project.component(), "").unwrap();
    let built = fs::metadata(project.component()).unwrap().modified().unwrap();
    let touch = |path: &str, seconds: u64| {
        let path = at.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let file = fs::File::create(&path).unwrap();
        file.set_modified(built + std::time::Duration::from_secs(seconds)).unwrap();
        path
    };
    for others in ["target/lru.rs", "sdk/rust/lib.rs", ".git/x.rs", "src/test.rs", "README.md"] {
        touch(others, 1);
    }
    let source = touch("src/deep/er.rs", 0);
    assert_eq!(project.source_changed(), None);
    touch("src/deep/er.rs", 1);
    assert_eq!(project.source_changed(), Some(source));
}

#[test]
fn what_a_runtime_wants_of_wasi_is_answered_by_the_stub() {
    const GO: Language = Language::GO_WITHOUT_TOOLS;
    let build =
        |made: &[u8]| build_in(&GO, "cp made.wasm \"$2\"", &[("made.wasm", made)]).0.map(drop).unwrap_err();
    let only_wasi = build(&importing("wasi_snapshot_preview1", "clock_time_get")).to_string();
    assert!(only_wasi.contains("exports no function of a slot"), "{only_wasi}");
    let sockets = build(&import_not_granted()).to_string();
    assert!(sockets.contains("wasi:sockets/tcp@0.2.10: something uses the network"), "{sockets}");
    assert_eq!(component::imports(&component::of(&reactor(), true).unwrap()).unwrap(), [""; 0]);
    assert!(component::of(&reactor(), false).is_err());
}

/// A balancer's core module that looks at the clock, and traps in whatever it exports.
fn reactor() -> Vec<u8> {
    use wasm_encoder::{
        CodeSection, EntityType, ExportKind, ExportSection, Function, FunctionSection, ImportSection,
        MemorySection, MemoryType, Module, TypeSection,
        ValType::{I32, I64},
    };
    let (mut types, mut imports, mut functions) =
        (TypeSection::new(), ImportSection::new(), FunctionSection::new());
    let (mut memories, mut exports, mut code) =
        (MemorySection::new(), ExportSection::new(), CodeSection::new());
    types.ty().function([I32, I64, I32], [I32]);
    imports.import("wasi_snapshot_preview1", "clock_time_get", EntityType::Function(0));
    memories.memory(MemoryType {
        minimum: 1,
        maximum: None,
        memory64: false,
        shared: false,
        page_size_log2: None,
    });
    exports.export("memory", ExportKind::Memory, 0);
    let signatures: [(&str, &[_]); 6] = [
        ("cabi_realloc", &[I32; 4]),
        ("kvasir:policy/control@0.1.0#describe", &[]),
        ("kvasir:policy/control@0.1.0#configure", &[I32; 2]),
        ("kvasir:policy/control@0.1.0#export-state", &[]),
        ("kvasir:policy/control@0.1.0#import-state", &[I32; 2]),
        ("kvasir:policy/balancing@0.1.0#tick", &[I64, I32, I32, I32, I32, I32, I32]),
    ];
    for (index, (name, parameters)) in (1..).zip(signatures) {
        types.ty().function(parameters.iter().copied(), [I32]);
        functions.function(index);
        exports.export(name, ExportKind::Func, index);
        let mut body = Function::new([]);
        body.instructions().i32_const(0).i64_const(0).i32_const(0).call(0).unreachable().end();
        code.function(&body);
    }
    let mut module = Module::new();
    module
        .section(&types)
        .section(&imports)
        .section(&functions)
        .section(&memories)
        .section(&exports)
        .section(&code);
    module.finish()
}

/// A core module with that import, and nothing else.
fn importing(module: &str, name: &str) -> Vec<u8> {
    use wasm_encoder::{EntityType, ImportSection, Module, TypeSection};
    let (mut types, mut imports) = (TypeSection::new(), ImportSection::new());
    types.ty().function([], []);
    imports.import(module, name, EntityType::Function(0));
    Module::new().section(&types).section(&imports).clone().finish()
}

#[test]
fn missing_tools_are_named_with_where_to_get_them() {
    let nowhere = [std::path::PathBuf::from("/nonexistent")];
    for (language, get) in
        [("assemblyscript", "npm install"), ("python", "pip install"), ("rust", "https://rustup.rs")]
    {
        if let Some(tool) = Language::find(language).unwrap().missing_tool(&nowhere) {
            assert!(tool.get.contains(get), "{tool:?}");
        } // else CARGO or the like is set here
    }
}

fn tried(bytes: &[u8], settings: &[(&str, &str)]) -> Report {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("policy.wasm");
    fs::write(&file, bytes).unwrap();
    let settings = settings.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
    // Longer than a busy machine keeps a thread waiting.
    let hot_deadline = Duration::from_millis(500);
    let config = PolicyConfig { evictor_slots: 1 << 16, hot_deadline, ..PolicyConfig::unhurried() };
    check(&file, &Trial { config, settings, seed: 1, vectors: Vec::new(), record_to: None, called: None })
        .unwrap()
}

#[test]
fn a_manifest_that_says_another_slot_fails() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("policy.wasm");
    let lru = kvasir_default_policies::EVICTORS.iter().find(|policy| policy.name == "lru").unwrap();
    fs::write(&file, lru.component).unwrap();
    let config = PolicyConfig { evictor_slots: 1 << 16, ..PolicyConfig::unhurried() };
    let called = |slot| Some((slot, "lru".to_owned(), "0.1.0".to_owned()));
    let says = |slot| {
        let (config, called) = (config.clone(), called(slot));
        let trial =
            Trial { config, settings: Vec::new(), seed: 1, vectors: Vec::new(), record_to: None, called };
        let report = check(&file, &trial).unwrap();
        report.rows.into_iter().find(|row| row.check == "says who it is").unwrap()
    };
    assert_eq!(says(SlotKind::Evictor).verdict, Verdict::Passed);
    let other = says(SlotKind::Scheduler);
    assert_eq!((other.verdict, other.came.as_str()), (Verdict::Failed, "evictor lru 0.1.0"));
}

#[test]
fn every_default_policy_passes() {
    let schedulers = kvasir_default_policies::SCHEDULERS.iter().map(|d| (d.name, d.component));
    let evictors = kvasir_default_policies::EVICTORS.iter().map(|d| (d.name, d.component));
    let admitters = kvasir_default_policies::ADMITTERS.iter().map(|d| (d.name, d.component));
    let balancers = kvasir_default_policies::BALANCERS.iter().map(|d| (d.name, d.component));
    let mut learners = Vec::new();
    for (name, component) in schedulers.chain(evictors).chain(admitters).chain(balancers) {
        let report = tried(component, &[]);
        assert!(report.passed(), "{name}: {:#?}", report.rows);
        learners.extend(report.rows.iter().filter(|row| row.check == "learning").map(|_| name));
    }
    assert_eq!(learners, [["fitted-cost"; 4], ["lbgr"; 4]].concat());
}

#[test]
fn every_fault_fails_its_check() {
    let fails = |name: &str, mode: &str, check: &str, reason: &str| {
        let settings: &[_] = if mode.is_empty() { &[] } else { &[("mode", mode), ("after", "3")] };
        let report = tried(guest(name), settings);
        let failed: Vec<_> = report.rows.iter().filter(|row| row.verdict == Verdict::Failed).collect();
        let as_expected = failed.iter().any(|row| row.check == check && row.came.contains(reason));
        assert!(as_expected && !report.passed(), "{name} {mode}: {failed:#?}");
    };
    let passes = tried(guest("careless"), &[]);
    assert!(passes.passed(), "{:#?}", passes.rows);
    fails("careless", "explain-decides", "answers", "in another instance that was told and asked the same");
    fails("careless", "looks-into-nans", "answers", "in another instance that was told and asked the same");
    fails("careless", "forgets", "state", "after the hand-over, step 0: `schedule` answered");
    fails("careless", "chokes", "state", "`import-state` of 0 B trapped");
    fails("careless", "loop", "answers", "ran past its deadline of 500ms");
    fails("careless", "trap", "answers", "step 3: `schedule` trapped");
    fails("careless", "trap", "answers", "the last line of its log: will do: trap");
    fails("careless", "grow", "answers", "trapped: forcing trap when growing memory");
    fails("evictor", "grow", "answers", "where 16777472 are allowed");
    fails("careless", "no such mode", "settings", "`no such mode` is none of");
    fails("scheduler", "", "answers", "`explain` invalid answer");
    fails("evictor", "", "ancestors", "left a block behind them that no prompt can reach");
    fails("evictor", "free", "answers", "is a free slot");
    fails("evictor", "out-of-range", "answers", "is outside the pool");
    fails("evictor", "repeat", "answers", "was chosen before");
    fails("evictor", "too-few", "answers", "1 victims where");
    fails("evictor", "too-many", "answers", "victims where");
    fails("admitter", "reason-99", "answers", "rejection for reason 99; the contract has 1 to 5");
    fails("admitter", "unknown", "answers", "unknown verdict 99");
    fails("admitter", "short", "answers", "answers for");
    fails("balancer", "nan", "answers", "threshold NaN");
    fails("balancer", "flood", "answers", "1000000 thresholds");
    fails("learning", "trap", "learning", "`observe` trapped");
    fails("learning", "publish-too-much", "learning", "1048577 bytes to publish; at most 1048576");
    fails("learning", "trap-on-adopt", "learning", "`adopt` trapped");
    fails("describe-lies", "", "loads", "says it is a `evictor`");
    fails("describe-traps", "", "loads", "failed in `describe`");
    let report = tried(&import_not_granted(), &[]);
    assert!(
        report.rows[0].came.contains("`wasi:sockets/tcp@0.2.10`, which is not granted"),
        "{:?}",
        report.rows
    );
}

#[test]
fn a_trial_follows_from_its_seed() {
    let came = |seed| {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("policy.wasm");
        fs::write(&file, guest("careless")).unwrap();
        let settings = vec![("mode".into(), "forgets".into())];
        let config = PolicyConfig::unhurried();
        let trial = Trial { config, settings, seed, vectors: Vec::new(), record_to: None, called: None };
        let rows = check(&file, &trial).unwrap().rows;
        rows.into_iter().find(|row| row.verdict == Verdict::Failed).unwrap().came
    };
    assert_eq!(came(7), came(7));
}
