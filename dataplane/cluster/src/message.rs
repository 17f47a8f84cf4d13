//! What hosts say to each other about blocks, and how it is framed. Bytes of blocks go by the transfer engine.
//!
//! A frame is 12 bytes (magic "KVCL", version, three zeros, length u32, little-endian) and a body in postcard's format,
//! at most [`FRAME_MAX`] long. The side that connected asks, the other answers, one at a time. A frame that does not
//! decode ends the connection.

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::table::{Fact, Generation, Holding};
use kvasir_protocol::block::{BATCH_MAX, BlockKey, BlockMeta};

const MAGIC: [u8; 4] = *b"KVCL";
/// The version of frames and of everything in them.
///
/// 8: a host that is asked to remove says what it knows that is later. 7: claims name no checksum, and a hand-over says what time its sender has heard of. 6: a hand-over says of each block after which removal it was put. 5: a push is a hand-over whose blocks are kept each by itself. 4: removals have generations, and loans a time to live. 3: another version of a block that is there counts as there. 2: hand-overs layer by layer.
pub const VERSION: u8 = 8;
const HEADER_LEN: usize = 12;
/// Above the longest legal body: 4,096 loans of some 100 B.
pub const FRAME_MAX: usize = 1 << 20;

/// Why a frame did not come.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("the connection ended or stalled: {0}")]
    Io(#[from] io::Error),
    #[error("it does not speak this protocol: a frame starts with {0:02x?}")]
    Magic([u8; 4]),
    #[error(
        "it speaks version {0} of the protocol between hosts, this side {VERSION}; use the same release on both"
    )]
    Version(u8),
    #[error("a frame of {0} B is above the limit of {FRAME_MAX} B")]
    TooLong(u32),
    #[error("a frame of {len} B has no meaning: {reason}")]
    Body { len: usize, reason: String },
}

/// How far a listener has heard another host's news.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Since {
    /// It has heard nothing: it needs all that the host holds.
    Start,
    /// It has heard a part of that, and needs the rest.
    Rest,
    At(u64),
}

/// The state of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub free_bytes: u64,
    pub pool_bytes: u64,
    /// Blocks being copied or lent to other hosts, and copies queued.
    pub load: u64,
    /// How often what it says in [`Welcome`] has changed.
    pub revision: u32,
}

/// A block that its holder keeps in place for a while, and where that is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loan {
    /// Its time to live is what is left of it.
    pub meta: BlockMeta,
    pub checksum: u64,
    /// In the holder's pool.
    pub offset: u64,
    pub lease: u64,
}

/// What the side that connected asks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// First of every connection.
    Hello { cluster: String },
    /// Answered as soon as there is news, and soon in any case: it is the heartbeat, too.
    Watch { since: Since },
    /// Wants to read blocks; `release` are loans that it is done with.
    Lend { keys: Vec<BlockKey>, release: Vec<u64> },
    /// Asks which blocks a tier of the host has at this moment.
    Has { keys: Vec<BlockKey> },
    /// Asks the host to fetch copies from the caller, and to say when it has them.
    Copy { items: Vec<(Loan, Holding)>, lease_ms: u64 },
    /// Blocks are removed everywhere, in what was put before that.
    Remove { keys: Vec<BlockKey>, at: Generation },
    /// Is about to write blocks layer by layer. `id` is new with every hand-over, and names it from here on. Each block was
    /// put after what `put_after` has for it, where a removal that came later removes it, and before `now`.
    Open {
        id: u64,
        keep: Keep,
        layers: u32,
        blocks: Vec<BlockMeta>,
        put_after: Vec<Generation>,
        now: Generation,
    },
    /// Has written all layers of it; one checksum per block.
    Settle { id: u64, checksums: Vec<u64> },
    /// Will not write any more of it.
    GiveUp { id: u64, reason: String },
    /// Asks for the [`Welcome`] again, because it has changed.
    Describe,
}

