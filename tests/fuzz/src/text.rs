//! Texts that reach a terminal or a log.

use std::fmt::Display;

/// Longer than any refusal needs to be.
const BYTES_MAX: usize = 16 << 10;

/// The text of a refusal: whoever made the input must not move the cursor of whoever reads about it, nor fill their log.
pub(crate) fn told(refusal: &impl Display) -> String {
    let text = refusal.to_string();
    assert!(text.len() <= BYTES_MAX, "{} bytes: {:.200}", text.len(), text);
    let strange = text.chars().find(|c| c.is_control() && *c != '\n');
    assert!(strange.is_none(), "a terminal would obey {strange:?} in {text:?}");
    text
}
