//! A page of HTML that needs nothing else: no script, no file beside it, no network.

use super::heat::HeatMap;
use super::plot::{Plot, escape};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

/// Light and dark as the reader has it; one column, as wide as a telephone or as an eye likes.
const STYLE: &str = "
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.25rem 0.75rem 0.25rem 0; border-bottom: 1px solid #8884; vertical-align: top; }
svg { max-width: 100%; } svg[role=img] { width: 100%; height: auto; }
svg text { font-size: 12px; fill: currentColor; } svg .grid { stroke: #8884; stroke-width: 1; }
svg .mark { stroke: currentColor; stroke-width: 1; stroke-dasharray: 3 3; }
.legend span { margin-right: 1rem; white-space: nowrap; }
figure { margin: 0; }
@media print {
  body { max-width: none; font-size: 13px; } svg[role=img] { max-width: 32rem; }
  figure, tr { break-inside: avoid; } h2 { break-after: avoid; } figure + p { break-before: avoid; }
}
svg .over { paint-order: stroke; stroke: Canvas; stroke-width: 3px; }
svg { print-color-adjust: exact; }
.bad { border-left: 4px solid #D55E00; padding-left: 0.75rem; }
";

/// A page that grows from top to bottom.
pub struct Page {
    html: String,
}

impl Page {
    pub(super) fn new(title: &str) -> Self {
        let title = escape(title);
        let html = format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
             <style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        );
        Self { html }
    }

    pub(super) fn heading(&mut self, text: &str) {
        let _ = writeln!(self.html, "<h2>{}</h2>", escape(text));
    }

    pub(super) fn paragraph(&mut self, text: &str) {
        let _ = writeln!(self.html, "<p>{}</p>", escape(text));
    }

    /// Something that a reader must not miss.
    pub(super) fn warning(&mut self, text: &str) {
        let _ = writeln!(self.html, "<p class=\"bad\">{}</p>", escape(text));
    }

    pub(super) fn table(&mut self, head: &[&str], rows: &[Vec<String>]) {
        let cells = |tag: &str, cells: &mut dyn Iterator<Item = &str>| -> String {
            cells.map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect()
        };
        let head = cells("th", &mut head.iter().copied());
        let _ = writeln!(self.html, "<div class=\"wide\"><table>\n<tr>{head}</tr>");
        for row in rows {
            let _ = writeln!(self.html, "<tr>{}</tr>", cells("td", &mut row.iter().map(String::as_str)));
        }
        self.html.push_str("</table></div>\n");
    }

    pub(super) fn plot(&mut self, plot: &Plot) {
        self.figure(&plot.title, &[plot.legend(), plot.svg()]);
    }

    pub(super) fn heat_map(&mut self, map: &HeatMap<'_>) {
        self.figure(map.title, &[map.svg()]);
    }

    /// On paper it stays together.
    fn figure(&mut self, title: &str, parts: &[String]) {
        self.html += "<figure>\n";
        self.heading(title);
        self.html.extend(parts.iter().map(String::as_str));
        self.html += "</figure>\n";
    }

    /// The whole of it.
    pub fn html(&self) -> String {
        format!("{}</body>\n</html>\n", self.html)
    }

    /// Writes it to `path`, whole or not at all.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        let mut file = super::partial_file(path)?;
        file.write_all(self.html().as_bytes())?;
        file.persist(path).map(drop).map_err(|error| error.error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_whole_and_escapes_what_it_is_given() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.html");
        let mut page = Page::new("<script>alert(1)</script>");
        page.paragraph("a < b");
        page.warning("\"quoted\"");
        page.table(&["x"], &[vec!["<b>".into()]]);
        page.write(&path).unwrap();
        let html = std::fs::read_to_string(&path).unwrap();
        assert_eq!(html, page.html());
        assert!(!html.contains("<script") && !html.contains("<b>") && html.ends_with("</html>\n"), "{html}");
        assert!(html.contains("a &lt; b") && html.contains("&quot;quoted&quot;"));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(page.write(Path::new("/none/p.html")).is_err());
    }
}
