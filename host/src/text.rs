//! Text of others, made fit for a log, a terminal or an error.

/// At most `bytes_max` bytes of `text` on one line. What moves a cursor, ends a line or turns the reading
/// direction is escaped, so that nobody's text can pass for ours.
pub(crate) fn printable(text: &str, bytes_max: usize) -> String {
    let mut out = String::new();
    for c in text.chars() {
        let start = out.len();
        if c.is_control() || is_invisible(c) {
            out.extend(c.escape_default())
        } else {
            out.push(c)
        }
        if out.len() > bytes_max {
            out.truncate(start);
            out.push('…');
            break;
        }
    }
    out
}

/// As [`printable`], line by line: what a parser says of a text quotes it. Shows the first lines, and the beginning of each.
pub(crate) fn printable_lines(text: &str) -> String {
    const LINES: usize = 16;
    const LINE_BYTES: usize = 256;
    let lines: Vec<_> = text.trim_end().lines().take(LINES).map(|line| printable(line, LINE_BYTES)).collect();
    lines.join("\n")
}

/// Line and paragraph separators, zero-width characters and marks of direction.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_leaves_its_line_or_its_length() {
        let check = |text: &str, expected: &str| assert_eq!(printable(text, 12), expected, "{text:?}");
        check("héllo", "héllo");
        check("a\nb\u{1b}[0m", r"a\nb\u{1b}[0…");
        check("\u{202e}x", r"\u{202e}x");
        check("1234567890123", "123456789012…");
        check("\u{85}", r"\u{85}");
        assert_eq!(printable_lines("a\u{1b}\r\n  | b\n\n"), "a\\u{1b}\n  | b");
        assert!(printable_lines(&"é\n".repeat(1 << 20)).len() < 100);
        assert!(printable_lines(&"é".repeat(1 << 20)).len() < 300);
        assert!(printable(&"é\n".repeat(1 << 20), 1 << 10).len() <= (1 << 10) + '…'.len_utf8());
    }
}