/// What the other side answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    Refused {
        reason: String,
    },
    Welcome(Welcome),
    /// `reset`: forget what this host said before.
    News {
        reset: bool,
        facts: Vec<Fact>,
        next: Since,
        status: Status,
    },
    /// One per key. `None` means that it does not have the block.
    Lent {
        loans: Vec<Option<Loan>>,
        lease_ms: u64,
    },
    /// One per item.
    Copied {
        outcomes: Vec<Copied>,
    },
    /// One per key.
    Has {
        held: Vec<bool>,
    },
    /// One per key: whether there was one. `later` is the latest put or removal of these blocks that the time of this removal
    /// does not come after, so that what was put then is still there.
    Removed {
        removed: Vec<bool>,
        later: Option<Generation>,
    },
    /// For each block, whether it must be written. Those that must be are the regions of the segment, in order.
    Opened {
        segment: String,
        wanted: Vec<bool>,
    },
    GivenUp,
}

/// Which blocks of a hand-over are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Keep {
    /// All of them or none. They belong to a request that engines on both hosts know by this number, and may be read
    /// layer by layer.
    All { request: u64 },
    /// Each that arrives intact, whatever becomes of the others.
    Each,
}

/// What a host says of itself once, at the beginning.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Welcome {
    /// Where its pool is reached: kind of transport and address on it.
    pub rails: Vec<(String, String)>,
    /// Which NICs serve which memory there, as JSON.
    pub matrix: String,
    /// The NIC behind each of `rails`, by the names of `matrix`; empty where it is not known.
    pub nics: Vec<String>,
    /// Which machine it runs on; empty if it does not know.
    pub machine: String,
    /// How often this has changed.
    pub revision: u32,
    /// Where it takes puts over TCP; empty if nowhere.
    pub data: String,
}

/// The outcome of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Copied {
    /// It is there, compared with its checksum.
    Done,
    /// It was there already, perhaps with other bytes: what is stored is as good.
    Had,
    NoRoom,
    /// It is not wanted there: as far as that host knows, enough others hold the block, or it is being removed.
    Enough,
    /// Its bytes did not arrive, or not intact.
    Failed,
}

impl Request {
    /// Whether it keeps the bounds of a batch, and its times are plausible at present.
    pub fn is_sane(&self) -> bool {
        match self {
            Self::Hello { .. } | Self::Watch { .. } | Self::GiveUp { .. } | Self::Describe => true,
            Self::Lend { keys, release } => keys.len() <= BATCH_MAX && release.len() <= BATCH_MAX,
            Self::Copy { items, .. } => {
                let sane = |(loan, holding): &(Loan, Holding)| {
                    loan.meta.size > 0 && holding.generation.is_plausible()
                };
                items.len() <= BATCH_MAX && items.iter().all(sane)
            }
            Self::Remove { keys, at } => keys.len() <= BATCH_MAX && at.is_plausible(),
            Self::Has { keys } => keys.len() <= BATCH_MAX,
            Self::Settle { checksums, .. } => checksums.len() <= BATCH_MAX,
            Self::Open { blocks, put_after, now, .. } => {
                blocks.len() <= BATCH_MAX
                    && blocks.len() == put_after.len()
                    && blocks.iter().all(|meta| meta.size > 0)
                    && put_after.iter().chain([now]).all(|at| at.is_plausible())
            }
        }
    }
}

/// Writes the frame of a message.
///
/// # Errors
/// [`FrameError::Io`], or the message is longer than a frame may be.
pub fn write(to: &mut impl Write, message: &impl Serialize) -> Result<(), FrameError> {
    let mut frame = Vec::from(MAGIC);
    frame.extend([VERSION, 0, 0, 0, 0, 0, 0, 0]);
    let mut frame = postcard::to_extend(message, frame)
        .map_err(|error| FrameError::Body { len: 0, reason: error.to_string() })?;
    let len = frame.len() - HEADER_LEN;
    if len > FRAME_MAX {
        return Err(FrameError::TooLong(u32::try_from(len).unwrap_or(u32::MAX)));
    }
    frame[8..HEADER_LEN].copy_from_slice(&(len as u32).to_le_bytes());
    Ok(to.write_all(&frame)?)
}

