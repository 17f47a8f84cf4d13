//! Plots as SVG: lines that are told apart by colour and by dashes, legible on a telephone.

use std::fmt::Write as _;

const WIDTH: f64 = 400.0;
const HEIGHT: f64 = 260.0;
/// Room for numbers and names around the lines.
const LEFT: f64 = 48.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 42.0;
/// Colours that all kinds of colour blindness keep apart (Okabe and Ito, 2008), and a dash for each.
const STYLES: [(&str, &str); LINES_MAX] = [
    ("#0072B2", "none"),
    ("#D55E00", "7 4"),
    ("#009E73", "2 3"),
    ("#CC79A7", "10 3 2 3"),
    ("#E69F00", "14 4"),
    ("#56B4E9", "4 2"),
    ("currentColor", "1 3"),
];
/// More lines in one picture cannot be told apart.
pub(super) const LINES_MAX: usize = 7;
const TICKS: f64 = 5.0;

/// One line.
pub(super) struct Line {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
    /// A dot at each point: these are all there are.
    pub(super) dots: bool,
}

/// Lines over common axes.
#[derive(Default)]
pub(super) struct Plot {
    pub(super) title: String,
    pub(super) x: &'static str,
    pub(super) y: &'static str,
    /// The x axis goes by powers of ten.
    pub(super) logarithmic: bool,
    pub(super) lines: Vec<Line>,
    /// Moments on the x axis that have a name.
    pub(super) marks: Vec<(f64, String)>,
}

impl Plot {
    /// An `svg` element with its title; of the lines at most [`LINES_MAX`].
    pub(super) fn svg(&self) -> String {
        let points = || self.lines.iter().flat_map(|line| &line.points).copied();
        let Some(axes) = Axes::around(points(), self.logarithmic) else {
            return format!("<p>{}: nothing to draw.</p>\n", escape(&self.title));
        };
        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">\n",
            escape(&self.title)
        );
        axes.draw(&mut svg, self.x, self.y);
        self.marks.iter().for_each(|(x, name)| mark(&mut svg, (axes.x(*x), TOP, HEIGHT - BOTTOM), name));
        for (line, (colour, dash)) in self.lines.iter().zip(STYLES) {
            draw(&mut svg, &axes, line, colour, dash);
        }
        svg.push_str("</svg>\n");
        svg
    }

    /// What the lines mean.
    pub(super) fn legend(&self) -> String {
        let mut legend = String::from("<p class=\"legend\">");
        for (line, (colour, dash)) in self.lines.iter().zip(STYLES) {
            let _ = write!(
                legend,
                "<span><svg viewBox=\"0 0 30 8\" width=\"30\" height=\"8\" aria-hidden=\"true\"><line x1=\"0\" y1=\"4\" x2=\"30\" \
                 y2=\"4\" stroke=\"{colour}\" stroke-width=\"2.5\" stroke-dasharray=\"{dash}\"/></svg> {}</span> ",
                escape(&line.name)
            );
        }
        legend + "</p>\n"
    }
}

fn draw(svg: &mut String, axes: &Axes, line: &Line, colour: &str, dash: &str) {
    let at: Vec<(f64, f64)> = line.points.iter().map(|&(x, y)| (axes.x(x), axes.y(y))).collect();
    let path: Vec<String> = at.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let _ = writeln!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" stroke-dasharray=\"{dash}\"/>",
        path.join(" ")
    );
    for (x, y) in at.iter().filter(|_| line.dots) {
        let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
    }
}

/// A line from top to bottom, with a name that is read along it.
pub(super) fn mark(svg: &mut String, (x, top, bottom): (f64, f64, f64), name: &str) {
    let _ = writeln!(
        svg,
        "<line class=\"mark\" x1=\"{x:.1}\" y1=\"{top}\" x2=\"{x:.1}\" y2=\"{bottom}\"/><text class=\"over\" \
         transform=\"translate({:.1} {}) rotate(-90)\" text-anchor=\"end\">{}</text>",
        x - 4.0,
        top + 4.0,
        escape(name)
    );
}

/// Where numbers lie in the picture.
struct Axes {
    logarithmic: bool,
    x: (f64, f64),
    y: (f64, f64),
}

impl Axes {
    /// Axes within which all points lie. Returns `None` if there are none.
    fn around(points: impl Iterator<Item = (f64, f64)>, logarithmic: bool) -> Option<Self> {
        let finite = points.filter(|(x, y)| x.is_finite() && y.is_finite());
        let (mut x, mut y) = ((f64::INFINITY, f64::NEG_INFINITY), (0.0, f64::NEG_INFINITY));
        for point in finite {
            x = (x.0.min(point.0), x.1.max(point.0));
            y = (point.1.min(y.0), point.1.max(y.1));
        }
        if x.0 > x.1 {
            return None;
        }
        if logarithmic {
            let (from, to) = (log(x.0).floor(), log(x.1).ceil());
            return Some(Self { logarithmic, x: (from, to.max(from + 1.0)), y: wide(y) });
        }
        Some(Self { logarithmic, x: wide((x.0.min(0.0), x.1)), y: wide(y) })
    }

