//! Request traces: reading the formats there are.
//!
//! One JSON object per line, sorted by time, gzip or plain. Of the Mooncake release: `timestamp` (ms since start, whole or
//! with a fraction, kept to the microsecond), `input_length` and `output_length` (tokens), `hash_ids`
//! (the blocks of the input, in order; equal id means equal whole prefix). A line may also name `class`, `tenant` and
//! `turn`, numbers from 0 to 65535, and `session`, a number. Blocks have 512 tokens unless the reader is told otherwise. Origin:
//! kvcache-ai/Mooncake, FAST25-release/traces. [`bailian`] has the other one.

mod bailian;
mod writer;

pub use self::writer::{WriteError, Writer};

use crate::policy::record::Record;
use flate2::read::MultiGzDecoder;
use serde::de::{Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Tokens per block in the traces of the Mooncake release.
pub const BLOCK_SIZE_TOKENS: u32 = 512;
/// Tokens of the largest block: its bytes, as [`super::pool`] counts them, fit into 32 bits.
pub const MAX_BLOCK_SIZE_TOKENS: u32 = 8_192;
/// Latest time accepted: 142 years, until which a double that counts milliseconds tells each microsecond from the next.
const MAX_TIME_MS: u64 = (1 << 52) / 1_000;
/// Longest line accepted, bytes: a million tokens of context need 40 KiB.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// What is told of a file that `explain.file` named.
const RECORDING: &str = "a recorded decision, where a request of a trace is expected; `kvasir policy replay` and `kvasir \
                         policy run` read recordings of decisions (explain.file)";

/// One request of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Microseconds since the start of the trace; milliseconds in the file.
    #[serde(rename = "timestamp", deserialize_with = "us_from_ms", serialize_with = "ms_from_us")]
    pub time_us: u64,
    #[serde(rename = "input_length")]
    pub input_tokens: u32,
    #[serde(rename = "output_length")]
    pub output_tokens: u32,
    /// Ids of the input's blocks, first block first.
    #[serde(rename = "hash_ids")]
    pub blocks: Vec<u64>,
    /// Class, where the trace names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<u16>,
    /// Whose request it is: tenants share no blocks. 0 where the trace names none.
    #[serde(default, skip_serializing_if = "is_default")]
    pub tenant: u16,
    /// Turn of its conversation, from 1, where the trace names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<u16>,
    /// Equal for requests of one conversation, where the trace names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<u64>,
}

/// Formats of traces.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// JSON lines of the Mooncake release; blocks of 512 tokens unless --block-size-tokens says otherwise.
    #[default]
    Mooncake,
    /// JSON lines of the Qwen-Bailian release; blocks of 16 tokens unless --block-size-tokens says otherwise.
    Bailian,
}

impl Format {
    /// Tokens of a block, where nobody says otherwise.
    pub fn block_size_tokens(self) -> u32 {
        match self {
            Self::Mooncake => BLOCK_SIZE_TOKENS,
            Self::Bailian => bailian::BLOCK_SIZE_TOKENS,
        }
    }
}

fn is_default(tenant: &u16) -> bool {
    *tenant == 0
}

impl Request {
    /// Whole milliseconds since the start of the trace, which is what policies are told.
    pub fn time_ms(&self) -> u64 {
        self.time_us / 1_000
    }
}

fn us_from_ms<'de, D: Deserializer<'de>>(input: D) -> Result<u64, D::Error> {
    struct Milliseconds;

    impl Visitor<'_> for Milliseconds {
        type Value = u64;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "milliseconds from 0 to {MAX_TIME_MS}")
        }

        fn visit_u64<E: serde::de::Error>(self, ms: u64) -> Result<u64, E> {
            if ms > MAX_TIME_MS {
                return Err(E::invalid_value(Unexpected::Unsigned(ms), &self));
            }
            Ok(ms * 1_000)
        }

        fn visit_i64<E: serde::de::Error>(self, ms: i64) -> Result<u64, E> {
            u64::try_from(ms)
                .map_err(|_| E::invalid_value(Unexpected::Signed(ms), &self))
                .and_then(|ms| self.visit_u64(ms))
        }

        fn visit_f64<E: serde::de::Error>(self, ms: f64) -> Result<u64, E> {
            if !(0.0..=MAX_TIME_MS as f64).contains(&ms) {
                return Err(E::invalid_value(Unexpected::Float(ms), &self));
            }
            // The product of the whole would be rounded to what a double can hold.
            Ok(ms.trunc() as u64 * 1_000 + (ms.fract() * 1e3).round() as u64)
        }
    }

    input.deserialize_any(Milliseconds)
}

