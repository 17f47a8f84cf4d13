//! Misbehaving policies as components, and things a host must refuse to load.

use wasmparser::Payload;

static GUESTS: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/guests.rs"));

/// The component of `guests/NAME`. Its setting `mode` says what it does wrong, and its setting `after` from
/// which call on.
///
/// # Panics
/// There is no such guest.
pub fn guest(name: &str) -> &'static [u8] {
    match GUESTS.iter().find(|(n, _)| *n == name) {
        Some((_, component)) => component,
        None => panic!("no guest `{name}`; add it to tests/guests"),
    }
}

/// A well-made component of version 0.9 of the contract.
pub fn wrong_version() -> Vec<u8> {
    replace(guest("scheduler"), b"@0.1.0", b"@0.9.0")
}

/// A well-made scheduler that exports its contract a second time, as version 0.9.
pub fn several_versions() -> Vec<u8> {
    let mut bytes = guest("scheduler").to_vec();
    let first = instance_exported(&bytes, "kvasir:policy/scheduling@0.1.0");
    let name = b"kvasir:policy/scheduling@0.9.0";
    // One export: its name, the instance, no type.
    let mut section = vec![1, 0, name.len() as u8];
    section.extend_from_slice(name);
    section.extend([5, first, 0]);
    bytes.extend([11, section.len() as u8]); // id of a section of exports
    bytes.extend(section);
    bytes
}

/// The number of the instance that a component exports by that name.
fn instance_exported(component: &[u8], name: &str) -> u8 {
    let mut exports = wasmparser::Parser::new(0).parse_all(component).filter_map(|payload| match payload {
        Ok(Payload::ComponentExportSection(section)) => Some(section),
        _ => None,
    });
    let found = exports
        .find_map(|section| section.into_iter().map(Result::unwrap).find(|export| export.name.name == name));
    // Below 128, LEB128 is the number itself.
    u8::try_from(found.unwrap().index).ok().filter(|index| *index < 128).unwrap()
}

/// A well-made scheduler that imports sockets where others import the log.
pub fn import_not_granted() -> Vec<u8> {
    replace(guest("scheduler"), b"kvasir:policy/log@0.1.0", b"wasi:sockets/tcp@0.2.10")
}

/// A good component, padded by a custom section to over 100 MB.
pub fn bytes_of_100_mb() -> Vec<u8> {
    const PADDING: u32 = 100 << 20;
    let mut bytes = guest("scheduler").to_vec();
    bytes.push(0); // id of a custom section
    // LEB128, always five bytes; the content is the name (length 1) and the padding.
    let mut length = PADDING + 2;
    for i in 0..5 {
        bytes.push((length & 0x7f) as u8 | if i < 4 { 0x80 } else { 0 });
        length >>= 7;
    }
    bytes.extend([1, b'x']);
    bytes.resize(bytes.len() + PADDING as usize, 0);
    bytes
}

/// Equal lengths, so every section keeps its size.
fn replace(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut bytes = bytes.to_vec();
    let found: Vec<_> =
        bytes.windows(from.len()).enumerate().filter(|(_, w)| *w == from).map(|(i, _)| i).collect();
    assert!(!found.is_empty(), "nothing to replace");
    for at in found {
        bytes[at..at + to.len()].copy_from_slice(to);
    }
    bytes
}

/// Names a component imports and exports.
///
/// # Errors
/// The bytes are no valid component.
pub fn component_names(component: &[u8]) -> anyhow::Result<(Vec<String>, Vec<String>)> {
    wasmparser::Validator::new().validate_all(component)?;
    let (mut imports, mut exports) = (Vec::new(), Vec::new());
    let mut depth = 0;
    for payload in wasmparser::Parser::new(0).parse_all(component) {
        match payload? {
            Payload::ModuleSection { .. } | Payload::ComponentSection { .. } => depth += 1,
            Payload::End(_) => depth -= 1,
            Payload::ComponentImportSection(section) if depth == 0 => {
                for import in section {
                    imports.push(import?.name.name.to_owned());
                }
            }
            Payload::ComponentExportSection(section) if depth == 0 => {
                for export in section {
                    exports.push(export?.name.name.to_owned());
                }
            }
            _ => {}
        }
    }
    Ok((imports, exports))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn imports(component: &[u8]) -> Vec<String> {
        component_names(component).unwrap().0
    }

    /// A refusal must be for the reason that a scenario means, so everything else about them must be right.
    #[test]
    fn every_file_is_wrong_in_one_way_only() {
        for (name, component) in GUESTS {
            assert!(imports(component).iter().all(|i| i == "kvasir:policy/log@0.1.0"), "{name}");
        }
        assert_eq!(imports(&wrong_version()), ["kvasir:policy/log@0.9.0"]);
        let (_, exports) = component_names(&several_versions()).unwrap();
        assert!(exports.contains(&"kvasir:policy/scheduling@0.1.0".to_owned()), "{exports:?}");
        assert!(exports.contains(&"kvasir:policy/scheduling@0.9.0".to_owned()), "{exports:?}");
        assert_eq!(imports(&import_not_granted()), ["wasi:sockets/tcp@0.2.10"]);
        assert!(bytes_of_100_mb().len() > 100_000_000);
        assert_eq!(imports(&bytes_of_100_mb()), ["kvasir:policy/log@0.1.0"]);
    }
}