    fn x(&self, x: f64) -> f64 {
        let x = if self.logarithmic { log(x) } else { x };
        LEFT + (x - self.x.0) / (self.x.1 - self.x.0) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, y: f64) -> f64 {
        HEIGHT - BOTTOM - (y - self.y.0) / (self.y.1 - self.y.0) * (HEIGHT - TOP - BOTTOM)
    }

    fn draw(&self, svg: &mut String, x_name: &str, y_name: &str) {
        let (left, right) = (LEFT, WIDTH - RIGHT);
        let (top, bottom) = (TOP, HEIGHT - BOTTOM);
        for tick in ticks(self.y) {
            let at = self.y(tick);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{left}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\"/><text x=\"{:.1}\" \
                 y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                left - 5.0,
                at + 4.0,
                number(tick)
            );
        }
        let x_ticks = if self.logarithmic { powers(self.x) } else { ticks(self.x) };
        for tick in x_ticks {
            let at = self.x(tick);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{top}\" x2=\"{at:.1}\" y2=\"{bottom}\"/><text x=\"{at:.1}\" \
                 y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                bottom + 15.0,
                number(tick)
            );
        }
        let middle = (left + right) / 2.0;
        let _ = writeln!(
            svg,
            "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - 8.0,
            escape(x_name)
        );
        let _ = writeln!(
            svg,
            "<text transform=\"translate(12 {}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            (top + bottom) / 2.0,
            escape(y_name)
        );
    }
}

/// Times of 0 stand at a millisecond.
fn log(x: f64) -> f64 {
    x.max(1e-3).log10()
}

/// A range that is not empty.
fn wide((from, to): (f64, f64)) -> (f64, f64) {
    if to > from { (from, to) } else { (from, from + 1.0) }
}

fn powers((from, to): (f64, f64)) -> Vec<f64> {
    (from as i32..=to as i32).map(|power| 10f64.powi(power)).collect()
}

/// Round numbers within a range: 1, 2 or 5 times a power of ten apart.
pub(super) fn ticks((from, to): (f64, f64)) -> Vec<f64> {
    let rough = (to - from) / TICKS;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|step| *step >= rough * 0.999);
    let step = step.unwrap_or(10.0 * power);
    let first = (from / step).ceil() as i64;
    (first..).map(|n| n as f64 * step).take_while(|tick| *tick <= to + step * 1e-6).collect()
}

pub(super) fn number(value: f64) -> String {
    let rounded = (value * 1e6).round() / 1e6;
    if rounded.abs() >= 10_000.0 { format!("{}k", rounded / 1e3) } else { format!("{rounded}") }
}

/// Text of others between tags and in attributes.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers_within_the_range() {
        assert_eq!(ticks((0.0, 1.0)), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]);
        assert_eq!(ticks((0.0, 37.0)), [0.0, 10.0, 20.0, 30.0]);
        assert_eq!(ticks((-3.0, 4.0)).first(), Some(&-2.0));
        assert_eq!(powers((-1.0, 2.0)), [0.1, 1.0, 10.0, 100.0]);
        assert_eq!([0.6000000000000001, 25_000.0, -1.5].map(number), ["0.6", "25k", "-1.5"]);
    }

    #[test]
    fn whatever_is_drawn_lies_in_the_picture() {
        let line = |points: Vec<(f64, f64)>| Line { name: "a<b>".into(), points, dots: true };
        let rows = [
            (vec![], "nothing to draw"),
            (vec![(f64::NAN, 1.0)], "nothing to draw"),
            (vec![(5.0, 5.0)], "<circle"),
            (vec![(0.0, -2.0), (1e9, 3.0)], "<polyline"),
        ];
        for (points, expected) in rows {
            for logarithmic in [false, true] {
                let lines = vec![line(points.clone()), line(points.clone())];
                let marks = vec![(5.0, "<swap>".into())];
                let plot = Plot { title: "<t>".into(), x: "x", y: "y", logarithmic, lines, marks };
                let svg = plot.svg();
                assert!(svg.contains(expected) && !svg.contains("<t>") && !svg.contains("<swap>"), "{svg}");
                assert_eq!(svg.contains("&lt;swap&gt;"), expected.starts_with('<'), "{svg}");
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
                assert!(plot.legend().contains("a&lt;b&gt;"));
            }
        }
    }
}
