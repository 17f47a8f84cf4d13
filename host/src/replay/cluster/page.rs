//! What came of a simulated cluster, as a page to look at.

use super::{Report, Swapped};
use crate::replay::heat::{self, HeatMap};
use crate::replay::page::Page;
use crate::replay::plot::{Line, Plot};

impl Report {
    /// The same as its rows, with what only pictures show.
    pub fn page(&self) -> Page {
        let mut page = Page::new(&format!("{} over {}", self.scheduler, self.trace));
        self.faults.iter().for_each(|faults| page.warning(&format!("A policy failed: {faults}")));
        let rows: Vec<_> = self.rows().into_iter().map(|(name, value)| vec![name.into(), value]).collect();
        page.table(&["", ""], &rows);
        let line = |name: &str, points| vec![Line { name: name.into(), points, dots: false }];
        let times = |title: &str, points| Plot {
            title: title.into(),
            x: "seconds",
            y: "share of the requests within",
            logarithmic: true,
            lines: line("requests", points),
            ..Plot::default()
        };
        let curves = &self.curves;
        page.plot(&times("Time to the first token", curves.ttft.curve()));
        page.plot(&times("Time between tokens, mean of a request", curves.tbt.curve()));
        page.plot(&Plot {
            title: "Hit rate over time".into(),
            x: "seconds",
            y: "% of the blocks",
            lines: line("blocks found", curves.hits.curve()),
            marks: self.marks(),
            ..Plot::default()
        });
        self.draw_load(&mut page);
        page
    }

    fn draw_load(&self, page: &mut Page) {
        let names = self.curves.instances.iter().map(String::as_str);
        page.heat_map(&HeatMap {
            title: "Load of each instance",
            rows: names.zip(self.curves.load.percent()).collect(),
            column_s: self.curves.load.part_s(),
            marks: self.marks(),
        });
        page.paragraph("The stronger the colour, the more of the time it was at work.");
        let instances = self.curves.instances.len();
        if instances > heat::ROWS_MAX {
            page.paragraph(&format!("The first {} of {instances} instances.", heat::ROWS_MAX));
        }
    }

    fn marks(&self) -> Vec<(f64, String)> {
        self.swaps.iter().map(|Swapped { at_s, slot, to, .. }| (*at_s, format!("{slot}: {to}"))).collect()
    }
}
