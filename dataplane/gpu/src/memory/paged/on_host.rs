//! The kernel's own source, compiled for the processor and run over random pages.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use proptest::test_runner::{Config, TestRunner};

use super::tiles::{Span, moves, tiles, width};
use super::{Way, by_hand};
use kvasir_memory::layout::cases::cases;
use kvasir_memory::layout::paged::{Descriptor, Regions, descriptors};

/// Returns `None` if there is no C++ compiler.
fn compile(dir: &Path) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/memory/paged/on_host.cc");
    let program = dir.join("on_host");
    let compiler = Command::new("c++").args(["-std=c++17", "-O1", "-o"]).arg(&program).arg(source).status();
    match compiler {
        Ok(status) => {
            assert!(status.success(), "gather.cu is not what a C++ compiler takes");
            Some(program)
        }
        Err(error) => {
            println!("skipped: no C++ compiler: {error}");
            None
        }
    }
}

/// Runs the program on both memories and returns the result.
fn run(program: &Path, list: &[Descriptor], way: Way, engine: &[u8], block: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let span = |bytes: &[u8]| Span { address: 0, len: bytes.len() as u64 };
    let moves = moves(&[span(engine)], span(block), list).unwrap();
    let width = width(&moves);
    let tiles = tiles(&moves, width);
    let gather = u64::from(way == Way::Gather);
    let numbers = [width, gather, tiles.len() as u64, engine.len() as u64, block.len() as u64];
    let mut input: Vec<u8> = numbers.into_iter().flat_map(u64::to_ne_bytes).collect();
    input.extend(tiles.iter().flat_map(|tile| tile.encode()));
    input.extend(engine.iter().chain(block));
    let mut child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    // The program reads all of it before it writes.
    child.stdin.take().unwrap().write_all(&input).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", output.status);
    let (engine, block) = output.stdout.split_at(engine.len());
    (engine.to_vec(), block.to_vec())
}

#[test]
fn the_kernel_moves_every_byte_to_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = compile(dir.path()) else { return };
    let config = Config { cases: 64, failure_persistence: None, ..Config::default() };
    let ran = TestRunner::new(config).run(&cases(), |(kv, layout, order, pages, tokens)| {
        // The engine's regions one after the other, treated as one.
        let list: Vec<Descriptor> = descriptors(&kv, &layout, order, &pages, tokens)
            .unwrap()
            .into_iter()
            .map(|d| Descriptor {
                region: 0,
                engine_offset: u64::from(d.region) * layout.region_bytes + d.engine_offset,
                ..d
            })
            .collect();
        let regions = match layout.regions {
            Regions::One => 1,
            Regions::PerLayer => kv.layers,
            Regions::PerPlane => kv.layers * kv.planes(),
        };
        let engine: Vec<u8> = (0..layout.region_bytes * u64::from(regions)).map(|i| (i * 7) as u8).collect();
        let block: Vec<u8> = (0..kv.bytes_per_block(tokens).unwrap()).map(|i| (i * 11 + 3) as u8).collect();
        for way in [Way::Gather, Way::Scatter] {
            let (mut wanted_engine, mut wanted_block) = (engine.clone(), block.clone());
            by_hand(std::slice::from_mut(&mut wanted_engine), &mut wanted_block, &list, way);
            let (found_engine, found_block) = run(&program, &list, way, &engine, &block);
            assert!(found_engine == wanted_engine && found_block == wanted_block, "{way:?} of {list:?}");
        }
        Ok(())
    });
    ran.unwrap();
}
