//! What a policy says about itself, and the settings an operator gives it.

use std::fmt::Display;
use std::str::FromStr;

/// Name, version, slot and settings of a policy (`control.describe`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    pub name: String,
    pub version: String,
    /// `scheduler`, `balancer`, `evictor` or `admitter`.
    pub slot: String,
    pub settings: Vec<Setting>,
}

/// One setting: its default as text, and what it does with its unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    pub name: String,
    pub default: String,
    pub doc: String,
}

impl Description {
    pub fn scheduler(name: &str, version: &str) -> Self {
        Self::new("scheduler", name, version)
    }

    pub fn evictor(name: &str, version: &str) -> Self {
        Self::new("evictor", name, version)
    }

    pub fn admitter(name: &str, version: &str) -> Self {
        Self::new("admitter", name, version)
    }

    pub fn balancer(name: &str, version: &str) -> Self {
        Self::new("balancer", name, version)
    }

    fn new(slot: &str, name: &str, version: &str) -> Self {
        Self { name: name.into(), version: version.into(), slot: slot.into(), settings: Vec::new() }
    }

    /// Adds a setting; `doc` states the unit.
    pub fn setting(mut self, name: &str, default: impl Display, doc: &str) -> Self {
        self.settings.push(Setting { name: name.into(), default: default.to_string(), doc: doc.into() });
        self
    }
}

/// The operator's values for a policy's settings, checked against its [`Description`].
#[derive(Clone, Debug, Default)]
pub struct Settings {
    values: Vec<(String, String)>,
}

/// A setting that cannot be used; its text is what `configure` returns to the operator.
pub type SettingError = String;

impl Settings {
    /// Pairs the operator's values with the description's defaults.
    ///
    /// # Errors
    /// A name that the policy does not know; the text lists the names it knows.
    pub fn new(description: &Description, given: &[(String, String)]) -> Result<Self, SettingError> {
        for (name, _) in given {
            if !description.settings.iter().any(|s| s.name == *name) {
                let known: Vec<_> = description.settings.iter().map(|s| s.name.as_str()).collect();
                return Err(format!(
                    "unknown setting `{name}` of policy `{}`; it knows: {}",
                    description.name,
                    if known.is_empty() { "none".to_owned() } else { known.join(", ") }
                ));
            }
        }
        let value = |s: &Setting| {
            let own = given.iter().rev().find(|(name, _)| *name == s.name);
            (s.name.clone(), own.map_or_else(|| s.default.clone(), |(_, v)| v.clone()))
        };
        Ok(Self { values: description.settings.iter().map(value).collect() })
    }

    /// The value of a described setting, parsed.
    ///
    /// # Errors
    /// The text is not a `T`. A name missing from the description is the author's mistake and says so.
    pub fn get<T: FromStr>(&self, name: &str) -> Result<T, SettingError> {
        let Some((_, text)) = self.values.iter().find(|(n, _)| n == name) else {
            return Err(format!("setting `{name}` is not in this policy's description"));
        };
        text.parse()
            .map_err(|_| format!("setting `{name}`: `{text}` is not a valid {}", std::any::type_name::<T>()))
    }

    /// As [`Settings::get`] for a number that must lie within `range` (finite, bounds included).
    ///
    /// # Errors
    /// As `get`, or a value outside the range; the text names it.
    pub fn number(&self, name: &str, range: std::ops::RangeInclusive<f64>) -> Result<f64, SettingError> {
        let value: f64 = self.get(name)?;
        if range.contains(&value) {
            return Ok(value);
        }
        Err(format!("setting `{name}`: {value} is outside {} to {}", range.start(), range.end()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(given: &[(&str, &str)]) -> Result<Settings, SettingError> {
        let description = Description::evictor("x", "1.0.0").setting("window", 900, "seconds");
        let given: Vec<_> = given.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect();
        Settings::new(&description, &given)
    }

    #[test]
    fn defaults_and_overrides() {
        assert_eq!(settings(&[]).unwrap().number("window", 1.0..=1e6), Ok(900.0));
        assert_eq!(settings(&[("window", "5")]).unwrap().number("window", 1.0..=1e6), Ok(5.0));
        assert_eq!(settings(&[("window", "5"), ("window", "6")]).unwrap().get::<u32>("window"), Ok(6));
    }

    #[test]
    fn errors_name_setting_and_remedy() {
        assert!(settings(&[("windo", "5")]).unwrap_err().contains("it knows: window"));
        assert!(settings(&[("window", "x")]).unwrap().get::<u32>("window").unwrap_err().contains("`x`"));
        for bad in ["0", "NaN", "inf"] {
            let e = settings(&[("window", bad)]).unwrap().number("window", 1.0..=1e6).unwrap_err();
            assert!(e.contains("outside 1 to 1000000"), "{e}");
        }
    }
}
