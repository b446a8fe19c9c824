//! A comparison as a picture: on the left each codec's size, on the right size against error.

use std::path::Path;
use std::str::FromStr;

use plotters::backend::{BitMapBackend, DrawingBackend, SVGBackend};
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, DrawingAreaErrorKind, IntoDrawingArea};
use plotters::element::{Circle, PathElement, Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{BLACK, Color, FontStyle, IntoFont, RGBColor, WHITE, register_font};

use super::{Codec, Kept, Report};
use crate::container::Role;
use crate::store::Profile;

/// Formats of pictures, by the ending of the file's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Picture {
    /// Vectors.
    Svg,
    /// Pixels.
    Png,
}

impl Picture {
    /// The format that a file of this name has.
    pub fn of(path: &Path) -> Option<Picture> {
        let ending = path.extension()?.to_str()?.to_ascii_lowercase();
        match ending.as_str() {
            "svg" => Some(Picture::Svg),
            "png" => Some(Picture::Png),
            _ => None,
        }
    }
}

const WIDTH: i32 = 1360;
/// Pixels for each codec, and the least for all, so that the right half does not become flat.
const ROW: i32 = 20;
const LEAST_ROWS: i32 = 420;
const TOP: i32 = 70;
const BOTTOM: i32 = 60;
/// Where bars begin and end, and the right half.
const BARS: (i32, i32) = (250, 660);
const POINTS: (i32, i32) = (780, 1310);
/// The font's name here. Every reader of an SVG has a font of this name, too.
const FONT: &str = "sans-serif";
const GREY: RGBColor = RGBColor(120, 120, 120);
const LIGHT: RGBColor = RGBColor(222, 222, 222);

/// Writes the picture; the file appears when it is whole.
pub fn plot(report: &Report, path: &Path, picture: Picture) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    register_font(FONT, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT)
        .map_err(|_| "the font cannot be read")?;
    let rows = (ROW * report.codecs.len() as i32).max(LEAST_ROWS);
    let size = (WIDTH as u32, (TOP + rows + BOTTOM) as u32);
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let ending = if picture == Picture::Svg { ".svg" } else { ".png" };
    let part = tempfile::Builder::new().prefix(".stepfs-plot-").suffix(ending).tempfile_in(directory)?;
    match picture {
        Picture::Svg => draw(report, rows, &SVGBackend::new(part.path(), size).into_drawing_area())?,
        Picture::Png => draw(report, rows, &BitMapBackend::new(part.path(), size).into_drawing_area())?,
    }
    // With the mode of a program's usual files: a temporary file is its owner's alone.
    use std::os::unix::fs::PermissionsExt;
    part.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))?;
    part.persist(path)?;
    Ok(())
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

/// A codec's color: stepfs's own, published, or a user's first ideas.
fn color(kept: &Kept) -> RGBColor {
    match Codec::from_str(&kept.name) {
        Ok(Codec::Profile(Profile::Published(_))) => RGBColor(214, 117, 24),
        Ok(Codec::Profile(_)) => RGBColor(28, 96, 178),
        _ => RGBColor(96, 96, 96),
    }
}

/// In percent of the files as they were written.
fn percent(bytes: u64, raw: u64) -> f64 {
    100.0 * bytes as f64 / raw.max(1) as f64
}

type Drawn<DB> = Result<(), DrawingAreaErrorKind<<DB as DrawingBackend>::ErrorType>>;

/// Text at a pixel.
struct Words {
    at: (i32, i32),
    size: i32,
    color: RGBColor,
    anchor: (HPos, VPos),
}

impl Words {
    fn draw<DB: DrawingBackend>(self, area: &DrawingArea<DB, Shift>, words: &str) -> Drawn<DB> {
        let style = (FONT, self.size).into_font().color(&self.color).pos(Pos::new(self.anchor.0, self.anchor.1));
        area.draw(&Text::new(words.to_string(), self.at, style))
    }
}

fn draw<DB: DrawingBackend>(report: &Report, rows: i32, area: &DrawingArea<DB, Shift>) -> Drawn<DB> {
    area.fill(&WHITE)?;
    let mut codecs: Vec<&Kept> = report.codecs.iter().collect();
    codecs.sort_by_key(|kept| kept.total);
    let title = |x, words: &str| {
        let anchor = (HPos::Left, VPos::Center);
        Words { at: (x, 24), size: 17, color: BLACK, anchor }.draw(area, words)
    };
    let files = report.files.len();
    title(20, &format!("Bytes of each of {files} checkpoints (points) and of all (bars), % of the written bytes"))?;
    title(POINTS.0 - 60, "Size against error of the weights")?;
    for (x, words, color) in [
        (20, "stepfs", RGBColor(28, 96, 178)),
        (90, "published systems", RGBColor(214, 117, 24)),
        (225, "tried first", RGBColor(96, 96, 96)),
    ] {
        Words { at: (x, 48), size: 14, color, anchor: (HPos::Left, VPos::Center) }.draw(area, words)?;
    }
    bars(&codecs, rows, area)?;
    points(&codecs, rows, area)?;
    area.present()
}

