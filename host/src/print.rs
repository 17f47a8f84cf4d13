//! What commands print, to a reader who may leave before the end: `kvasir policy list | head -1`.
//!
//! `println!` and its kin of the standard library panic then. The macros here take their names in this crate, so that no
//! command has to think of it: one whose output nobody reads any more ends quietly, with the code that a shell shows for
//! programs that `SIGPIPE` ended. That signal itself stays ignored, as Rust has it: it would also end a command, or a host,
//! whose peer closed a socket.

use std::fmt;
use std::io::{self, ErrorKind, Write};

/// 128 and the number of `SIGPIPE`.
const NOBODY_READS: i32 = 141;
const FAILED: i32 = 2;

macro_rules! print {
    ($($text:tt)*) => { $crate::print::text(format_args!($($text)*)) };
}

macro_rules! println {
    () => { $crate::print::text(format_args!("\n")) };
    ($($text:tt)*) => { $crate::print::text(format_args!("{}\n", format_args!($($text)*))) };
}

macro_rules! eprintln {
    ($($text:tt)*) => { $crate::print::remark(format_args!($($text)*)) };
}

/// Writes text to standard output; see [`bytes`].
pub(crate) fn text(text: fmt::Arguments<'_>) {
    written(io::stdout().lock().write_fmt(text));
}

/// Writes to standard output, at once. Ends the process if nobody reads it any more, or if it cannot be written.
pub(crate) fn bytes(bytes: &[u8]) {
    let mut out = io::stdout().lock();
    written(out.write_all(bytes).and_then(|()| out.flush()));
}

/// A line to standard error, where there is one.
pub(crate) fn remark(line: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

fn written(result: io::Result<()>) {
    match result {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(NOBODY_READS),
        Err(error) => {
            eprintln!("kvasir: cannot write to standard output: {error}");
            std::process::exit(FAILED);
        }
    }
}