/// Reads one frame, and nothing behind it.
///
/// # Errors
/// Any [`FrameError`]; the two sides then no longer agree where a frame starts.
pub fn read<T: DeserializeOwned>(from: &mut impl Read) -> Result<T, FrameError> {
    let mut header = [0; HEADER_LEN];
    from.read_exact(&mut header)?;
    let [a, b, c, d, version, _, _, _, len @ ..] = header;
    if [a, b, c, d] != MAGIC {
        return Err(FrameError::Magic([a, b, c, d]));
    }
    if version != VERSION {
        return Err(FrameError::Version(version));
    }
    let len = u32::from_le_bytes(len);
    if len as usize > FRAME_MAX {
        return Err(FrameError::TooLong(len));
    }
    let mut body = vec![0; len as usize];
    from.read_exact(&mut body)?;
    let wrong = |reason: String| FrameError::Body { len: body.len(), reason };
    match postcard::take_from_bytes(&body) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(wrong(format!("{} B too many", rest.len()))),
        Err(error) => Err(wrong(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::table::{Gone, NodeId};

    fn frame(message: &impl Serialize) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut bytes, message).unwrap();
        bytes
    }

    fn key() -> impl Strategy<Value = BlockKey> {
        any::<u128>().prop_map(BlockKey)
    }

    fn holding() -> impl Strategy<Value = Holding> {
        any::<(u32, u8, u64, u64)>().prop_map(|(size, target, primary, generation)| Holding {
            size,
            target,
            primary: NodeId(primary),
            generation: Generation(generation),
        })
    }

    fn loan() -> impl Strategy<Value = Loan> {
        (key(), prop::option::of(key()), any::<(u32, u16, u16, u32, u32, u64, u64, u64)>()).prop_map(
            |(key, parent, (depth, class, tenant, ttl_ms, size, checksum, offset, lease))| {
                let meta = BlockMeta { key, parent, depth, class, tenant, ttl_ms, size };
                Loan { meta, checksum, offset, lease }
            },
        )
    }

    fn request() -> impl Strategy<Value = Request> {
        let keys = || prop::collection::vec(key(), 0..9);
        let since = prop_oneof![Just(Since::Start), Just(Since::Rest), any::<u64>().prop_map(Since::At)];
        prop_oneof![
            ".{0,20}".prop_map(|cluster| Request::Hello { cluster }),
            since.prop_map(|since| Request::Watch { since }),
            (keys(), prop::collection::vec(any::<u64>(), 0..9))
                .prop_map(|(keys, release)| Request::Lend { keys, release }),
            (prop::collection::vec((loan(), holding()), 0..9), any::<u64>())
                .prop_map(|(items, lease_ms)| Request::Copy { items, lease_ms }),
            keys().prop_map(|keys| Request::Has { keys }),
            (keys(), any::<u64>().prop_map(Generation)).prop_map(|(keys, at)| Request::Remove { keys, at }),
            (
                any::<(u64, Option<u64>, u32)>(),
                prop::collection::vec(loan().prop_map(|loan| loan.meta), 0..9)
            )
                .prop_map(|((id, request, layers), blocks)| {
                    let keep = request.map_or(Keep::Each, |request| Keep::All { request });
                    let put_after = (0..blocks.len() as u64).map(Generation).collect();
                    Request::Open { id, keep, layers, blocks, put_after, now: Generation(id) }
                }),
            (any::<u64>(), prop::collection::vec(any::<u64>(), 0..9))
                .prop_map(|(id, checksums)| Request::Settle { id, checksums }),
            (any::<u64>(), ".{0,20}").prop_map(|(id, reason)| Request::GiveUp { id, reason }),
            Just(Request::Describe),
        ]
    }

    fn reply() -> impl Strategy<Value = Reply> {
        let fact = prop_oneof![
            (key(), holding()).prop_map(|(key, holding)| Fact::Holds(key, holding)),
            key().prop_map(|key| Fact::Gone(key, Gone::LetGo)),
            (key(), any::<u64>()).prop_map(|(key, at)| Fact::Removed(key, Generation(at))),
        ];
        let copied = prop::sample::select(vec![Copied::Done, Copied::Had, Copied::NoRoom, Copied::Failed]);
        prop_oneof![
            ".{0,20}".prop_map(|reason| Reply::Refused { reason }),
            (any::<bool>(), prop::collection::vec(fact, 0..9), any::<u64>()).prop_map(
                |(reset, facts, next)| {
                    let status = Status { free_bytes: next, ..Status::default() };
                    Reply::News { reset, facts, next: Since::At(next), status }
                }
            ),
            (prop::collection::vec(prop::option::of(loan()), 0..9), any::<u64>())
                .prop_map(|(loans, lease_ms)| Reply::Lent { loans, lease_ms }),
            prop::collection::vec(copied, 0..9).prop_map(|outcomes| Reply::Copied { outcomes }),
            (".{0,20}", prop::collection::vec(any::<bool>(), 0..9))
                .prop_map(|(segment, wanted)| Reply::Opened { segment, wanted }),
            prop::collection::vec(any::<bool>(), 0..9).prop_map(|held| Reply::Has { held }),
            (prop::collection::vec(any::<bool>(), 0..9), any::<Option<u64>>())
                .prop_map(|(removed, later)| { Reply::Removed { removed, later: later.map(Generation) } }),
            Just(Reply::GivenUp),
            (prop::collection::vec((".{0,9}", ".{0,9}"), 0..4), ".{0,9}", any::<u32>()).prop_map(
                |(rails, machine, revision)| {
                    let nics = rails.iter().map(|(_, nic)| nic.clone()).collect();
                    Reply::Welcome(Welcome { rails, nics, machine, revision, ..Welcome::default() })
                }
            ),
        ]
    }

    proptest! {
        #[test]
        fn what_is_said_is_heard(request in request(), reply in reply()) {
            prop_assert_eq!(read::<Request>(&mut &frame(&request)[..]).unwrap(), request);
            prop_assert_eq!(read::<Reply>(&mut &frame(&reply)[..]).unwrap(), reply);
        }

        /// Noise never panics, takes no memory that it did not pay for, and a cut frame is refused.
        #[test]
        fn damage_is_refused_or_harmless(
            request in request(), reply in reply(), at: prop::sample::Index, byte: u8,
            noise in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            for mut bytes in [frame(&request), frame(&reply)] {
                let cut = &bytes[..at.index(bytes.len())];
                prop_assert!(read::<Request>(&mut &*cut).is_err());
                prop_assert!(read::<Reply>(&mut &*cut).is_err());
                let at = at.index(bytes.len());
                bytes[at] = byte;
                let _ = read::<Request>(&mut &bytes[..]);
                let _ = read::<Reply>(&mut &bytes[..]);
            }
            let mut framed = frame(&());
            framed[8..12].copy_from_slice(&(noise.len() as u32).to_le_bytes());
            framed.extend(&noise);
            let _ = read::<Request>(&mut &framed[..]);
            let _ = read::<Reply>(&mut &framed[..]);
            let _ = read::<Reply>(&mut &noise[..]);
        }
    }

    #[test]
    fn a_bad_header_says_what_is_wrong() {
        let check = |at: usize, value: u8, expected: &str| {
            let mut bytes = frame(&Request::Watch { since: Since::Start });
            bytes[at] = value;
            let error = read::<Request>(&mut &bytes[..]).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(0, b'X', "does not speak this protocol");
        check(4, 9, "speaks version 9");
        check(11, 1, "above the limit");
        check(8, 1, "no meaning");
    }
}