/// A line for each codec, the smallest first.
fn bars<DB: DrawingBackend>(codecs: &[&Kept], rows: i32, area: &DrawingArea<DB, Shift>) -> Drawn<DB> {
    let of_files =
        |kept: &Kept| -> Vec<f64> { kept.bytes.iter().zip(&kept.raw).map(|(b, r)| percent(*b, *r)).collect() };
    let axis = Axis::over(codecs.iter().flat_map(|kept| of_files(kept)).chain([100.0]), BARS);
    for tick in axis.ticks() {
        let x = axis.at(tick);
        area.draw(&PathElement::new([(x, TOP - 6), (x, TOP + rows)], LIGHT))?;
        let anchor = (HPos::Center, VPos::Top);
        Words { at: (x, TOP + rows + 6), size: 13, color: GREY, anchor }.draw(area, &format!("{tick}%"))?;
    }
    for (number, kept) in codecs.iter().enumerate() {
        let middle = TOP + ROW * number as i32 + ROW / 2;
        let share = percent(kept.total, kept.raw_total());
        let color = color(kept);
        let name = format!("{}  {}", kept.name, number + 1);
        let anchor = (HPos::Right, VPos::Center);
        Words { at: (BARS.0 - 10, middle), size: 13, color: BLACK, anchor }.draw(area, &name)?;
        let bar = [(BARS.0, middle - ROW / 2 + 3), (axis.at(share), middle + ROW / 2 - 3)];
        area.draw(&Rectangle::new(bar, color.mix(0.55).filled()))?;
        for value in of_files(kept) {
            area.draw(&Circle::new((axis.at(value), middle), 2, color.filled()))?;
        }
        let digits = if share < 9.95 { 2 } else { 1 };
        let anchor = (HPos::Left, VPos::Center);
        let at = (BARS.1 + 12, middle);
        Words { at, size: 13, color: BLACK, anchor }.draw(area, &format!("{share:.digits$}%"))?;
    }
    Ok(())
}

/// Bits for each weight, where the codec knows which bytes are theirs.
fn bits(kept: &Kept) -> Option<f64> {
    kept.roles.get(Role::Weight.name())?.bits_per_parameter
}

/// A point for each codec, with its number on the left side. Most systems leave optimizer state as it is, which would
/// be the larger part of whole files. So only weights are compared, and codecs without a record of them are left out.
fn points<DB: DrawingBackend>(codecs: &[&Kept], rows: i32, area: &DrawingArea<DB, Shift>) -> Drawn<DB> {
    // Below the last line there is room for codecs without error.
    let exact = TOP + rows - 8;
    let across = Axis::over(codecs.iter().filter_map(|kept| bits(kept)), POINTS);
    let up = Axis::over(codecs.iter().map(|kept| kept.error.of_update.rms), (TOP + rows - 40, TOP));
    for tick in across.ticks() {
        let x = across.at(tick);
        area.draw(&PathElement::new([(x, TOP), (x, TOP + rows)], LIGHT))?;
        let anchor = (HPos::Center, VPos::Top);
        Words { at: (x, TOP + rows + 6), size: 13, color: GREY, anchor }.draw(area, &format!("{tick}"))?;
    }
    let left = |y, words: &str| {
        let anchor = (HPos::Right, VPos::Center);
        Words { at: (POINTS.0 - 8, y), size: 13, color: GREY, anchor }.draw(area, words)
    };
    for tick in up.ticks() {
        area.draw(&PathElement::new([(POINTS.0, up.at(tick)), (POINTS.1, up.at(tick))], LIGHT))?;
        left(up.at(tick), &format!("{tick}"))?;
    }
    area.draw(&PathElement::new([(POINTS.0, exact), (POINTS.1, exact)], LIGHT))?;
    left(exact, "lossless")?;
    let middle = ((POINTS.0 + POINTS.1) / 2, TOP + rows + 28);
    let words = "across: bits for each weight; up: rms error, in rms of the update between two checkpoints";
    Words { at: middle, size: 13, color: BLACK, anchor: (HPos::Center, VPos::Top) }.draw(area, words)?;
    let place = |kept: &Kept| {
        let error = kept.error.of_update.rms;
        Some((across.at(bits(kept)?), if error > 0.0 { up.at(error) } else { exact }))
    };
    let places: Vec<Option<(i32, i32)>> = codecs.iter().map(|kept| place(kept)).collect();
    let mut taken: Vec<(i32, i32)> = places.iter().flatten().copied().collect();
    for (number, kept) in codecs.iter().enumerate() {
        let Some((x, y)) = places[number] else { continue };
        area.draw(&Circle::new((x, y), 4, color(kept).filled()))?;
        // Beside its point, where nothing else is.
        let around = [(13, 0), (-13, 0), (0, -13), (0, 13), (13, -12), (-13, -12), (13, 12), (-13, 12)];
        let near = |(a, b): (i32, i32)| taken.iter().any(|(c, d)| (a - c).abs() < 13 && (b - d).abs() < 11);
        let at = around.into_iter().map(|(dx, dy)| (x + dx, y + dy)).find(|at| !near(*at)).unwrap_or((x + 13, y));
        taken.push(at);
        let anchor = (HPos::Center, VPos::Center);
        Words { at, size: 12, color: color(kept), anchor }.draw(area, &(number + 1).to_string())?;
    }
    Ok(())
}
