//! The folder `sdk` as it was when this binary was built: templates, helpers and the contract.

/// Files by their path in `sdk`, sorted; `build.rs` says which.
static FILES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/sdk.rs"));

/// A file, and its path below the folder that was asked for.
pub(super) struct File {
    pub(super) path: &'static str,
    pub(super) bytes: &'static [u8],
}

/// All files below a folder of `sdk`, such as `templates/c/evictor`.
pub(super) fn folder(name: &str) -> impl Iterator<Item = File> {
    FILES.iter().filter_map(move |&(path, bytes)| {
        let path = path.strip_prefix(name)?.strip_prefix('/')?;
        Some(File { path, bytes })
    })
}

/// The text of the contract, by file name.
pub(super) fn contract() -> impl Iterator<Item = (&'static str, &'static str)> {
    folder("wit").filter_map(|file| Some((file.path, std::str::from_utf8(file.bytes).ok()?)))
}
