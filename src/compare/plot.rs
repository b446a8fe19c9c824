//! A comparison as a picture: on the left each codec's size, on the right size against error.
//!
//! The picture is SVG, which is text: every browser shows it, and no library is needed to write it.

use std::fmt::Write;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::str::FromStr;

use super::{Codec, Kept, Report};
use crate::container::Role;
use crate::store::Profile;

const WIDTH: i32 = 1360;
/// Pixels for each codec, and the least for all, so that the right half does not become flat.
const ROW: i32 = 20;
const LEAST_ROWS: i32 = 420;
const TOP: i32 = 70;
const BOTTOM: i32 = 60;
/// Where bars begin and end, and the right half.
const BARS: (i32, i32) = (250, 660);
const POINTS: (i32, i32) = (780, 1310);
/// stepfs's own codecs, published ones, and a user's first ideas.
const OWN: &str = "#1c60b2";
const PUBLISHED: &str = "#d67518";
const TRIED_FIRST: &str = "#606060";
const BLACK: &str = "#000000";
const GREY: &str = "#787878";
const LIGHT: &str = "#dedede";

/// Writes the picture; the file appears when it is whole.
///
/// # Errors
/// It cannot be written.
pub fn plot(report: &Report, path: &Path) -> io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let part = tempfile::Builder::new().prefix(".stepfs-plot-").suffix(".svg").tempfile_in(directory)?;
    std::fs::write(part.path(), draw(report))?;
    // With the mode of a program's usual files: a temporary file is its owner's alone.
    part.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))?;
    part.persist(path)?;
    Ok(())
}

/// The text of a picture, element by element. Places are pixels from the top left.
struct Picture(String);

/// Which part of a text is at its place.
#[derive(Clone, Copy)]
enum Anchor {
    Start,
    Middle,
    End,
}

