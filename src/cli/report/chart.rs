//! Charts as SVG: axes, lines, marks and lanes. Colours and sizes are those of classes in `style.css`, so that a page can follow
//! dark mode and the width of a screen. docs/DESIGN.md says why no library draws them.

use maud::{Markup, html};

/// The size of a chart in its own units. A screen of 390 pixels shows it at half its size, so `style.css` doubles the text there.
const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 330.0;
/// The edges of the plot. On the left there is room for five large digits, on the right for half as many, below for one line.
const LEFT: f64 = 84.0;
const RIGHT: f64 = WIDTH - 38.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = HEIGHT - 44.0;
/// About as many ticks as fit without a collision of large text.
const TICKS: f64 = 5.0;
/// From one lane to the next: a line of large text and a mark.
const LANE: f64 = 62.0;
/// The largest number of an axis.
const MOST: f64 = 1e300;
/// Above so many points a line shows no marks.
const MARKS: usize = 60;

/// A range of numbers with round ticks.
pub(super) struct Axis {
    low: f64,
    high: f64,
    ticks: Vec<f64>,
    step: f64,
    /// One unit of the labels.
    unit: f64,
    /// The name of that unit, or of the axis.
    pub(super) name: String,
}

/// The numbers of an axis.
#[derive(Clone, Copy)]
pub(super) enum Numbers {
    Any,
    Whole,
    Bytes,
    Seconds,
}

const BYTES: [(f64, &str); 5] =
    [(1.0, "bytes"), (1024.0, "KiB"), (1_048_576.0, "MiB"), (1_073_741_824.0, "GiB"), (1_099_511_627_776.0, "TiB")];
const SECONDS: [(f64, &str); 4] = [(1.0, "seconds"), (60.0, "minutes"), (3600.0, "hours"), (86_400.0, "days")];

impl Axis {
    /// The range of these values. With `whole` it ends at ticks.
    pub(super) fn of(values: impl IntoIterator<Item = f64>, numbers: Numbers, whole: bool) -> Axis {
        // Twice the largest float is none.
        let bounds = |(low, high): (f64, f64), value: f64| {
            (low.min(value.clamp(-MOST, MOST)), high.max(value.clamp(-MOST, MOST)))
        };
        let (mut low, mut high) = values.into_iter().fold((f64::INFINITY, f64::NEG_INFINITY), bounds);
        if low > high {
            (low, high) = (0.0, 1.0);
        }
        let units: &[(f64, &str)] = match numbers {
            Numbers::Bytes => &BYTES,
            Numbers::Seconds => &SECONDS,
            Numbers::Any | Numbers::Whole => &[(1.0, "")],
        };
        // The largest unit that fits in twice.
        let fits = units.iter().rev().find(|(unit, _)| high >= 2.0 * unit);
        let &(unit, name) = fits.unwrap_or(&units[0]);
        if low == high {
            let beside = if matches!(numbers, Numbers::Any) {
                high.abs().max(1e-300) * 0.1
            } else {
                unit.max(high.abs() * 1e-9)
            };
            (low, high) = (low - beside, high + beside);
        }
        let least = if matches!(numbers, Numbers::Whole) { 1.0 } else { 0.0 };
        let step = unit * round((high - low) / unit / TICKS, least);
        let (first, last) = match whole {
            true => ((low / step).floor(), (high / step).ceil()),
            false => ((low / step).ceil(), (high / step).floor()),
        };
        let ticks: Vec<f64> = (0..=(last - first) as u32).map(|at| (first + f64::from(at)) * step).collect();
        if whole {
            (low, high) = (first * step, last * step);
        }
        Axis { low, high, ticks, step, unit, name: name.into() }
    }

    pub(super) fn named(self, name: impl Into<String>) -> Axis {
        Axis { name: name.into(), ..self }
    }

    fn at(&self, value: f64, from: f64, to: f64) -> f64 {
        from + (value - self.low) / (self.high - self.low) * (to - from)
    }