fn ms_from_us<S: Serializer>(us: &u64, output: S) -> Result<S::Ok, S::Error> {
    if us.is_multiple_of(1_000) {
        output.serialize_u64(us / 1_000)
    } else {
        output.serialize_f64(*us as f64 / 1e3)
    }
}

/// Why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot open trace {path}: {source}")]
    Open { path: PathBuf, source: std::io::Error },
    #[error("cannot read trace {path} after line {lines}: {source}; is the file cut short?")]
    Read { path: PathBuf, lines: u64, source: std::io::Error },
    #[error("{path}:{line}: {reason}")]
    Line { path: PathBuf, line: u64, reason: String },
}

/// Iterator over the requests of a trace; ends after the first error.
pub struct Reader {
    path: PathBuf,
    input: Box<dyn BufRead>,
    line: u64,
    last_us: u64,
    block_size_tokens: u32,
    /// The conversations of a trace in the Bailian format.
    chats: Option<bailian::Chats>,
    buffer: Vec<u8>,
    done: bool,
}

impl Reader {
    /// # Errors
    /// The file cannot be opened.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = File::open(path).map_err(|source| Error::Open { path: path.into(), source })?;
        Self::new(path, file)
    }

    /// Reads from `input`; `path` is for messages. Gzip is recognised by its first bytes.
    ///
    /// # Errors
    /// The first bytes cannot be read.
    pub fn new(path: &Path, input: impl Read + 'static) -> Result<Self, Error> {
        let mut input = BufReader::with_capacity(1 << 16, input);
        let start = input.fill_buf().map_err(|source| Error::Open { path: path.into(), source })?;
        let input: Box<dyn BufRead> = if start.starts_with(&[0x1f, 0x8b]) {
            Box::new(BufReader::new(MultiGzDecoder::new(input)))
        } else {
            Box::new(input)
        };
        Ok(Self {
            path: path.into(),
            input,
            line: 0,
            last_us: 0,
            block_size_tokens: BLOCK_SIZE_TOKENS,
            chats: None,
            buffer: Vec::new(),
            done: false,
        })
    }

    /// The same, of a trace in that format, with its size of blocks.
    #[must_use]
    pub fn of_format(self, format: Format) -> Self {
        let chats = (format == Format::Bailian).then(bailian::Chats::default);
        Self { chats, block_size_tokens: format.block_size_tokens(), ..self }
    }

    /// The same, for a trace with blocks of `block_size_tokens`: 1 to [`MAX_BLOCK_SIZE_TOKENS`].
    #[must_use]
    pub fn of_blocks(self, block_size_tokens: u32) -> Self {
        let block_size_tokens = block_size_tokens.clamp(1, MAX_BLOCK_SIZE_TOKENS);
        Self { block_size_tokens, ..self }
    }

    /// Fills the buffer with the next line that is not blank. Returns false at the end.
    fn read_line(&mut self) -> Result<bool, Error> {
        loop {
            self.buffer.clear();
            let mut limited = (&mut self.input).take(MAX_LINE_BYTES + 1);
            let read = limited.read_until(b'\n', &mut self.buffer).map_err(|source| Error::Read {
                path: self.path.clone(),
                lines: self.line,
                source,
            })?;
            if read == 0 {
                return Ok(false);
            }
            self.line += 1;
            if read as u64 > MAX_LINE_BYTES {
                return Err(self.bad_line(format!("longer than {MAX_LINE_BYTES} bytes")));
            }
            if !self.buffer.trim_ascii().is_empty() {
                return Ok(true);
            }
        }
    }

    fn parse(&mut self) -> Result<Request, Error> {
        let line = self.buffer.trim_ascii();
        let request = match &mut self.chats {
            Some(chats) => chats.parse(line),
            None => mooncake(line),
        };
        let request = request.map_err(|reason| match Record::is_line(line) {
            true => self.bad_line(RECORDING.into()),
            false => self.bad_line(reason),
        })?;
        let size = self.block_size_tokens;
        let expected = request.input_tokens.div_ceil(size) as usize;
        let found = request.blocks.len();
        if found == 0 {
            return Err(self.bad_line("hash_ids is empty; a request has at least one block".into()));
        }
        if found != expected {
            return Err(self.bad_line(format!(
                "{found} hash_ids for {} input tokens; expected {expected} blocks of {size} tokens{}",
                request.input_tokens,
                other_size(request.input_tokens, found)
            )));
        }
        if request.time_us < self.last_us {
            let [now_ms, last_ms] = [request.time_us, self.last_us].map(|us| us as f64 / 1e3);
            return Err(
                self.bad_line(format!("timestamp {now_ms} follows {last_ms}; sort the trace by time"))
            );
        }
        self.last_us = request.time_us;
        Ok(request)
    }

    fn bad_line(&self, reason: String) -> Error {
        Error::Line { path: self.path.clone(), line: self.line, reason }
    }
}

