use super::*;
use crate::policy::trust::KeyError;

/// A component of this binary.
pub(super) fn component(name: &str) -> &'static [u8] {
    let found = kvasir_default_policies::EVICTORS.iter().find(|policy| policy.name == name);
    found.expect("an evictor of that name is built in").component
}

/// As it would be read from a file, and signed by so many.
pub(super) fn package(name: &str, keys: &[&SecretKey]) -> Package {
    let Artifact { about, config, manifest } = Artifact::of(name, component(name)).unwrap();
    let component = component(name).to_vec();
    let mut package = Package { about, component, config, manifest, signatures: Vec::new() };
    keys.iter().for_each(|key| package.sign(key, name.to_owned()));
    package
}

pub(super) fn key() -> SecretKey {
    SecretKey::generate().expect("the system has randomness")
}

#[test]
fn a_package_survives_its_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lru.wasm");
    std::fs::write(&path, component("lru")).unwrap();
    let mut read = Package::read(&path).unwrap();
    assert_eq!(read, package("lru", &[]), "what goes into a registry follows from the component");
    assert_eq!((read.about.slot, read.about.name.as_str()), (SlotKind::Evictor, "lru"));
    assert_eq!(read.file_name(), "lru.wasm");
    let key = key();
    read.sign(&key, "here".into());
    read.write(&path).unwrap();
    let signed = Package::read(&path).unwrap();
    assert_eq!(signed, read);
    assert!(signed.is_signed_by(&key.public(), SlotKind::Evictor));
    assert!(!signed.is_signed_by(&key.public(), SlotKind::Scheduler));
    // Signatures of a component that was there before go with it.
    package("fifo", &[]).write(&path).unwrap();
    assert!(Package::read(&path).unwrap().signatures.is_empty());
    // Those that stayed are good for nothing.
    trust::write_beside(&path, &signed.signatures).unwrap();
    assert!(!Package::read(&path).unwrap().is_signed_by(&key.public(), SlotKind::Evictor));
}

#[test]
fn what_is_no_policy_is_no_package() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("it.wasm");
    let refused = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        Package::read(&path).unwrap_err().to_string()
    };
    assert!(refused(b"").contains("empty"));
    assert!(refused(&component("lru")[..100]).contains("it"));
    assert!(Package::read(&dir.path().join("none")).unwrap_err().to_string().contains("cannot be read"));
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(COMPONENT_BYTES_MAX + 1).unwrap();
    assert!(matches!(Package::read(&path), Err(Error::TooLarge { .. })));
    assert!(matches!(SecretKey::read(&path), Err(KeyError::Mode { .. })));
}

/// Every way in which the parts can belong together less than they say.
#[test]
fn parts_that_do_not_fit_are_refused() {
    let Package { component, config, manifest, .. } = package("lru", &[]);
    let text = String::from_utf8(manifest.clone()).unwrap();
    let check = |manifest: &str, config: &[u8], component: &[u8]| {
        Package::checked(manifest.into(), config.to_vec(), component.to_vec(), Vec::new())
    };
    let good = check(&text, &config, &component).unwrap();
    assert_eq!(good.about.name, "lru");
    let mut bent = component.clone();
    *bent.last_mut().unwrap() ^= 1;
    assert!(matches!(check(&text, &config, &bent), Err(Error::Changed { what: "the component", .. })));
    assert!(matches!(check(&text, b"{}", &component), Err(Error::Changed { what: "the config", .. })));
    let refused = |from: &str, to: &str, part: &str| {
        assert!(text.contains(from), "{text}");
        let reason = check(&text.replace(from, to), &config, &component).unwrap_err().to_string();
        assert!(reason.contains(part), "{reason}");
    };
    refused("\"kvasir.policy.slot\":\"evictor\"", "\"kvasir.policy.slot\":\"scheduler\"", "of evictor");
    refused("vnd.wasm.config", "vnd.oci.image.config", "not of a WebAssembly component");
    refused("\"schemaVersion\":2", "\"schemaVersion\":1", "schema");
    refused("application/wasm", "application/tar", "layers");
    refused("sha256:", "sha512:", "not sha256:");
    refused("\"layers\":[", "\"layers\":[7,", "not what it should be");
    let size = format!("\"size\":{}", component.len());
    refused(&size, "\"size\":999999999999", "at most");
    // Names of others come from nowhere but the manifest, and are checked.
    let odd = check(
        &text.replace("\"kvasir.policy.name\":\"lru\"", "\"kvasir.policy.name\":\"../x\""),
        &config,
        &component,
    );
    assert_eq!(odd.unwrap().file_name(), "evictor.wasm");
}
