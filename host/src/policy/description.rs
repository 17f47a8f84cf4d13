//! What a policy says about itself reaches logs, tables, metrics and terminals, so it is checked first.

use crate::text::printable;
use kvasir_policy::Description;

const NAME_BYTES: usize = 64;
const SETTINGS: usize = 64;
const DEFAULT_BYTES: usize = 1 << 10;
const DOC_BYTES: usize = 4 << 10;

/// What the contract does not allow a policy to say about itself, and what it allows.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadDescription {
    #[error("its name is `{shown}` ({bytes} bytes) and must be 1 to {NAME_BYTES} of a-z 0-9 -")]
    Name { shown: String, bytes: usize },
    #[error(
        "its version is `{shown}` ({bytes} bytes) and must be like 1.2.3 or 1.2.3-rc.1, at most {NAME_BYTES}"
    )]
    Version { shown: String, bytes: usize },
    #[error("it has {count} settings; at most {SETTINGS} are allowed")]
    Settings { count: usize },
    #[error("the name of setting {place} is `{shown}` and must be 1 to {NAME_BYTES} of a-z 0-9 -")]
    SettingName { place: usize, shown: String },
    #[error("the {part} of setting `{name}` has {bytes} bytes; at most {limit} are allowed")]
    SettingText { part: &'static str, name: String, bytes: usize, limit: usize },
}

/// # Errors
/// The first part that the contract does not allow.
pub(super) fn check(description: &Description) -> Result<(), BadDescription> {
    let Description { name, version, slot: _, settings } = description;
    if !is_name(name) {
        return Err(BadDescription::Name { shown: printable(name, NAME_BYTES), bytes: name.len() });
    }
    if !is_version(version) {
        return Err(BadDescription::Version { shown: printable(version, NAME_BYTES), bytes: version.len() });
    }
    if settings.len() > SETTINGS {
        return Err(BadDescription::Settings { count: settings.len() });
    }
    for (place, setting) in settings.iter().enumerate() {
        if !is_name(&setting.name) {
            return Err(BadDescription::SettingName { place, shown: printable(&setting.name, NAME_BYTES) });
        }
        for (part, text, limit) in
            [("default", &setting.default, DEFAULT_BYTES), ("doc", &setting.doc, DOC_BYTES)]
        {
            if text.len() > limit {
                let (name, bytes) = (setting.name.clone(), text.len());
                return Err(BadDescription::SettingText { part, name, bytes, limit });
            }
        }
    }
    Ok(())
}

pub(crate) fn is_name(text: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=NAME_BYTES).contains(&text.len()) && text.bytes().all(allowed)
}

/// Three numbers, then what semantic versioning allows behind them.
pub(crate) fn is_version(text: &str) -> bool {
    let (numbers, rest) = text.split_at(text.find(['-', '+']).unwrap_or(text.len()));
    let number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let three = numbers.split('.').count() == 3 && numbers.split('.').all(number);
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"-+.".contains(&b);
    three && text.len() <= NAME_BYTES && rest.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_keeps_to_its_bounds() {
        let check = |description: Description, expected: &str| match super::check(&description) {
            Ok(()) => assert_eq!(expected, "", "{:.80?}", description.name),
            Err(reason) => {
                assert!(!expected.is_empty() && reason.to_string().contains(expected), "{reason}");
            }
        };
        let named = |name: &str| Description::scheduler(name, "1.2.3");
        check(named("least-loaded-2"), "");
        for name in ["", "Mooncake", "a b", "a\nb", "x\u{1b}[2J", &"x".repeat(65), &"x".repeat(5 << 20)] {
            check(named(name), "its name is `");
        }
        for version in ["0.1.0", "1.2.3-rc.1", "1.2.3+build.5"] {
            check(Description::evictor("a", version), "");
        }
        for version in ["", "1", "1.2", "not a version", "1.2.x", "1.2.3-\n", &"1".repeat(1 << 20)] {
            check(Description::evictor("a", version), "its version is `");
        }
        check(named("a").setting("share-of-pool", "0.5", "part, 0 to 1"), "");
        check(named("a").setting("Share", "0.5", ""), "setting 0 is `Share`");
        check(named("a").setting("share", "0".repeat(2 << 10), ""), "default of setting `share`");
        check(named("a").setting("share", "0", &"x".repeat(5 << 10)), "doc of setting `share`");
        let many = (0..65).fold(named("a"), |d, i| d.setting(&format!("s{i}"), 0, ""));
        check(many, "65 settings");
    }
}
