//! What hosts say to each other: a frame as it is (`r`), the body of a request (`q`) or of an answer (`a`), the notice of a layer
//! (`n`); and a record of a copy that is wanted, which a host left on its disk (`t`).

use crate::kind;
use crate::text::told;
use kvasir_dataplane::cluster::handover::{LAYERS_MAX, notice};
use kvasir_dataplane::cluster::message::{self, FRAME_MAX, FrameError, Reply, Request, VERSION};
use kvasir_dataplane::cluster::targets;
use kvasir_dataplane::topology::matrix::Matrix;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;

const HEADER_LEN: usize = 12;

pub(crate) fn run(data: &[u8]) {
    match kind(data) {
        Some((b'r', bytes)) => {
            request(bytes);
            reply(bytes);
        }
        Some((b'q', body)) => request(&framed(body)),
        Some((b'a', body)) => reply(&framed(body)),
        Some((b'n', bytes)) => notice(bytes),
        Some((b't', record)) => target(record),
        _ => {}
    }
}

fn framed(body: &[u8]) -> Vec<u8> {
    let head = [b'K', b'V', b'C', b'L', VERSION, 0, 0, 0];
    [&head[..], &(body.len() as u32).to_le_bytes(), body].concat()
}

fn request(bytes: &[u8]) {
    if let Some(request) = again::<Request>(bytes) {
        let (sane, blocks) = (request.is_sane(), blocks(&request));
        assert!(!sane || blocks <= kvasir_dataplane::BATCH_MAX);
    }
}

fn blocks(request: &Request) -> usize {
    match request {
        Request::Lend { keys, release } => keys.len().max(release.len()),
        Request::Has { keys } | Request::Remove { keys, .. } => keys.len(),
        Request::Copy { items, .. } => items.len(),
        Request::Open { blocks, put_after, .. } => blocks.len().max(put_after.len()),
        Request::Settle { checksums, .. } => checksums.len(),
        Request::Hello { .. } | Request::Watch { .. } | Request::GiveUp { .. } | Request::Describe => 0,
    }
}

fn reply(bytes: &[u8]) {
    if let Some(Reply::Welcome(welcome)) = again::<Reply>(bytes) {
        let matrix = Matrix::from_json(welcome.matrix.as_bytes()).unwrap_or_default();
        assert_eq!(Matrix::from_json(matrix.to_json().as_bytes()).ok(), Some(matrix));
    }
}

/// What is read is written, and reads as the same; nothing behind a frame is read.
fn again<M: Serialize + DeserializeOwned + PartialEq + Debug>(bytes: &[u8]) -> Option<M> {
    let mut left = bytes;
    let read: Result<M, FrameError> = message::read(&mut left);
    let message = match read {
        Ok(message) => message,
        Err(refusal) => {
            told(&refusal);
            return None;
        }
    };
    let taken = bytes.len() - left.len();
    assert!((HEADER_LEN..=HEADER_LEN + FRAME_MAX).contains(&taken));
    let mut frame = Vec::new();
    message::write(&mut frame, &message).expect("what is read is written");
    assert!(frame.len() <= taken, "numbers are written in the shortest way");
    let second: M = message::read(&mut &frame[..]).expect("what is written reads");
    assert_eq!(second, message);
    Some(message)
}

fn notice(bytes: &[u8]) {
    if let Some((id, layer, layers)) = notice::decode(bytes) {
        assert!(layer < layers && layers <= LAYERS_MAX);
        assert_eq!(notice::encode(id, layer, layers), bytes);
    }
}

fn target(record: &[u8]) {
    if let Some(holding) = targets::decode(record) {
        assert!(holding.size > 0);
        assert_eq!(targets::decode(&targets::encode(&holding)), Some(holding));
    }
}