fn mooncake(line: &[u8]) -> Result<Request, String> {
    serde_json::from_slice(line).map_err(|error| {
        format!(
            "{}; expected an object with timestamp (ms), input_length, output_length (whole numbers, \
             not negative) and hash_ids (a list of them); class, tenant and turn, if there, are below 65536",
            without_line(&error)
        )
    })
}

/// What to pass for a request of `input_tokens` tokens in `blocks` blocks, if a size fits.
fn other_size(input_tokens: u32, blocks: usize) -> String {
    let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
    // The sizes with ceil(tokens / size) = blocks.
    let smallest = input_tokens.div_ceil(blocks);
    let largest = input_tokens.checked_sub(1).map_or(0, |rest| match blocks {
        1 => MAX_BLOCK_SIZE_TOKENS,
        several => rest / (several - 1),
    });
    let fits = (smallest.max(1), largest.min(MAX_BLOCK_SIZE_TOKENS));
    match fits {
        (low, high) if low > high => "; no size of blocks fits".into(),
        (low, high) if low == high => format!("; if blocks have {low}, pass --block-size-tokens {low}"),
        (low, high) => {
            format!("; if blocks have another size, {low} to {high} would fit, pass --block-size-tokens N")
        }
    }
}

/// The parser sees one line of the trace and calls it line 1, so only the column is of use to a reader.
fn without_line(error: &serde_json::Error) -> String {
    let (text, column) = (error.to_string(), error.column());
    match text.strip_suffix(&format!(" at line {} column {column}", error.line())) {
        Some(text) => format!("{text} at column {column}"),
        None => text,
    }
}

