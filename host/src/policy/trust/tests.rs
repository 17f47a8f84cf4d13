use super::*;
use std::fs;

fn key() -> SecretKey {
    SecretKey::generate().unwrap()
}

fn entry(name: &str, slots: Option<&str>, key: &SecretKey) -> String {
    let slots = slots.map_or(String::new(), |slots| format!("slots = [{slots}]\n"));
    format!("[[keys]]\nname = \"{name}\"\n{slots}public_key = \"\"\"\n{}\"\"\"\n", key.public().to_pem())
}

fn signed(key: &SecretKey, component: &[u8], slot: SlotKind) -> Signature {
    let manifest = Digest::of(b"manifest");
    Claim { component: Digest::of(component), slot, manifest, reference: String::new() }.sign(key)
}

#[test]
fn a_component_needs_a_trusted_key_for_its_slot_and_bytes() {
    let (all, evictors, stranger) = (key(), key(), key());
    let text = entry("all", None, &all) + &entry("evictors", Some("\"evictor\""), &evictors);
    let keys = TrustedKeys::parse(&text).unwrap();
    let check = |slot, signatures: &[Signature]| {
        keys.check(slot, Digest::of(b"it"), signatures).map(str::to_owned).map_err(|e| e.to_string())
    };
    use SlotKind::{Evictor, Scheduler};
    assert_eq!(check(Evictor, &[signed(&evictors, b"it", Evictor)]).unwrap(), "evictors");
    // Any one of several is enough, whatever stands before it.
    let many = [signed(&stranger, b"it", Scheduler), signed(&all, b"it", Scheduler)];
    assert_eq!(check(Scheduler, &many).unwrap(), "all");
    let refused = |slot, signatures: &[Signature], part: &str| {
        let reason = check(slot, signatures).unwrap_err();
        assert!(reason.contains(part), "{reason}");
    };
    refused(Evictor, &[], "not signed");
    refused(Evictor, &[signed(&stranger, b"it", Evictor)], "none of its signatures");
    refused(Scheduler, &[signed(&evictors, b"it", Scheduler)], "none of its signatures");
    refused(Scheduler, &[signed(&all, b"it", Evictor)], "`all` signed it as evictor");
    refused(Evictor, &[signed(&evictors, b"other", Evictor)], "another component");
    refused(Evictor, &vec![signed(&all, b"it", Evictor); 17], "17 signatures");
    let keyless = TrustedKeys::parse("").unwrap();
    assert!(keyless.check(Evictor, Digest::of(b"it"), &[signed(&all, b"it", Evictor)]).is_err());
}

#[test]
fn a_wrong_trust_file_trusts_nobody() {
    let (dir, owner) = (tempfile::tempdir().unwrap(), key());
    let path = dir.path().join("trust.toml");
    let gate = Gate::new(Some(&path));
    let origin = Origin::Module {
        name: "it".into(),
        digest: Digest::of(b"it").to_string(),
        signatures: vec![signed(&owner, b"it", SlotKind::Evictor)],
    };
    let check = || gate.check(SlotKind::Evictor, &origin).map_err(|e| e.to_string());
    assert!(check().unwrap_err().contains("cannot be used"));
    let good = entry("owner", None, &owner);
    fs::write(&path, &good).unwrap();
    check().unwrap();
    let many: String = (0..300).map(|i| entry(&format!("k{i}"), None, &owner)).collect();
    let wrong = [
        (good[..good.len() / 2].to_owned(), "does not read"),
        (good.replace("MCow", "!!!!"), "`owner`: it is no Ed25519 public key"),
        (good.replace("BEGIN PUBLIC", "BEGIN PRIVATE"), "`owner`: it is a private key"),
        (good.replace("keys", "kees"), "does not read"),
        (entry("owner", Some("\"bouncer\""), &owner), "unknown slot `bouncer`"),
        (entry("o w", None, &owner), "names no key"),
        (good.clone() + &good, "two keys are called `owner`"),
        (many, "300 keys"),
        (" ".repeat(2 << 20), "2097152 bytes"),
    ];
    for (text, part) in wrong {
        fs::write(&path, text).unwrap();
        let reason = check().unwrap_err();
        assert!(reason.contains(part) && reason.contains("only built-in policies"), "{reason}");
    }
    fs::write(&path, &good).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    assert!(check().unwrap_err().contains("chmod go-w"));
    // Built-in policies pass, and so does all where nothing is configured.
    gate.check(SlotKind::Evictor, &Origin::Builtin { name: "lru".into() }).unwrap();
    Gate::default().check(SlotKind::Evictor, &origin).unwrap();
}
