//! A trace of requests: a byte for the size of its blocks, and then lines as they are (`t`), or compressed (`z`).

use crate::kind;
use crate::text::told;
use flate2::Compression;
use flate2::write::GzEncoder;
use kvasir::replay::trace::{Error, MAX_BLOCK_SIZE_TOKENS, Reader, Request};
use std::io::{Cursor, Write};
use std::path::Path;

pub(crate) fn run(data: &[u8]) {
    let Some((kind, rest)) = kind(data) else { return };
    let Some((&size, lines)) = rest.split_first() else { return };
    let size = 1 << (size % 14);
    match kind {
        b't' => read(lines, size),
        b'z' => {
            let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
            gzip.write_all(lines).expect("memory takes everything");
            read(&gzip.finish().expect("memory takes everything"), size);
        }
        _ => {}
    }
}

fn requests(lines: Vec<u8>, size: u32) -> Result<Vec<Request>, Error> {
    let path = Path::new("trace.jsonl");
    let mut requests = Vec::new();
    for request in Reader::new(path, Cursor::new(lines))?.of_blocks(size) {
        requests.push(request?);
    }
    Ok(requests)
}

/// What reads is sorted and has its blocks, and is written again as the same.
fn read(lines: &[u8], size: u32) {
    let requests_of = |lines: Vec<u8>| requests(lines, size);
    let read = match requests_of(lines.to_vec()) {
        Ok(read) => read,
        Err(refusal) => return drop(told(&refusal)),
    };
    assert!(read.is_sorted_by_key(|request| request.time_us));
    let size = size.min(MAX_BLOCK_SIZE_TOKENS);
    for request in &read {
        assert_eq!(request.blocks.len(), request.input_tokens.div_ceil(size) as usize);
        assert!(!request.blocks.is_empty());
    }
    let line = |request: &Request| serde_json::to_string(request).expect("a request is JSON") + "\n";
    let lines: String = read.iter().map(line).collect();
    assert_eq!(requests_of(lines.into_bytes()).expect("what is written reads"), read);
}
