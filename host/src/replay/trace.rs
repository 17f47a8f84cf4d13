//! Request traces: reading the Mooncake format, and what a trace contains.
//!
//! One JSON object per line, sorted by time, gzip or plain: `timestamp` (ms since start),
//! `input_length` and `output_length` (tokens), `hash_ids` (the 512-token blocks of the input, in
//! order; equal id means equal whole prefix). Origin: kvcache-ai/Mooncake, FAST25-release/traces.

use flate2::read::MultiGzDecoder;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Tokens per block in the Mooncake format.
pub const BLOCK_SIZE_TOKENS: u32 = 512;
/// Longest line accepted, bytes: a million tokens of context need 40 KiB.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// One request of a trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Milliseconds since the start of the trace.
    #[serde(rename = "timestamp")]
    pub time_ms: u64,
    #[serde(rename = "input_length")]
    pub input_tokens: u32,
    #[serde(rename = "output_length")]
    pub output_tokens: u32,
    /// Ids of the input's blocks, first block first.
    #[serde(rename = "hash_ids")]
    pub blocks: Vec<u64>,
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
    last_ms: u64,
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
        Ok(Self { path: path.into(), input, line: 0, last_ms: 0, buffer: Vec::new(), done: false })
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
        let request: Request = serde_json::from_slice(self.buffer.trim_ascii()).map_err(|e| {
            self.bad_line(format!(
                "{}; expected an object with timestamp, input_length, output_length (whole numbers, \
                 not negative) and hash_ids (a list of them)",
                without_line(&e)
            ))
        })?;
        let expected = request.input_tokens.div_ceil(BLOCK_SIZE_TOKENS) as usize;
        let found = request.blocks.len();
        if found == 0 {
            return Err(self.bad_line("hash_ids is empty; a request has at least one block".into()));
        }
        if found != expected {
            return Err(self.bad_line(format!(
                "{found} hash_ids for {} input tokens; expected {expected} blocks of {BLOCK_SIZE_TOKENS} tokens",
                request.input_tokens
            )));
        }
        if request.time_ms < self.last_ms {
            return Err(self.bad_line(format!(
                "timestamp {} follows {}; sort the trace by time",
                request.time_ms, self.last_ms
            )));
        }
        self.last_ms = request.time_ms;
        Ok(request)
    }

    fn bad_line(&self, reason: String) -> Error {
        Error::Line { path: self.path.clone(), line: self.line, reason }
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
        let request = Request { time_ms: 5, input_tokens: 600, output_tokens: 7, blocks: vec![0, 1] };
        assert_eq!(read(text.into()).unwrap(), vec![request.clone(), request.clone()]);
        assert_eq!(read(gzip.clone()).unwrap(), vec![request.clone(), request]);
        let cut = read(gzip[..gzip.len() / 2].to_vec()).unwrap_err();
        assert!(cut.to_string().starts_with("cannot read trace t.jsonl after line"), "{cut}");
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
