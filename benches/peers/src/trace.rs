//! A recorded trace as chains of 16-token blocks.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

/// Blocks of 16 tokens in one of the trace, which has 512.
const PARTS: u64 = 32;

#[derive(Deserialize)]
struct Request {
    input_length: usize,
    hash_ids: Vec<u64>,
}

/// The whole blocks of each request, as `kvasir bench index` cuts them.
pub(crate) fn chains(path: &Path) -> Result<Vec<Vec<u64>>> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let lines = BufReader::new(flate2::read::MultiGzDecoder::new(file)).lines();
    let chain = |(number, line): (usize, std::io::Result<String>)| {
        let place = || format!("{}, line {}", path.display(), number + 1);
        let request: Request = serde_json::from_str(&line.with_context(place)?).with_context(place)?;
        let parts =
            request.hash_ids.iter().flat_map(|&id| (0..PARTS).map(move |part| mixed(id * PARTS + part)));
        Ok(parts.take(request.input_length / 16).collect())
    };
    lines.enumerate().map(chain).collect()
}

/// The finaliser of splitmix64, which maps no two numbers to one.
fn mixed(number: u64) -> u64 {
    let mut bits = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