    fn x(&self, value: f64) -> f64 {
        self.at(value, LEFT + 10.0, RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        self.at(value, BOTTOM, TOP)
    }

    /// The label of a tick, in about five characters: as many digits as the step has.
    fn label(&self, tick: f64) -> String {
        let most = self.ticks.iter().fold(0f64, |most, tick| most.max(tick.abs())) / self.unit;
        let (scale, suffix) = match most {
            most if most >= 1e9 => (1e9, "G"),
            most if most >= 1e6 => (1e6, "M"),
            _ => (1.0, ""),
        };
        let (step, value) = (self.step / self.unit / scale, tick / self.unit / scale);
        // A step of .1 is a little less in binary.
        let digits = (-step.log10() - 1e-9).ceil();
        match digits > 4.0 || most >= 1e12 {
            true => format!("{:.1e}", value * scale),
            false => format!("{value:.0$}{suffix}", digits.max(0.0) as usize),
        }
    }
}

/// The least round number that is not below `least` or `step`.
fn round(step: f64, least: f64) -> f64 {
    let power = 10f64.powf(step.max(least).max(f64::MIN_POSITIVE).log10().floor());
    let round = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power);
    round.into_iter().find(|round| *round >= step.max(least) * (1.0 - 1e-9)).unwrap_or(step)
}

/// A coordinate, short enough for thousands of marks.
fn short_number(value: f64) -> String {
    format!("{value:.1}").trim_end_matches(".0").into()
}

/// A chart with a name and a description for those who do not see it.
pub(super) struct Chart<'a> {
    pub(super) id: &'a str,
    pub(super) title: &'a str,
    pub(super) text: String,
    pub(super) x: &'a Axis,
}

impl Chart<'_> {
    fn framed(&self, height: f64, unit: &str, legend: &Markup, inside: &Markup) -> Markup {
        let bottom = height - (HEIGHT - BOTTOM);
        html! {
            figure id=(self.id) {
                figcaption { h2 { (self.title) } p { (self.text) } }
                @if !unit.is_empty() { p.unit { (unit) } }
                svg.chart viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-labelledby=(format!("{0}-t {0}-d", self.id)) {
                    title id=(format!("{}-t", self.id)) { (self.title) }
                    desc id=(format!("{}-d", self.id)) { (self.text) }
                    line.axis x1=(LEFT) x2=(RIGHT) y1=(bottom) y2=(bottom) {}
                    @for tick in &self.x.ticks {
                        @let x = self.x.x(*tick);
                        line.axis x1=(short_number(x)) x2=(short_number(x)) y1=(bottom) y2=(bottom + 6.0) {}
                        text x=(short_number(x)) y=(bottom + 34.0) text-anchor="middle" { (self.x.label(*tick)) }
                    }
                    (inside)
                }
                p.below { (self.x.name) }
                (legend)
            }
        }
    }

    /// Lines over a vertical axis. Each has a name, its points, and a text for each point.
    pub(super) fn lines(&self, y: &Axis, lines: &[Line]) -> Markup {
        let inside = html! {
            @for tick in &y.ticks {
                @let at = short_number(y.y(*tick));
                line.grid x1=(LEFT) x2=(RIGHT) y1=(at) y2=(at) {}
                text x=(LEFT - 10.0) y=(short_number(y.y(*tick) + 5.0)) text-anchor="end" { (y.label(*tick)) }
            }
            @for (number, line) in lines.iter().enumerate() {
                @let points: Vec<(f64, f64)> = line.points.iter().map(|(x, y0, _)| (self.x.x(*x), y.y(*y0))).collect();
                @if line.is_joined {
                    path class=(format!("line l{}", number % 4)) d=(path(&points)) {}
                }
                @if !line.is_joined || points.len() <= MARKS {
                    @for ((x, y), (_, _, text)) in points.iter().zip(&line.points) {
                        (mark(OF_LINES[number % 4], *x, *y, text))
                    }
                }
            }
        };
        let legend = html! {
            @if lines.len() > 1 {
                ul.legend {
                    @for (number, line) in lines.iter().enumerate() {
                        li {
                            svg viewBox="0 0 44 20" aria-hidden="true" {
                                path class=(format!("line l{}", number % 4)) d="M2 10H42" {}
                                (mark(OF_LINES[number % 4], 22.0, 10.0, ""))
                            }
                            (line.name)
                        }
                    }
                }
            }
        };
        self.framed(HEIGHT, &y.name, &legend, &inside)
    }

    /// Marks in named lanes, one below the other.
    pub(super) fn lanes(&self, lanes: &[Lane]) -> Markup {
        let inside = html! {
            @for (number, lane) in lanes.iter().enumerate() {
                @let y = TOP + LANE * number as f64;
                text x=(LEFT - 70.0) y=(y + 8.0) { (lane.name) " (" (lane.points.len()) ")" }
                line.grid x1=(LEFT - 70.0) x2=(RIGHT) y1=(y + 34.0) y2=(y + 34.0) {}
                @for (x, text) in &lane.points { (mark(lane.shape, self.x.x(*x), y + 34.0, text)) }
            }
        };
        self.framed(TOP + LANE * lanes.len() as f64 + HEIGHT - BOTTOM, "", &html! {}, &inside)
    }
}

