//! The interface as C sees it: the header is what the source says, and programs in C work against a real host.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

// Has the library built.
use kvasir_c as _;

use kvasir_protocol::clock::Clock;
use kvasir_server::access::OwnUser;
use kvasir_server::node::Node;
use kvasir_server::{Listen, Server, ServerConfig};
use kvasir_store::config::DramConfig;
use kvasir_store::dram::DramStore;

const TOKEN: &str = "only for tests";

fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// With `KVASIR_WRITE_HEADER` set it is written.
#[test]
fn the_header_is_that_of_the_source() {
    let config = cbindgen::Config::from_file(folder().join("cbindgen.toml")).unwrap();
    let mut sources = cbindgen::Builder::new().with_config(config);
    for source in ["failure", "options", "client", "calls", "jobs"] {
        sources = sources.with_src(folder().join(format!("src/{source}.rs")));
    }
    let mut made = Vec::new();
    sources.generate().unwrap().write(&mut made);
    let (made, path) = (String::from_utf8(made).unwrap(), folder().join("include/kvasir.h"));
    if std::env::var_os("KVASIR_WRITE_HEADER").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap();
    assert!(
        found == made,
        "include/kvasir.h is not that of the source; \
         `KVASIR_WRITE_HEADER=1 cargo test -p kvasir-c the_header` writes it"
    );
}

#[test]
fn the_header_is_also_cpp() {
    let header = folder().join("include/kvasir.h");
    let flags = ["-x", "c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"];
    match Command::new("c++").args(flags).arg(&header).status() {
        Ok(status) => assert!(status.success()),
        Err(error) => println!("skipped: no C++ compiler: {error}"),
    }
}

/// A file that cargo built beside this test.
fn built(name: &str) -> PathBuf {
    let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let path = folder.join(name);
    assert!(path.exists(), "{} is missing", path.display());
    path
}

/// Compiles a program without a single warning.
fn compile(source: &str, program: &Path, more: &[&OsStr]) -> bool {
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-D_POSIX_C_SOURCE=200809L", "-Wall", "-Wextra", "-Werror", "-pedantic", "-g"]);
    cc.arg("-I").arg(folder().join("include")).arg(folder().join(source)).arg("-o").arg(program).args(more);
    cc.status().unwrap().success()
}

/// The library, as a program that is linked with it sees it: at once, or when it starts.
fn ways(dir: &Path) -> [(&'static str, Vec<PathBuf>); 2] {
    std::os::unix::fs::symlink(built("libkvasir_c.so"), dir.join("libkvasir.so.1")).unwrap();
    [("static", vec![built("libkvasir_c.a")]), ("shared", vec![dir.join("libkvasir.so.1")])]
}

fn run_everywhere(source: &str, host_less: bool) {
    let dir = tempfile::tempdir().unwrap();
    let store = DramStore::open(DramConfig { pool_bytes: 16 << 20, ..DramConfig::default() }).unwrap();
    let listen = Listen {
        unix: Some(dir.path().join("data.sock")),
        tcp: Some(([127, 0, 0, 1], 0).into()),
        ..Listen::default()
    };
    let gate = Arc::new(OwnUser { token: Some(TOKEN.into()) });
    let node = Node::dram_only(Arc::new(store), Clock::start());
    let server = Server::start(node, &listen, gate, ServerConfig::default()).unwrap();
    let unix = format!("unix:{}", dir.path().join("data.sock").display());
    let endpoints = [unix, server.tcp_addr().unwrap().to_string()];
    for (way, library) in ways(dir.path()) {
        // Without the sanitizers where the compiler has none.
        let sanitized: &[&str] = &["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
        let mut found = None;
        for flags in [sanitized, &[]] {
            let program = dir.path().join(format!("{way}{}", flags.len()));
            let mut more: Vec<&OsStr> = flags.iter().map(OsStr::new).collect();
            more.extend(library.iter().map(|path| path.as_os_str()));
            more.extend(["-lpthread", "-ldl", "-lm"].map(OsStr::new));
            if compile(source, &program, &more) {
                println!("{source}, {way}: {flags:?}");
                found = Some(program);
                break;
            }
        }
        let program = found.expect("the compiler's own messages say why");
        for endpoint in &endpoints {
            let mut command = Command::new(&program);
            command.args([endpoint.as_str(), TOKEN]).env("LD_LIBRARY_PATH", dir.path());
            let status = command.status().unwrap();
            assert!(status.success(), "{source}, {way}, {endpoint}: {status}");
        }
        if host_less {
            let status = Command::new(&program).env("LD_LIBRARY_PATH", dir.path()).status().unwrap();
            assert!(!status.success());
        }
    }
}

#[test]
fn every_call_works_from_c() {
    run_everywhere("tests/calls.c", false);
}

#[test]
fn the_example_saves_and_loads() {
    run_everywhere("examples/engine.c", true);
}
