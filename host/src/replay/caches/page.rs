//! Caches beside each other, as a page to look at.

use super::Table;
use super::told::{HEAD, cells};
use crate::replay::page::Page;
use crate::replay::plot::{LINES_MAX, Line, Plot};
use std::collections::BTreeSet;

impl Table {
    /// The same as [`Table::text`] without the parts, with what only pictures show.
    pub fn page(&self) -> Page {
        let mut page = Page::new(&format!("Caches over {}", self.trace));
        self.faults().iter().for_each(|fault| page.warning(fault));
        let requests = self.rows.first().map_or(0, |row| row.requests);
        page.paragraph(&format!(
            "{requests} requests; hits are blocks found behind each other from the first on."
        ));
        page.table(&HEAD, &self.rows.iter().map(cells).collect::<Vec<_>>());
        let by_size = self.by_size();
        if by_size.iter().any(|line| line.points.len() > 1) {
            draw(&mut page, "Hit rate by the size of the cache", "blocks", by_size);
        }
        for &blocks in &self.rows.iter().map(|row| row.capacity_blocks).collect::<BTreeSet<_>>() {
            let rows = self.rows.iter().filter(|row| row.capacity_blocks == blocks);
            let lines = rows.map(|row| Line {
                name: row.evictor.clone(),
                points: row.over_time.curve(),
                dots: false,
            });
            draw(&mut page, &format!("Hit rate over time, {blocks} blocks"), "seconds", lines.collect());
        }
        page
    }

    /// A line for each evictor.
    fn by_size(&self) -> Vec<Line> {
        let mut lines: Vec<Line> = Vec::new();
        for row in &self.rows {
            let point = (row.capacity_blocks.into(), row.hit_rate_percent);
            match lines.iter_mut().find(|line| line.name == row.evictor) {
                Some(line) => line.points.push(point),
                None => lines.push(Line { name: row.evictor.clone(), points: vec![point], dots: true }),
            }
        }
        lines.iter_mut().for_each(|line| line.points.sort_by(|a, b| a.0.total_cmp(&b.0)));
        lines
    }
}

/// As many pictures as it takes for lines that can be told apart, with as many lines in each.
fn draw(page: &mut Page, title: &str, x: &'static str, mut lines: Vec<Line>) {
    let pictures = lines.len().div_ceil(LINES_MAX).max(1);
    let lines_each = lines.len().div_ceil(pictures);
    while !lines.is_empty() {
        let rest = lines.split_off(lines.len().min(lines_each));
        page.plot(&Plot { title: title.into(), x, y: "per cent", lines, ..Plot::default() });
        lines = rest;
    }
}
