//! `kvasir policy new`: a template under a name of its own, with what it needs of the SDK beside it.

use super::{Dialect, Error, Language, MANIFEST, Project, sdk};
use crate::policy::SlotKind;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// Where a template says that the SDK is.
const SDK_OF_TEMPLATES: &str = "../../../";
/// Where it is in a project.
const SDK: &str = "./sdk/";
/// Folders that tools make.
const IGNORED: &str = "*.wasm\n.zig-cache/\n__pycache__/\nnode_modules/\ntarget/\n/test\n";

/// Writes a project into the folder `dir`, which must be empty or not be there. It appears there whole, or not at all.
///
/// # Errors
/// The name is no policy's name, something is in the folder already, or the disk fails.
pub fn create(
    (language, dialect): (&'static Language, Option<&'static Dialect>),
    slot: SlotKind,
    name: &str,
    dir: &Path,
) -> Result<Project, Error> {
    check_name(name)?;
    // If this binary was built without it, that is no fault of the caller, who is told what there is instead.
    let template = format!("templates/{}/{slot}", language.name);
    let manifest =
        sdk::folder(&template).find(|file| file.path == MANIFEST).and_then(|file| text(file.bytes));
    let old = manifest
        .and_then(name_in)
        .ok_or_else(|| Error::Language { name: language.name.into(), known: known(slot) })?;

    let parent = dir.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    check_free(dir)?;
    fs::create_dir_all(parent).map_err(failed("make", parent))?;
    let beside = tempfile::Builder::new().prefix(".kvasir-policy-").tempdir_in(parent);
    let beside = beside.map_err(failed("make a folder in", parent))?;
    let whole = beside.path().join("project");
    let in_dialect = |text: String| {
        let renames = dialect.map_or(&[][..], |dialect| dialect.renames);
        // Some texts name both, and one begins with the other.
        renames.iter().fold(text, |text, [from, to]| text.replace(to, from).replace(from, to))
    };
    for file in sdk::folder(&template) {
        let own =
            |text: &str| in_dialect(text.replace(SDK_OF_TEMPLATES, SDK)).replace(old, name).into_bytes();
        let bytes = text(file.bytes).map_or_else(|| file.bytes.into(), own);
        write(&whole.join(in_dialect(file.path.into())), &bytes)?;
    }
    for folder in [language.folder, "wit"] {
        for file in sdk::folder(folder).filter(|file| file.path != "build.sh") {
            write(&whole.join("sdk").join(folder).join(file.path), file.bytes)?;
        }
    }
    write(&whole.join(".gitignore"), IGNORED.as_bytes())?;
    fs::rename(&whole, dir).map_err(|source| match source.kind() {
        std::io::ErrorKind::DirectoryNotEmpty => Error::Exists { path: dir.into() },
        _ => Error::File { action: "make", path: dir.into(), source },
    })?;
    Project::open(dir)
}

/// Names of the contract, as crates, files and metrics can have them too.
fn check_name(name: &str) -> Result<(), Error> {
    let bad = |reason| Err(Error::Name { name: crate::text::printable(name, 80), reason });
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    match name {
        _ if name.is_empty() || name.len() > 64 => bad("it must have 1 to 64 characters"),
        _ if !name.chars().all(allowed) => bad("it must consist of a-z 0-9 -"),
        _ if !name.starts_with(|c: char| c.is_ascii_lowercase()) => bad("it must begin with a letter"),
        _ if name.starts_with("kvasir-") => bad("names that begin with kvasir- are the SDK's"),
        _ => Ok(()),
    }
}

fn check_free(dir: &Path) -> Result<(), Error> {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    let there = match fs::read_dir(dir) {
        Ok(entries) => entries.count() > 0,
        Err(error) if error.kind() == NotFound => false,
        Err(error) if error.kind() == NotADirectory => true,
        Err(source) => return Err(failed("look into", dir)(source)),
    };
    if there { Err(Error::Exists { path: dir.into() }) } else { Ok(()) }
}

/// Files that are no text are copied as they are.
fn text(bytes: &'static [u8]) -> Option<&'static str> {
    std::str::from_utf8(bytes).ok()
}

/// The name in the manifest of a template.
fn name_in(manifest: &str) -> Option<&str> {
    manifest.lines().find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'))
}

/// Languages with a template for that slot.
fn known(slot: SlotKind) -> String {
    let has =
        |language: &&Language| sdk::folder(&format!("templates/{}/{slot}", language.name)).next().is_some();
    let names: Vec<_> = super::LANGUAGES.iter().filter(has).map(|language| language.name).collect();
    names.join(", ")
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(failed("make", folder))?;
    }
    fs::write(path, bytes).map_err(failed("write", path))?;
    if path.extension().is_some_and(|end| end == "sh") {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))
            .map_err(failed("make executable", path))?;
    }
    Ok(())
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path: PathBuf = path.into();
    move |source| Error::File { action, path, source }
}
