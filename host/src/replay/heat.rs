//! A map of shares, a row for each of several things and a column for each part of the time: the darker, the more.

use super::plot::{escape, mark, number, ticks};
use std::fmt::Write as _;

const WIDTH: f64 = 400.0;
/// Room for the names of the rows, and for the numbers below.
const LEFT: f64 = 76.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 42.0;
/// All rows together, and one of them.
const ROWS_HEIGHT: f64 = 320.0;
const ROW_MAX: f64 = 18.0;
/// Rows closer than that have a name only now and then.
const NAME_HEIGHT: f64 = 12.0;
/// One colour, whose strength also people see who see no colours.
const COLOUR: &str = "#0072B2";
/// Steps between nothing and everything.
const STEPS: f64 = 20.0;
/// More rows are too thin to be told apart.
pub(super) const ROWS_MAX: usize = 64;

/// See the module documentation.
pub(super) struct HeatMap<'a> {
    pub(super) title: &'a str,
    /// Name of each row, and per cent of each of its columns; of the rows at most [`ROWS_MAX`].
    pub(super) rows: Vec<(&'a str, Vec<f64>)>,
    /// Width of a column, seconds.
    pub(super) column_s: f64,
    /// Moments that have a name.
    pub(super) marks: Vec<(f64, String)>,
}

impl HeatMap<'_> {
    pub(super) fn svg(&self) -> String {
        let rows = &self.rows[..self.rows.len().min(ROWS_MAX)];
        let columns = rows.iter().map(|(_, cells)| cells.len()).max().unwrap_or(0);
        if columns == 0 {
            return format!("<p>{}: nothing to draw.</p>\n", escape(self.title));
        }
        let row_height = (ROWS_HEIGHT / rows.len() as f64).min(ROW_MAX);
        let (cell, bottom) = ((WIDTH - LEFT - RIGHT) / columns as f64, TOP + row_height * rows.len() as f64);
        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {:.1}\" role=\"img\" aria-label=\"{}\">\n",
            bottom + BOTTOM,
            escape(self.title)
        );
        let name_every = (NAME_HEIGHT / row_height).ceil() as usize;
        for (n, (name, cells)) in rows.iter().enumerate() {
            let y = TOP + row_height * n as f64;
            if n % name_every == 0 {
                let at = y + row_height / 2.0 + 4.0;
                let x = LEFT - 5.0;
                let _ = writeln!(
                    svg,
                    "<text x=\"{x}\" y=\"{at:.1}\" text-anchor=\"end\">{}</text>",
                    escape(name)
                );
            }
            for (from, to, step) in runs(cells) {
                let (x, width) = (LEFT + cell * from as f64, cell * (to - from) as f64);
                let _ = writeln!(
                    svg,
                    "<rect x=\"{x:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{:.1}\" fill=\"{COLOUR}\" \
                     fill-opacity=\"{:.2}\"><title>{} {} %</title></rect>",
                    row_height - row_height.min(1.0),
                    step / STEPS,
                    escape(name),
                    100.0 * step / STEPS
                );
            }
        }
        let total_s = self.column_s * columns as f64;
        let x_of = |seconds: f64| LEFT + seconds / total_s * (WIDTH - LEFT - RIGHT);
        for tick in ticks((0.0, total_s)) {
            let (x, at) = (x_of(tick), bottom + 15.0);
            let _ = writeln!(
                svg,
                "<text x=\"{x:.1}\" y=\"{at:.1}\" text-anchor=\"middle\">{}</text>",
                number(tick)
            );
        }
        let (middle, at) = ((LEFT + WIDTH - RIGHT) / 2.0, bottom + BOTTOM - 8.0);
        let _ = writeln!(svg, "<text x=\"{middle}\" y=\"{at:.1}\" text-anchor=\"middle\">seconds</text>");
        for (seconds, name) in &self.marks {
            mark(&mut svg, (x_of(*seconds), TOP, bottom), name);
        }
        svg.push_str("</svg>\n");
        svg
    }
}

/// Neighbours of one strength as one: first column, the one behind the last, and the strength in steps, above 0.
fn runs(cells: &[f64]) -> Vec<(usize, usize, f64)> {
    let mut runs: Vec<(usize, usize, f64)> = Vec::new();
    for (at, percent) in cells.iter().enumerate() {
        let step = (percent.clamp(0.0, 100.0) / 100.0 * STEPS).round();
        match runs.last_mut() {
            Some((_, end, of)) if *end == at && *of == step => *end = at + 1,
            _ if step > 0.0 => runs.push((at, at + 1, step)),
            _ => {}
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_of_one_strength_are_one() {
        assert_eq!(
            runs(&[0.0, 50.0, 51.0, 0.0, 52.0, 100.0, 101.0, 1.0]),
            [(1, 3, 10.0), (4, 5, 10.0), (5, 7, 20.0)]
        );
        assert_eq!((runs(&[]), runs(&[f64::NAN])), (vec![], vec![]));
    }

    #[test]
    fn a_map_has_names_and_no_more_rows_than_can_be_told_apart() {
        let rows = |count: usize| (0..count).map(|_| ("a<b>", vec![100.0, 3.0])).collect();
        let map = |rows| HeatMap { title: "<t>", rows, column_s: 10.0, marks: vec![(5.0, "<s>".into())] };
        for (count, rects, names) in [(1, 2, 1), (64, 128, 22), (500, 128, 22)] {
            let svg = map(rows(count)).svg();
            let text = svg.matches(">a&lt;b&gt;</text>").count();
            assert_eq!((svg.matches("<rect").count(), text), (rects, names), "{svg}");
            assert!(svg.contains("&lt;s&gt;") && !svg.contains("<t>") && !svg.contains("NaN"), "{svg}");
        }
        assert!(map(rows(0)).svg().contains("nothing to draw"));
    }
}
