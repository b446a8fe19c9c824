//! The heat map: a row for each weight, a column for each update, and a colour for its relative size.

use maud::{Markup, html};

use crate::terminal::format::name;
use crate::tools::diff::share;
use crate::tools::updates::{Row, Update};

/// Colours of the scale, `h0` to `h6` in `style.css`.
const COLOURS: usize = 7;
/// Pixels: the height of a row of small text, and the widths of a column that a finger hits and that few columns fill.
const ROW: usize = 16;
const NARROW: usize = 15;
const WIDE: usize = 60;
/// The columns together, where there are enough.
const COLUMNS: usize = 880;
/// Pixels of a letter, with a margin, and the most letters of a name.
const LETTER: f64 = 6.8;
const LETTERS: usize = 42;
/// Pixels left of the cells: half of the first label.
const MARGIN: usize = 14;
/// Pixels from one label of a column to the next.
const APART: usize = 70;

/// The colours' bounds in a geometric series.
struct Scale {
    least: f64,
    most: f64,
}

impl Scale {
    /// `None` if there is no update but zero.
    fn of(rows: &[Row]) -> Option<Scale> {
        let values = || rows.iter().flat_map(|row| &row.updates).filter_map(Update::share).filter(|value| *value > 0.0);
        let least = values().min_by(f64::total_cmp)?;
        Some(Scale { least, most: values().max_by(f64::total_cmp)? })
    }

    fn colour(&self, value: f64) -> usize {
        let whole = (self.most / self.least).ln();
        let part = if whole > 0.0 { (value / self.least).ln() / whole } else { 1.0 };
        ((part * COLOURS as f64) as usize).min(COLOURS - 1)
    }

    fn from(&self, colour: usize) -> f64 {
        self.least * (self.most / self.least).powf(colour as f64 / COLOURS as f64)
    }
}

/// The map with its legend. `before` and `after` name the two states of each column.
pub(super) fn map(rows: &[Row], columns: &[(String, String)], text: &str) -> Markup {
    let scale = Scale::of(rows);
    let width = (COLUMNS / columns.len().max(1)).clamp(NARROW, WIDE);
    let (before, behind) = ends(rows);
    let own = |row: &Row| shortened(&name(&row.name[before..row.name.len() - behind]));
    let names: Vec<String> = rows.iter().map(own).collect();
    let letters = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let left = (letters as f64 * LETTER) as usize + 10;
    let (top, bottom) = (24, 24 + rows.len() * ROW);
    let (whole, height) = (columns.len() * width + 40, bottom + 24);
    let every = APART.div_ceil(width);
    html! {
        div.map {
            // Apart from the cells: the names stay while the cells scroll. A narrow screen cuts off their beginnings.
            div.names {
                svg.heat viewBox=(format!("0 0 {left} {height}")) width=(left) height=(height) aria-hidden="true" {
                    @for (row, shown) in names.iter().enumerate() {
                        text x=(left - 8) y=(top + row * ROW + 12) text-anchor="end" { (shown) title { (name(&rows[row].name)) } }
                    }
                }
            }
            div.scroll tabindex="0" role="region" aria-label="Heat map of the updates" {
                svg.heat viewBox=(format!("0 0 {whole} {height}")) width=(whole) height=(height) role="img" aria-labelledby="updates-t updates-d" {
                    title id="updates-t" { "Size of the update of each weight" }
                    desc id="updates-d" { (text) }
                    @for (at, (_, after)) in columns.iter().enumerate().step_by(every) {
                        @for y in [top - 8, bottom + 16] {
                            text x=(MARGIN + at * width + width / 2) y=(y) text-anchor="middle" { (after) }
                        }
                    }
                    @for (number, row) in rows.iter().enumerate() {
                        @for ((at, value), (before, after)) in row.updates.iter().enumerate().zip(columns) {
                            @let class = match (value.share(), &scale) {
                                (Some(value), Some(scale)) if value > 0.0 => format!("h{}", scale.colour(value)),
                                _ => value.class().into(),
                            };
                            path class=(class) d=(cell(value, MARGIN + at * width, top + number * ROW, width - 1, ROW - 1)) {
                                title { (name(&row.name)) ", " (before) " to " (after) ": " (value.words()) }
                            }
                        }
                    }
                }
            }
        }
        ul.legend {
            @if let Some(scale) = &scale {
                li { "from" }
                @for colour in 0..COLOURS {
                    li { (swatch(&Update::Same, &format!("h{colour}"))) (share(scale.from(colour))) @if colour + 1 == COLOURS { " to " (share(scale.most)) } }
                }
            }
            @for (like, words) in LEGEND {
                @if rows.iter().flat_map(|row| &row.updates).any(|update| update.class() == like.class()) {
                    li { (swatch(&like, like.class())) (words) }
                }
            }
        }
    }
}

