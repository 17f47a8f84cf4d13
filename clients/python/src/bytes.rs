//! The byte strings in which Python hands over lists: parsed here, and only here.

use kvasir_client::data::{BlockKey, Label, Namespace, Run};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

pub(crate) fn namespace(bytes: &[u8]) -> PyResult<Namespace> {
    let digest = bytes.try_into().map_err(|_| {
        let len = bytes.len();
        PyValueError::new_err(format!("a namespace is a digest of 32 B, and this one has {len} B"))
    })?;
    Ok(Namespace::new(digest))
}

/// The hashes that lie one behind the other in `bytes`, `each` B long.
pub(crate) fn hashes(bytes: &[u8], each: usize) -> PyResult<std::slice::ChunksExact<'_, u8>> {
    if each == 0 || !bytes.len().is_multiple_of(each) {
        let text = format!("{} B of hashes are no whole number of {each} B", bytes.len());
        return Err(PyValueError::new_err(text));
    }
    Ok(bytes.chunks_exact(each))
}

/// Numbers of blocks: u32, little-endian, as many as there are hashes.
pub(crate) fn blocks(bytes: &[u8], hashes: usize) -> PyResult<impl Iterator<Item = usize>> {
    let (numbers, rest) = bytes.as_chunks::<4>();
    if numbers.len() != hashes || !rest.is_empty() {
        let text = format!("{} B of block numbers for {hashes} hashes; each is a u32, 4 B", bytes.len());
        return Err(PyValueError::new_err(text));
    }
    Ok(numbers.iter().map(|number| u32::from_le_bytes(*number) as usize))
}

/// Runs of a plan: address, length and stride of each as u64, little-endian.
pub(crate) fn runs(bytes: &[u8]) -> PyResult<Vec<Run>> {
    let (triples, rest) = bytes.as_chunks::<24>();
    if !rest.is_empty() {
        let text = format!("{} B of runs; each is an address, a length and a stride of 8 B", bytes.len());
        return Err(PyValueError::new_err(text));
    }
    let run = |triple: &[u8; 24]| {
        let mut numbers = triple.as_chunks::<8>().0.iter().map(|number| u64::from_le_bytes(*number) as usize);
        let mut next = || numbers.next().unwrap_or_default();
        Run { addr: next(), len: next(), stride: next() }
    };
    Ok(triples.iter().map(run).collect())
}

/// How many bytes a block of this payload has with its label.
pub(crate) fn with_label(payload: u32) -> PyResult<u32> {
    payload.checked_add(Label::BYTES).ok_or_else(|| {
        let most = u32::MAX - Label::BYTES;
        PyValueError::new_err(format!("a block of {payload} B is too large; the most is {most} B"))
    })
}

/// Keys of the blocks that these hashes name.
pub(crate) fn keys<'a>(namespace: &Namespace, hashes: impl IntoIterator<Item = &'a [u8]>) -> Vec<BlockKey> {
    hashes.into_iter().map(|hash| namespace.key(hash)).collect()
}