impl Iterator for Reader {
    type Item = Result<Request, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let item = match self.read_line() {
            Ok(true) => self.parse(),
            Ok(false) => {
                self.done = true;
                return None;
            }
            Err(error) => Err(error),
        };
        self.done = item.is_err();
        Some(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const GOOD: &str = r#"{"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}"#;

    fn read(bytes: Vec<u8>) -> Result<Vec<Request>, Error> {
        Reader::new(Path::new("t.jsonl"), std::io::Cursor::new(bytes))?.collect()
    }

    #[test]
    fn plain_and_gzip_read_alike() {
        let text = format!("{GOOD}\n\n{GOOD}");
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(text.as_bytes()).unwrap();
        let gzip = gzip.finish().unwrap();
        let request = Request {
            time_us: 5_000,
            input_tokens: 600,
            output_tokens: 7,
            blocks: vec![0, 1],
            ..Request::default()
        };
        assert_eq!(read(text.into()).unwrap(), vec![request.clone(), request.clone()]);
        assert_eq!(read(gzip.clone()).unwrap(), vec![request.clone(), request]);
        let cut = read(gzip[..gzip.len() / 2].to_vec()).unwrap_err();
        assert!(cut.to_string().starts_with("cannot read trace t.jsonl after line"), "{cut}");
    }

    #[test]
    fn a_recording_is_no_trace() {
        let error = read(br#"{"record": 1, "slot": "scheduler"}"#.to_vec()).unwrap_err().to_string();
        assert!(
            error.starts_with("t.jsonl:1: a recorded decision") && error.contains("policy replay"),
            "{error}"
        );
    }

    #[test]
    fn times_may_have_fractions_and_keep_microseconds() {
        let at = |ms: &str| {
            let line = GOOD.replace("\"timestamp\": 5,", &format!("\"timestamp\": {ms},"));
            read(line.into()).map(|requests| requests[0].time_us)
        };
        for (ms, us) in [("0", 0), ("27482.125", 27_482_125), ("0.0004", 0), ("3.5e3", 3_500_000)] {
            assert_eq!(at(ms).unwrap(), us, "{ms}");
        }
        for ms in ["-0.5", "1e300", "4503599627371", "\"5\"", "null"] {
            let error = at(ms).unwrap_err().to_string();
            assert!(error.contains("milliseconds from 0 to 4503599627370"), "{error}");
        }
        let unsorted = [5.25, 5.125].map(|ms| GOOD.replace('5', &ms.to_string())).join("\n");
        let error = read(unsorted.into()).unwrap_err().to_string();
        assert!(error.contains("timestamp 5.125 follows 5.25"), "{error}");
        for latest in [4_503_599_627_369_999_u64, 4_503_599_627_369_998, 4_503_599_627_369_001] {
            let request = Request { time_us: latest, input_tokens: 1, blocks: vec![0], ..Request::default() };
            assert_eq!(read(serde_json::to_vec(&request).unwrap()).unwrap(), [request]);
        }
        for (time_us, text) in [(7_000, "7"), (7_250, "7.25")] {
            let request = Request { time_us, ..Request::default() };
            let json = serde_json::to_string(&request).unwrap();
            assert!(json.starts_with(&format!("{{\"timestamp\":{text},")), "{json}");
        }
    }

    #[test]
    fn blocks_may_have_any_size() {
        let line = |tokens: u32, blocks: u32| {
            let ids: Vec<_> = (0..blocks).collect();
            format!("{{\"timestamp\":0,\"input_length\":{tokens},\"output_length\":1,\"hash_ids\":{ids:?}}}")
        };
        let read = |text: String, size| {
            let input = std::io::Cursor::new(text.into_bytes());
            Reader::new(Path::new("t"), input).unwrap().of_blocks(size).collect::<Result<Vec<_>, _>>()
        };
        for (tokens, blocks, size) in [(600, 38, 16), (600, 10, 64), (600, 1, 8_192), (3, 3, 1)] {
            assert_eq!(read(line(tokens, blocks), size).unwrap().len(), 1, "{size}");
        }
        for (tokens, blocks, hint) in [
            (6_758, 106, "expected 14 blocks of 512 tokens; if blocks have 64, pass --block-size-tokens 64"),
            (600, 38, "if blocks have 16, pass --block-size-tokens 16"),
            (600, 3, "another size, 200 to 299 would fit, pass --block-size-tokens N"),
            (600, 1, "another size, 600 to 8192 would fit"),
            (1_000_000, 2, "no size of blocks fits"),
            (0, 2, "no size of blocks fits"),
        ] {
            let error = read(line(tokens, blocks), 512).unwrap_err().to_string();
            assert!(error.contains(hint), "{error}");
        }
    }

    #[test]
    fn bad_lines_are_named_with_what_was_expected() {
        let rows = [
            ("nonsense", "expected an object with timestamp"),
            (r#"{"timestamp": -1, "input_length": 1, "output_length": 0, "hash_ids": [0]}"#, "`-1`"),
            (r#"{"timestamp": 9, "input_length": 1, "output_length": 0, "hash_ids": [-3]}"#, "`-3`"),
            (r#"{"timestamp": 9, "input_length": 1, "output_length": 0}"#, "missing field `hash_ids`"),
            (
                r#"{"timestamp": 9, "input_length": 0, "output_length": 0, "hash_ids": []}"#,
                "hash_ids is empty",
            ),
            (
                r#"{"timestamp": 9, "input_length": 513, "output_length": 0, "hash_ids": [1]}"#,
                "expected 2 blocks",
            ),
            (r#"{"timestamp": 4, "input_length": 1, "output_length": 0, "hash_ids": [1]}"#, "4 follows 5"),
            (
                r#"{"timestamp": 9, "input_length": 1, "output_length": 0, "hash_ids": [1], "tenant": 65536}"#,
                "invalid value: integer `65536`, expected u16",
            ),
            (
                r#"{"timestamp": 9, "input_length": 1, "output_length": 0, "hash_ids": [1], "class": "chat"}"#,
                "invalid type: string \"chat\", expected u16",
            ),
            ("{\"timestamp\": \u{fffd}}", "expected value at column 15;"),
        ];
        for (line, expected) in rows {
            let error = read(format!("{GOOD}\n{line}\n{GOOD}").into()).unwrap_err().to_string();
            assert!(error.starts_with("t.jsonl:2: ") && error.contains(expected), "{line}: {error}");
            assert!(!error.contains("line 1"), "{error}");
        }
        assert!(Reader::open(Path::new("/none.jsonl")).is_err_and(|e| e.to_string().contains("/none.jsonl")));
    }
}
