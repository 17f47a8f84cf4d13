//! A trace of requests: a byte for the size of its blocks, and then lines as they are (`t`, of the Bailian release `b`), or
//! compressed (`z`).

use crate::kind;
use crate::text::told;
use flate2::Compression;
use flate2::write::GzEncoder;
use kvasir::replay::convert::Converter;
use kvasir::replay::trace::{Error, Format, MAX_BLOCK_SIZE_TOKENS, Reader, Request};
use std::io::{Cursor, Write};
use std::path::Path;

pub(crate) fn run(data: &[u8]) {
    let Some((kind, rest)) = kind(data) else { return };
    let Some((&size, lines)) = rest.split_first() else { return };
    let size = 1 << (size % 14);
    match kind {
        b't' => read(lines, size),
        b'b' => convert(lines, size),
        b'z' => {
            let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
            gzip.write_all(lines).expect("memory takes everything");
            read(&gzip.finish().expect("memory takes everything"), size);
        }
        _ => {}
    }
}

fn requests_of(format: Format, lines: Vec<u8>, size: u32) -> Result<Vec<Request>, Error> {
    let path = Path::new("trace.jsonl");
    Reader::new(path, Cursor::new(lines))?.of_format(format).of_blocks(size).collect()
}

fn requests(lines: Vec<u8>, size: u32) -> Result<Vec<Request>, Error> {
    requests_of(Format::Mooncake, lines, size)
}

/// What reads is converted to blocks of any size that fits, keeps its lengths, and reads again in the other format.
fn convert(lines: &[u8], size: u32) {
    let read = match requests_of(Format::Bailian, lines.to_vec(), size) {
        Ok(read) => read,
        Err(refusal) => return drop(told(&refusal)),
    };
    let from = size.min(MAX_BLOCK_SIZE_TOKENS);
    for to in [from, 2 * from] {
        let Ok(mut converter) = Converter::new(from, to) else { continue };
        let converted = read.iter().map(|request| converter.convert(request.clone()).expect("few prefixes"));
        let line = |request: Request| serde_json::to_string(&request).expect("a request is JSON") + "\n";
        let lines: String = converted.map(line).collect();
        let again = requests(lines.into_bytes(), to).expect("what is converted reads");
        assert!(again.iter().zip(&read).all(|(again, read)| again.input_tokens == read.input_tokens));
        assert_eq!(again.len(), read.len());
    }
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
