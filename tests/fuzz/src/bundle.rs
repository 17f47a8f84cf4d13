//! A bundle as it is (`r`), or one whose digests and sizes are right, which no chance would make them (`f`): the index and then
//! the blobs, with a line `----` between them. In those that are JSON, `@3` stands for `sha256:` and the digest of the third blob,
//! `%3` for the digest alone and `#3` for its size; they may name blobs behind them.

use crate::kind;
use crate::text::told;
use kvasir::package::Error;
use kvasir::package::bundle::{self, Saved};
use kvasir::policy::Digest;
use std::path::Path;

pub(crate) fn run(data: &[u8]) {
    let bytes = match kind(data) {
        Some((b'r', bytes)) => bytes.to_vec(),
        Some((b'f', parts)) => forged(parts),
        _ => return,
    };
    let read = match read(&bytes) {
        Ok(read) => read,
        Err(refusal) => return drop(told(&refusal)),
    };
    for Saved { name, package } in &read {
        told(name);
        let file = package.file_name();
        assert!(Path::new(&file).file_name().is_some_and(|name| *name == *file), "`{file}` is no plain name");
    }
    // What is written again is the same, but for what was there twice.
    let again = repacked(&read);
    let components = |saved: &[Saved]| saved.iter().map(|s| s.package.component_digest()).collect::<Vec<_>>();
    assert_eq!(components(&again), components(&read));
    assert_eq!(repacked(&again), again);
}

fn read(bytes: &[u8]) -> Result<Vec<Saved>, Error> {
    bundle::read_from(Path::new("it.tar"), bytes)
}

fn repacked(saved: &[Saved]) -> Vec<Saved> {
    let mut bytes = Vec::new();
    bundle::pack(&mut bytes, saved).expect("memory takes everything");
    read(&bytes).expect("what was written reads")
}

/// A tar of these parts, in which every blob has the name that it should have.
fn forged(parts: &[u8]) -> Vec<u8> {
    let mut parts = split(parts, b"\n----\n");
    for place in (0..parts.len()).rev() {
        let (part, behind) = parts[place..].split_first_mut().expect("it has this part");
        if part.starts_with(b"{") {
            *part = filled(part, place, behind);
        }
    }
    let (index, blobs) = parts.split_first().expect("a text has a first part");
    let mut tar = tar::Builder::new(Vec::new());
    let mut append = |name: &str, bytes: &[u8]| {
        let mut header = tar::Header::new_ustar();
        header.set_size(bytes.len() as u64);
        tar.append_data(&mut header, name, bytes).expect("memory takes everything");
    };
    append("oci-layout", b"{}");
    append("index.json", index);
    for blob in blobs {
        append(&format!("blobs/sha256/{}", Digest::of(blob)), blob);
    }
    tar.into_inner().expect("memory takes everything")
}

fn split(text: &[u8], between: &[u8]) -> Vec<Vec<u8>> {
    let (mut parts, mut from) = (Vec::new(), 0);
    while let Some(at) = text[from..].windows(between.len()).position(|window| window == between) {
        parts.push(text[from..from + at].to_vec());
        from += at + between.len();
    }
    parts.push(text[from..].to_vec());
    parts
}

/// `place` is that of the part itself; the first of `behind` has the number after it.
fn filled(part: &[u8], place: usize, behind: &[Vec<u8>]) -> Vec<u8> {
    let mut filled = Vec::new();
    let mut bytes = part.iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        let number = bytes.peek().and_then(|digit| (*digit as char).to_digit(10));
        let blob = number.and_then(|number| behind.get((number as usize).checked_sub(place + 1)?));
        let text = match (byte, blob) {
            (b'@', Some(blob)) => format!("sha256:{}", Digest::of(blob)),
            (b'%', Some(blob)) => Digest::of(blob).to_string(),
            (b'#', Some(blob)) => blob.len().to_string(),
            _ => {
                filled.push(byte);
                continue;
            }
        };
        bytes.next();
        filled.extend(text.into_bytes());
    }
    filled
}
