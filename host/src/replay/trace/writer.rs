//! A trace that is written: whole, or not at all.

use super::Request;
use flate2::write::GzEncoder;
use flate2::{Compression, GzBuilder};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Why a trace is not written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {path} after {written} requests: {source}")]
pub struct WriteError {
    path: PathBuf,
    written: u64,
    source: io::Error,
}

type File = BufWriter<NamedTempFile>;

enum Out {
    Plain(File),
    Gzip(GzEncoder<File>),
}

/// Lines in the Mooncake format, compressed if the name of the file ends in `.gz`. Nothing is there before [`Writer::finish`].
pub struct Writer {
    path: PathBuf,
    written: u64,
    out: Out,
}

impl Writer {
    /// # Errors
    /// The folder of `path` is not there or cannot be written to.
    pub fn create(path: &Path) -> Result<Self, WriteError> {
        let failed = |source| WriteError { path: path.into(), written: 0, source };
        let file = BufWriter::new(crate::replay::partial_file(path).map_err(failed)?);
        let out = if path.extension().is_some_and(|extension| extension == "gz") {
            // The header carries no time of writing: same requests, same bytes.
            Out::Gzip(GzBuilder::new().mtime(0).write(file, Compression::default()))
        } else {
            Out::Plain(file)
        };
        Ok(Self { path: path.into(), written: 0, out })
    }

    /// # Errors
    /// The disk is full or fails.
    pub fn write(&mut self, request: &Request) -> Result<(), WriteError> {
        let out: &mut dyn Write = match &mut self.out {
            Out::Plain(file) => file,
            Out::Gzip(file) => file,
        };
        let written = serde_json::to_writer(&mut *out, request).map_err(io::Error::from);
        let source = written.and_then(|()| out.write_all(b"\n"));
        source.map_err(|source| WriteError { path: self.path.clone(), written: self.written, source })?;
        self.written += 1;
        Ok(())
    }

    /// Returns how many were written.
    ///
    /// # Errors
    /// The disk is full or fails.
    pub fn finish(self) -> Result<u64, WriteError> {
        let Self { path, written, out } = self;
        let file = match out {
            Out::Plain(file) => Ok(file),
            Out::Gzip(file) => file.finish(),
        };
        let file = file.and_then(|file| file.into_inner().map_err(io::IntoInnerError::into_error));
        let kept = file.and_then(|file| file.persist(&path).map_err(|error| error.error));
        kept.map(|_| written).map_err(|source| WriteError { path, written, source })
    }
}
