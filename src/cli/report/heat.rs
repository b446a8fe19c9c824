//! The heat map: a row for each weight, a column for each update, and a colour for its relative size.

use maud::{Markup, html};

use crate::terminal::format::name;
use crate::tools::diff::share;
use crate::tools::updates::{Row, Update};

/// Colours of the scale, `h0` to `h6` in `style.css`.
const COLOURS: usize = 7;

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

/// The map with its legend. `columns` names the two states of each update. `style.css` gives cells their widths.
pub(super) fn map(rows: &[Row], columns: &[(String, String)]) -> Markup {
    let scale = Scale::of(rows);
    let (before, behind) = ends(rows);
    let labels = html! { tr { th {} @for (_, after) in columns { th scope="col" { (after) } } } };
    let class = |update: &Update| match (update.share(), &scale) {
        (Some(share), Some(scale)) if share > 0.0 => format!("h{}", scale.colour(share)),
        _ => update.cell().0.into(),
    };
    html! {
        div.scroll tabindex="0" role="region" aria-label="Heat map of the updates" {
            table.heat {
                thead { (labels) }
                tbody {
                    @for row in rows {
                        tr {
                            th scope="row" title=(name(&row.name)) { bdi { (name(&row.name[before..row.name.len() - behind])) } }
                            @for (update, (before, after)) in row.updates.iter().zip(columns) {
                                td class=(class(update)) title=(format!("{}, {before} to {after}: {}", name(&row.name), update.cell().1)) {}
                            }
                        }
                    }
                }
                tfoot { (labels) }
            }
        }
        ul.legend {
            @if let Some(scale) = &scale {
                li { "from" }
                @for colour in 0..COLOURS {
                    li { (swatch(&format!("h{colour}"))) (share(scale.from(colour))) @if colour + 1 == COLOURS { " to " (share(scale.most)) } }
                }
            }
            @for (class, words) in LEGEND {
                @if rows.iter().flat_map(|row| &row.updates).any(|update| update.cell().0 == class) {
                    li { (swatch(class)) (words) }
                }
            }
        }
    }
}

fn swatch(class: &str) -> Markup {
    html! { span class=(format!("swatch {class}")) {} }
}

/// The cells without a colour of the scale: their classes. A cross or a line tells some apart without their colours.
const LEGEND: [(&str, &str); 4] = [
    ("nan", "NaN or infinity before or after"),
    ("zero", "changed from zero"),
    ("same", "no change"),
    ("none", "not in both"),
];

impl Update {
    fn share(&self) -> Option<f64> {
        if let Update::Share(value) = self { Some(*value) } else { None }
    }

    /// The words of a cell, and its class where it has no colour of the scale.
    fn cell(&self) -> (&'static str, String) {
        match self {
            Update::Missing => ("none", "not in both".into()),
            Update::NotFinite([before, after]) => ("nan", format!("not finite: {before} before, {after} after")),
            Update::FromZero => ("zero", "changed from zero".into()),
            Update::Same => ("same", "same".into()),
            // Only the signs of zeros changed.
            Update::Share(0.0) => ("same", share(0.0)),
            Update::Share(value) => ("", share(*value)),
        }
    }
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
    }
}
