use super::super::tests::{key, package};
use super::*;
use crate::policy::SlotKind;

fn saved(names: &[&str]) -> Vec<Saved> {
    let key = key();
    names.iter().map(|name| Saved { name: (*name).to_owned(), package: package(name, &[&key]) }).collect()
}

fn refused(path: &Path, bytes: &[u8], part: &str) {
    std::fs::write(path, bytes).unwrap();
    let reason = read(path).unwrap_err().to_string();
    assert!(reason.contains(part), "{reason}");
}

/// A tar of these entries.
fn tar_of(entries: &[(&str, EntryType, &[u8])]) -> Vec<u8> {
    let mut tar = Builder::new(Vec::new());
    for (name, kind, bytes) in entries {
        let mut header = Header::new_gnu();
        // As a hostile writer has it: the library refuses such names.
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.set_entry_type(*kind);
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        tar.append(&header, *bytes).unwrap();
    }
    tar.into_inner().unwrap()
}

#[test]
fn a_bundle_keeps_policies_and_their_signatures() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("all.tar");
    let policies = saved(&["lru", "fifo", "sieve"]);
    write(&path, &policies).unwrap();
    assert_eq!(read(&path).unwrap(), policies);
    let bytes = std::fs::read(&path).unwrap();
    write(&path, &policies).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), bytes, "the same policies make the same bytes");
    let one = [Saved { name: "lru:1".into(), package: package("lru", &[]) }];
    write(&path, &one).unwrap();
    assert_eq!(read(&path).unwrap(), one);
    assert_eq!(one[0].package.about.slot, SlotKind::Evictor);
}

#[test]
fn a_cut_or_bent_bundle_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("all.tar");
    write(&path, &saved(&["lru"])).unwrap();
    let good = std::fs::read(&path).unwrap();
    // Tars end with two empty blocks, without which the content is whole.
    for cut in (0..good.len() - 1024).step_by(512).chain([1, 700, good.len() / 2 + 7]) {
        std::fs::write(&path, &good[..cut]).unwrap();
        assert!(read(&path).is_err(), "cut at {cut} of {}", good.len());
    }
    // One bit anywhere in a blob.
    let blob = good.windows(4).position(|bytes| bytes == b"\0asm").unwrap();
    let mut bent = good.clone();
    bent[blob + 1000] ^= 1;
    refused(&path, &bent, "was changed");
    refused(&path, b"", "is it cut off?");
    refused(&path, &[7; 4096], "damaged or cut off");
}

#[test]
fn a_hostile_bundle_reaches_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.tar");
    let file = EntryType::Regular;
    let digest = Digest::of(b"x");
    let blob = format!("{BLOBS}{digest}");
    for name in ["../../escape", "/etc/passwd", "blobs/sha256/../../x", "blobs/sha256/0", "other"] {
        refused(&path, &tar_of(&[(name, file, b"x")]), "does not belong");
    }
    for kind in
        [EntryType::Symlink, EntryType::Link, EntryType::Fifo, EntryType::GNULongName, EntryType::XHeader]
    {
        refused(&path, &tar_of(&[("index.json", kind, b"x")]), "no plain file");
    }
    refused(&path, &tar_of(&[(&blob, file, b"y")]), "was changed");
    refused(&path, &tar_of(&[(&blob, file, b"x"), (&blob, file, b"x")]), "twice");
    refused(&path, &tar_of(&[(INDEX, file, b"x"), (INDEX, file, b"x")]), "twice");
    refused(&path, &tar_of(&[(LAYOUT, file, b"{}"), (INDEX, file, b"x")]), "does not read");
    refused(&path, &tar_of(&[(LAYOUT, file, b"{}"), (INDEX, file, &vec![b' '; 300 << 10])]), "index has");
    let empty = br#"{"schemaVersion":2,"manifests":[]}"#;
    refused(&path, &tar_of(&[(LAYOUT, file, b"{}"), (INDEX, file, empty)]), "no policies");
    let entry = format!(r#"{{"mediaType":"x","digest":"sha256:{digest}","size":1}}"#);
    let index = |entries: &[String]| format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, entries.join(","));
    let one = index(std::slice::from_ref(&entry));
    refused(&path, &tar_of(&[(LAYOUT, file, b"{}"), (INDEX, file, one.as_bytes())]), "is not in it");
    let with = [(LAYOUT, file, &b"{}"[..]), (INDEX, file, one.as_bytes()), (&blob, file, b"x")];
    refused(&path, &tar_of(&with), "the manifest");
    let many = index(&vec![entry; POLICIES_MAX + 1]);
    refused(&path, &tar_of(&[(LAYOUT, file, b"{}"), (INDEX, file, many.as_bytes())]), "at most 64");
    let dirs = vec![("blobs/", EntryType::Directory, &b""[..]); ENTRIES_MAX + 1];
    refused(&path, &tar_of(&dirs), "more than 1024 entries");
    // An entry that says it is larger than it can be.
    let mut huge = tar_of(&[(&blob, file, b"x")]);
    let mut header = Header::new_gnu();
    header.set_path(&blob).unwrap();
    header.set_entry_type(file);
    header.set_size(1 << 40);
    header.set_cksum();
    huge[..512].copy_from_slice(header.as_bytes());
    refused(&path, &huge, "at most");
    let file = File::create(&path).unwrap();
    file.set_len(BUNDLE_BYTES_MAX + 1).unwrap();
    assert!(matches!(read(&path), Err(Error::TooLarge { .. })));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing was unpacked");
}