impl Picture {
    fn line(&mut self, from: (i32, i32), to: (i32, i32)) {
        let ((x1, y1), (x2, y2)) = (from, to);
        self.add(format_args!(r#"<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{LIGHT}"/>"#));
    }

    fn circle(&mut self, (x, y): (i32, i32), radius: i32, color: &str) {
        self.add(format_args!(r#"<circle cx="{x}" cy="{y}" r="{radius}" fill="{color}"/>"#));
    }

    /// Text around the middle of its height. Names of codecs have no letter that XML reserves.
    fn text(&mut self, (x, y): (i32, i32), (size, color): (i32, &str), anchor: Anchor, words: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        self.add(format_args!(
            r#"<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}" dominant-baseline="central">{words}</text>"#
        ));
    }

    fn add(&mut self, element: std::fmt::Arguments) {
        writeln!(self.0, "{element}").expect("a string takes all text");
    }
}

/// A logarithmic axis over whole decades.
struct Axis {
    /// Exponents of ten at both ends.
    decades: (i32, i32),
    pixels: (i32, i32),
}

impl Axis {
    /// An axis with all these values on it. Values without a logarithm do not count.
    fn over(values: impl Iterator<Item = f64>, pixels: (i32, i32)) -> Axis {
        let logs = values.filter(|value| value.is_finite() && *value > 0.0).map(f64::log10);
        let (low, high) = logs.fold((f64::MAX, f64::MIN), |(low, high), log| (low.min(log), high.max(log)));
        let decades = if low > high { (-1, 0) } else { (low.floor() as i32, high.ceil() as i32) };
        Axis { decades: (decades.0, decades.1.max(decades.0 + 1)), pixels }
    }

    /// The pixel of a value; beyond the ends, the end.
    fn at(&self, value: f64) -> i32 {
        let (low, high) = (f64::from(self.decades.0), f64::from(self.decades.1));
        let part = ((value.log10().clamp(low, high) - low) / (high - low)).clamp(0.0, 1.0);
        self.pixels.0 + (part * f64::from(self.pixels.1 - self.pixels.0)).round() as i32
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        (self.decades.0..=self.decades.1).map(|decade| 10f64.powi(decade))
    }
}

fn color(kept: &Kept) -> &'static str {
    match Codec::from_str(&kept.name) {
        Ok(Codec::Profile(Profile::Published(_))) => PUBLISHED,
        Ok(Codec::Profile(_)) => OWN,
        _ => TRIED_FIRST,
    }
}

/// In percent of the files as they were written.
fn percent(bytes: u64, raw: u64) -> f64 {
    100.0 * bytes as f64 / raw.max(1) as f64
}

fn draw(report: &Report) -> String {
    let mut codecs: Vec<&Kept> = report.codecs.iter().collect();
    codecs.sort_by_key(|kept| kept.total);
    let rows = (ROW * codecs.len() as i32).max(LEAST_ROWS);
    let height = TOP + rows + BOTTOM;
    let mut picture = Picture(String::new());
    picture.add(format_args!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif">"#
    ));
    picture.add(format_args!(r##"<rect width="100%" height="100%" fill="#ffffff"/>"##));
    let files = report.files.len();
    let title = format!("Bytes of each of {files} checkpoints (points) and of all (bars), % of the written bytes");
    picture.text((20, 24), (17, BLACK), Anchor::Start, &title);
    picture.text((POINTS.0 - 60, 24), (17, BLACK), Anchor::Start, "Size against error of the weights");
    for (x, words, color) in
        [(20, "stepfs", OWN), (90, "published systems", PUBLISHED), (225, "tried first", TRIED_FIRST)]
    {
        picture.text((x, 48), (14, color), Anchor::Start, words);
    }
    bars(&codecs, rows, &mut picture);
    points(&codecs, rows, &mut picture);
    picture.add(format_args!("</svg>"));
    picture.0
}

/// A line for each codec, the smallest first.
fn bars(codecs: &[&Kept], rows: i32, picture: &mut Picture) {
    let of_files =
        |kept: &Kept| -> Vec<f64> { kept.bytes.iter().zip(&kept.raw).map(|(b, r)| percent(*b, *r)).collect() };
    let axis = Axis::over(codecs.iter().flat_map(|kept| of_files(kept)).chain([100.0]), BARS);
    for tick in axis.ticks() {
        let x = axis.at(tick);
        picture.line((x, TOP - 6), (x, TOP + rows));
        picture.text((x, TOP + rows + 14), (13, GREY), Anchor::Middle, &format!("{tick}%"));
    }
    for (number, kept) in codecs.iter().enumerate() {
        let middle = TOP + ROW * number as i32 + ROW / 2;
        let (share, color) = (percent(kept.total, kept.raw_total()), color(kept));
        let name = format!("{}  {}", kept.name, number + 1);
        picture.text((BARS.0 - 10, middle), (13, BLACK), Anchor::End, &name);
        let (x, y, width, height) = (BARS.0, middle - ROW / 2 + 3, axis.at(share) - BARS.0, ROW - 6);
        picture.add(format_args!(
            r#"<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{color}" fill-opacity=".55"/>"#
        ));
        for value in of_files(kept) {
            picture.circle((axis.at(value), middle), 2, color);
        }
        let digits = if share < 9.95 { 2 } else { 1 };
        picture.text((BARS.1 + 12, middle), (13, BLACK), Anchor::Start, &format!("{share:.digits$}%"));
    }
}

/// Bits for each weight, where the codec knows which bytes are theirs.
fn bits(kept: &Kept) -> Option<f64> {
    kept.roles.get(Role::Weight.name())?.bits_per_parameter
}

/// A point for each codec, with its number on the left side. Most systems leave optimizer state as it is, which would
/// be the larger part of whole files. So only weights are compared, and codecs without a record of them are left out.
fn points(codecs: &[&Kept], rows: i32, picture: &mut Picture) {
    // Below the last line there is room for codecs without error.
    let exact = TOP + rows - 8;
    let across = Axis::over(codecs.iter().filter_map(|kept| bits(kept)), POINTS);
    let up = Axis::over(codecs.iter().map(|kept| kept.error.of_update.rms), (TOP + rows - 40, TOP));
    for tick in across.ticks() {
        let x = across.at(tick);
        picture.line((x, TOP), (x, TOP + rows));
        picture.text((x, TOP + rows + 14), (13, GREY), Anchor::Middle, &format!("{tick}"));
    }
    let heights = up.ticks().map(|tick| (up.at(tick), format!("{tick}")));
    for (y, words) in heights.chain([(exact, "lossless".to_string())]) {
        picture.line((POINTS.0, y), (POINTS.1, y));
        picture.text((POINTS.0 - 8, y), (13, GREY), Anchor::End, &words);
    }
    let middle = ((POINTS.0 + POINTS.1) / 2, TOP + rows + 36);
    let words = "across: bits for each weight; up: rms error, in rms of the update between two checkpoints";
    picture.text(middle, (13, BLACK), Anchor::Middle, words);
    let place = |kept: &Kept| {
        let error = kept.error.of_update.rms;
        Some((across.at(bits(kept)?), if error > 0.0 { up.at(error) } else { exact }))
    };
    let places: Vec<Option<(i32, i32)>> = codecs.iter().map(|kept| place(kept)).collect();
    let mut taken: Vec<(i32, i32)> = places.iter().flatten().copied().collect();
    for (number, kept) in codecs.iter().enumerate() {
        let Some((x, y)) = places[number] else { continue };
        picture.circle((x, y), 4, color(kept));
        // Beside its point, where nothing else is.
        let around = [(13, 0), (-13, 0), (0, -13), (0, 13), (13, -12), (-13, -12), (13, 12), (-13, 12)];
        let near = |(a, b): (i32, i32)| taken.iter().any(|(c, d)| (a - c).abs() < 13 && (b - d).abs() < 11);
        let at = around.into_iter().map(|(dx, dy)| (x + dx, y + dy)).find(|at| !near(*at)).unwrap_or((x + 13, y));
        taken.push(at);
        picture.text(at, (12, color(kept)), Anchor::Middle, &(number + 1).to_string());
    }
}
