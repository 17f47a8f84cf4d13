//! Settings of a host, as a file (`f`) or as `--set` flags (`s`), one a line.

use crate::kind;
use crate::text::told;
use kvasir::config::{Config, Error};
use std::path::Path;

pub(crate) fn run(data: &[u8]) {
    let Some((kind, text)) = kind(data) else { return };
    let Ok(text) = str::from_utf8(text) else { return };
    let read = match kind {
        b'f' => parse(text),
        b's' => Config::load(None, [], &text.lines().map(str::to_owned).collect::<Vec<_>>()),
        _ => return,
    };
    match read {
        Ok(config) => {
            let again = parse(&config.to_toml()).expect("what is printed reads");
            assert_eq!(config, again);
        }
        // Flags are quoted as they are: they are their user's own.
        Err(_) if kind == b's' => {}
        Err(refusal) => drop(told(&refusal)),
    }
}

fn parse(text: &str) -> Result<Config, Error> {
    Config::parse(Path::new("kvasir.toml"), text)
}