/// A line of a chart, or single points.
pub(super) struct Line {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64, String)>,
    pub(super) is_joined: bool,
}

/// A row of marks.
pub(super) struct Lane {
    pub(super) name: &'static str,
    /// Its place in [`SHAPES`].
    pub(super) shape: usize,
    pub(super) points: Vec<(f64, String)>,
}

/// Shapes that differ without their colours: a dot, a ring, a star, a square and a cross, with the classes `m0` to `m4`.
const SHAPES: [&str; 5] = [
    "m-7 0a7 7 0 1 0 14 0a7 7 0 1 0-14 0z",
    "m-7 0a7 7 0 1 0 14 0a7 7 0 1 0-14 0z",
    "m0-11l3.2 7 7.3.8-5.4 5 1.5 7.4-6.6-3.8-6.6 3.8 1.5-7.4-5.4-5 7.3-.8z",
    "m-6-6h12v12h-12z",
    "m-7-7l14 14m0-14l-14 14",
];
/// Those of lines, by their numbers.
const OF_LINES: [usize; 4] = [0, 3, 1, 2];

fn mark(shape: usize, x: f64, y: f64, text: &str) -> Markup {
    html! {
        path class=(format!("m{shape}")) d=(format!("M{} {}{}", short_number(x), short_number(y), SHAPES[shape])) {
            @if !text.is_empty() { title { (text) } }
        }
    }
}

fn path(points: &[(f64, f64)]) -> String {
    let mut out = String::new();
    for (number, (x, y)) in points.iter().enumerate() {
        out += if number == 0 { "M" } else { "L" };
        out += &format!("{} {}", short_number(*x), short_number(*y));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(values: &[f64], numbers: Numbers, whole: bool) -> (Vec<String>, String) {
        let axis = Axis::of(values.iter().copied(), numbers, whole);
        (axis.ticks.iter().map(|tick| axis.label(*tick)).collect(), axis.name.clone())
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(labels(&[20.0, 200.0], Numbers::Whole, false).0, ["50", "100", "150", "200"]);
        assert_eq!(labels(&[1.0, 2.0], Numbers::Whole, false).0, ["1", "2"]);
        assert_eq!(labels(&[2.31, 2.62], Numbers::Any, true).0, ["2.3", "2.4", "2.5", "2.6", "2.7"]);
        let mib = f64::from(1 << 20);
        assert_eq!(
            labels(&[0.0, 152.0 * mib], Numbers::Bytes, true),
            (vec!["0".into(), "50".into(), "100".into(), "150".into(), "200".into()], "MiB".into())
        );
        assert_eq!(labels(&[0.0, 7200.0], Numbers::Seconds, false).1, "hours");
        assert_eq!(labels(&[0.0, 4e6], Numbers::Whole, false).0[1], "1M");
        assert_eq!(labels(&[5100.0, 13200.0], Numbers::Whole, false).0, ["6000", "8000", "10000", "12000"]);
    }

    #[test]
    fn no_values_make_an_axis_without_an_end() {
        for values in [&[][..], &[5.0], &[0.0], &[f64::MAX], &[-1e-300, 1e-300]] {
            for numbers in [Numbers::Any, Numbers::Whole, Numbers::Bytes, Numbers::Seconds] {
                for whole in [true, false] {
                    let axis = Axis::of(values.iter().copied(), numbers, whole);
                    assert!(axis.ticks.len() <= 12 && axis.low < axis.high, "{values:?}: {:?}", axis.ticks);
                    let _: Vec<String> = axis.ticks.iter().map(|tick| axis.label(*tick)).collect();
                }
            }
        }
    }
}
