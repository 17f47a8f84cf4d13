//! A file that is put aside when it is full, so that there are never more than two.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Lines in `FILE`, and those before them in `FILE.1`.
pub(crate) struct Rotated {
    path: PathBuf,
    file: BufWriter<File>,
    bytes: u64,
    bytes_max: u64,
}

impl Rotated {
    /// Goes on with the file that is there.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub(crate) fn open(path: &Path, bytes_max: u64) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let bytes = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), file: BufWriter::new(file), bytes, bytes_max })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// # Errors
    /// The disk is full or fails.
    pub(crate) fn write(&mut self, line: &[u8]) -> io::Result<()> {
        let bytes = line.len() as u64;
        if self.bytes > 0 && self.bytes + bytes > self.bytes_max {
            self.rotate()?;
        }
        self.bytes += bytes;
        self.file.write_all(line)
    }

    /// # Errors
    /// The disk is full or fails.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }

    /// Begins an empty file; the one that was there becomes `FILE.1`.
    ///
    /// # Errors
    /// The disk is full or fails.
    pub(crate) fn rotate(&mut self) -> io::Result<()> {
        if self.bytes == 0 {
            return Ok(());
        }
        self.file.flush()?;
        let mut aside = self.path.clone().into_os_string();
        aside.push(".1");
        std::fs::rename(&self.path, aside)?;
        self.file = BufWriter::new(OpenOptions::new().create(true).append(true).open(&self.path)?);
        self.bytes = 0;
        Ok(())
    }
}