/// The cells without a colour of the scale.
const LEGEND: [(Update, &str); 4] = [
    (Update::NotFinite([1, 1]), "NaN or infinity before or after"),
    (Update::FromZero, "changed from zero"),
    (Update::Same, "no change"),
    (Update::Missing, "not in both"),
];

impl Update {
    fn share(&self) -> Option<f64> {
        if let Update::Share(value) = self { Some(*value) } else { None }
    }

    /// The class of a cell that has no colour of the scale.
    fn class(&self) -> &'static str {
        match self {
            Update::Missing => "none",
            Update::NotFinite(_) => "nan",
            Update::FromZero => "zero",
            // Of a share of 0 only the signs of zeros changed.
            Update::Same | Update::Share(0.0) => "same",
            Update::Share(_) => "",
        }
    }

    fn words(&self) -> String {
        match self {
            Update::Missing => "not in both".into(),
            Update::NotFinite([before, after]) => format!("not finite: {before} before, {after} after"),
            Update::FromZero => "changed from zero".into(),
            Update::Same => "same".into(),
            Update::Share(value) => share(*value),
        }
    }
}

/// A box. A cross or a line in it tells some apart without their colours.
fn cell(update: &Update, x: usize, y: usize, width: usize, height: usize) -> String {
    let inside = match update {
        Update::NotFinite(_) => format!("M{x} {y}l{width} {height}m0-{height}l-{width} {height}"),
        Update::FromZero => format!("M{x} {}l{width}-{height}", y + height),
        _ => String::new(),
    };
    format!("M{x} {y}h{width}v{height}h-{width}z{inside}")
}

fn swatch(update: &Update, class: &str) -> Markup {
    html! { svg.swatch viewBox="0 0 15 15" aria-hidden="true" { path class=(class) d=(cell(update, 0, 0, 15, 15)) {} } }
}

/// Bytes that all names begin with and end with. Something of each name is left.
fn ends(rows: &[Row]) -> (usize, usize) {
    let (before, behind) = (common(rows, false), common(rows, true));
    let least = rows.iter().map(|row| row.name.len()).min().unwrap_or(0);
    (before, if before + behind < least { behind } else { 0 })
}

/// Bytes that all names begin with, or end with, up to a slash or a dot. A short name then fits beside the cells on a phone.
fn common(rows: &[Row], is_end: bool) -> usize {
    let bytes =
        |row: &Row| -> Vec<u8> { if is_end { row.name.bytes().rev().collect() } else { row.name.bytes().collect() } };
    let [first, rest @ ..] = rows else { return 0 };
    let first = bytes(first);
    let shared = |other: &Row| first.iter().zip(bytes(other)).take_while(|(a, b)| **a == *b).count();
    // Of one name its last part stays.
    let len = rest.iter().map(shared).min().unwrap_or(0);
    first[..len].iter().rposition(|byte| b"/.".contains(byte)).map_or(0, |at| at + 1)
}

/// A name without its middle, if it is long.
fn shortened(name: &str) -> String {
    let letters: Vec<char> = name.chars().collect();
    if letters.len() <= LETTERS {
        return name.into();
    }
    let half = LETTERS / 2;
    let ends = [&letters[..half - 1], &['…'], &letters[letters.len() - half..]];
    ends.concat().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, updates: &[Update]) -> Row {
        Row { name: name.into(), bytes: 4, updates: updates.to_vec() }
    }

    #[test]
    fn colours_follow_the_logarithm() {
        use Update::{FromZero, Missing, NotFinite, Same, Share};
        let others = [Missing, NotFinite([0, 1]), FromZero, Same, Share(0.0)];
        let some = [Share(1e-3), Share(1e-2), Share(1e-1)];
        let scale = Scale::of(&[row("a", &others), row("b", &some)]).unwrap();
        assert_eq!([1e-3, 1e-2, 1e-1].map(|value| scale.colour(value)), [0, 3, 6]);
        assert!((scale.from(7) - 0.1).abs() < 1e-12);
        let one = Scale::of(&[row("a", &[Share(0.5)])]).unwrap();
        assert_eq!(one.colour(0.5), COLOURS - 1);
        assert!(Scale::of(&[row("a", &others)]).is_none());
    }

    #[test]
    fn names_lose_a_beginning_that_all_have() {
        let rows = [row("model/é0.w", &[]), row("model/è1.w", &[])];
        assert_eq!(ends(&rows), (6, 2));
        assert_eq!(ends(&rows[..1]), (0, 0));
        let rows = [row("a.a", &[]), row("a.b.a", &[])];
        assert_eq!(ends(&rows), (2, 0));
        assert_eq!(shortened(&"é".repeat(50)).chars().count(), LETTERS);
    }
}
