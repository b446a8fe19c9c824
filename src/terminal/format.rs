//! Sizes and progress for people.

use std::ffi::OsStr;
use std::io::IsTerminal;
use std::time::{Duration, UNIX_EPOCH};

use crate::clock::{local, wall_ns};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A size with a binary unit and three digits: `12.4 MiB`.
pub fn size(bytes: u64) -> String {
    scaled(bytes, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"])
}

/// A number with three digits, in the largest unit that it reaches. Each unit is so many times the one before.
fn scaled(number: u64, step: f64, units: &[&str]) -> String {
    let (mut value, mut unit) = (number as f64, 0);
    while value >= 999.5 && unit + 1 < units.len() {
        (value, unit) = (value / step, unit + 1);
    }
    let digits = if unit == 0 || value >= 99.95 { 0 } else { 1 + usize::from(value < 9.995) };
    format!("{value:.digits$} {}", units[unit])
}

/// Parses a size: `512M`, `2G`, `1.5GiB`, `1000000`.
pub fn parse_size(text: &str) -> Result<u64, String> {
    const WRITE: &str = "write a size such as 512M or 2G";
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let Ok(number) = digits.parse::<f64>() else { return Err(WRITE.into()) };
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1u64 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        "t" | "tb" | "tib" => 1 << 40,
        unit => return Err(format!("{unit} is not a unit; write K, M, G or T")),
    };
    let bytes = number * unit as f64;
    if (0.0..u64::MAX as f64).contains(&bytes) { Ok(bytes as u64) } else { Err(WRITE.into()) }
}

/// A rate with a decimal unit and three digits, as disks are sold: `1.52 GB/s`.
pub fn rate(bytes_per_second: u64) -> String {
    scaled(bytes_per_second, 1000.0, &["B/s", "kB/s", "MB/s", "GB/s", "TB/s"])
}

/// A span of time, in its largest unit: `40 ms`, `0.4 s`, `12 s`, `3 min`, `2 h`, `5 days`.
pub fn span(time: Duration) -> String {
    match time.as_secs() {
        0 if time < Duration::from_millis(100) && !time.is_zero() => format!("{} ms", time.as_millis()),
        seconds if seconds < 10 && time.subsec_nanos() > 0 => format!("{:.1} s", time.as_secs_f64()),
        seconds if seconds < 120 => format!("{seconds} s"),
        seconds if seconds < 7200 => format!("{} min", seconds / 60),
        seconds if seconds < 172_800 => format!("{} h", seconds / 3600),
        seconds => format!("{} days", seconds / 86_400),
    }
}

/// The end of a text that is longer than so many characters.
pub fn tail(text: &str, most: usize) -> String {
    match text.chars().count() {
        count if count <= most => text.into(),
        count => std::iter::once('…').chain(text.chars().skip(count + 1 - most)).collect(),
    }
}

/// A time for people, in seconds since 1970: the minute, or the year if that is another one than now.
pub fn time(seconds: i64) -> String {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let tm = local(seconds);
    let month = usize::try_from(tm.tm_mon).ok().and_then(|month| MONTHS.get(month)).unwrap_or(&"?");
    let day = format!("{month} {:2}", tm.tm_mday);
    match tm.tm_year == local(wall_ns() / 1_000_000_000).tm_year {
        true => format!("{day} {:02}:{:02}", tm.tm_hour, tm.tm_min),
        false => format!("{day}  {}", 1900 + tm.tm_year),
    }
}

/// A time in seconds since 1970 by RFC 3339, as logs and pages have it.
pub fn utc(seconds: u64) -> String {
    // humantime has no year of five digits.
    const LAST: u64 = 253_402_300_799;
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds.min(LAST))).to_string()
}

/// A number of things: `1 file`, `2 files`.
pub fn count(number: usize, of: &str) -> String {
    format!("{number} {of}{}", if number == 1 { "" } else { "s" })
}

/// A share in percent, with suitable digits.
pub fn percent(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".into(),
        _ => format!("{:.1}%", 100.0 * part as f64 / whole as f64),
    }
}

/// A name for a terminal, of a file or of anything. Control characters, which may be in any of them, are escaped.
pub fn name(name: impl AsRef<OsStr>) -> String {
    escaped(&name.as_ref().to_string_lossy(), char::is_control)
}

/// An error with its causes. The library's errors already name their cause, perhaps in the middle: it is said once.
pub fn causes(error: &anyhow::Error) -> String {
    let mut out = String::new();
    for cause in error.chain().map(ToString::to_string) {
        match out.is_empty() {
            true => out = cause,
            false if out.contains(cause.trim()) => {}
            false => out = format!("{out}: {cause}"),
        }
    }
    out
}

/// Text that may have several lines, with names in it.
pub fn lines(text: &str) -> String {
    escaped(text, |c| c.is_control() && c != '\n')
}

fn escaped(text: &str, which: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match which(c) {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    out
}

/// A bar that counts bytes, or steps if `bytes` is false. It appears only on a terminal, and only after a second.
pub fn progress(total: u64, bytes: bool) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
    let template = match bytes {
        true => "{msg:20!} {bar:30} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}",
        false => "{msg:20!} {bar:30} {pos}/{len} {eta}",
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    if std::io::stderr().is_terminal() {
        let late = bar.downgrade();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_secs(1));
            if let Some(bar) = late.upgrade() {
                bar.set_draw_target(ProgressDrawTarget::stderr());
            }
        });
    }
    bar
}

/// A table: columns as wide as their widest cell. A `>` before the head of a column aligns it as numbers are.
pub fn table(head: &[impl AsRef<str>], rows: &[Vec<String>]) -> String {
    let right: Vec<bool> = head.iter().map(|name| name.as_ref().starts_with('>')).collect();
    let head: Vec<String> = head.iter().map(|name| name.as_ref().trim_start_matches('>').into()).collect();
    let rows = || std::iter::once(&head).chain(rows);
    let width = |column: usize| rows().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..right.len()).map(width).collect();
    let mut out = String::new();
    for row in rows() {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let pad = " ".repeat(widths[column].saturating_sub(cell.chars().count()));
            match right[column] {
                true => line.extend([pad.as_str(), cell.as_str()]),
                false => line.extend([cell.as_str(), pad.as_str()]),
            }
            line.push_str("  ");
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_steer_a_terminal() {
        assert_eq!(name("step\u{1b}[2J\n.pt é"), "step\\u{1b}[2J\\n.pt é");
    }

    #[test]
    fn a_cause_is_said_once() {
        let device = || std::io::Error::from_raw_os_error(20);
        let library = crate::store::Error::Io { path: "store/tree".into(), source: device() };
        let error = anyhow::Error::new(library).context("step-1.pt");
        assert_eq!(causes(&error), "step-1.pt: store/tree: Not a directory (os error 20)");
        let refused = crate::fs::MountError::Device(device());
        assert_eq!(causes(&refused.into()).matches("Not a directory").count(), 1);
        assert_eq!(causes(&anyhow::Error::new(device()).context("a")), "a: Not a directory (os error 20)");
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [("0", 0), ("512M", 512 << 20), ("1.5GiB", 3 << 29), ("2kb", 2048), ("7", 7)] {
            assert_eq!(parse_size(text), Ok(bytes));
        }
        for text in ["", "M", "-1", "1x", "nan", "inf", "1e30G", "1 G"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn rates_and_spans_are_short() {
        for (rate, text) in [(0, "0 B/s"), (999, "999 B/s"), (1_000, "1.00 kB/s"), (150_000_000, "150 MB/s")] {
            assert_eq!(super::rate(rate), text);
        }
        assert_eq!((rate(1_520_000_000), rate(99_940_000)), ("1.52 GB/s".into(), "99.9 MB/s".into()));
        let shown = [0, 40, 349, 5000, 12_345, 119_000, 7_199_000, 172_799_000, 432_000_000];
        let shown = shown.map(|milliseconds| span(Duration::from_millis(milliseconds)));
        assert_eq!(shown, ["0 s", "40 ms", "0.3 s", "5 s", "12 s", "119 s", "119 min", "47 h", "5 days"]);
        assert_eq!((tail("run/step_1.pt", 9), tail("é.pt", 4)), ("…tep_1.pt".into(), "é.pt".into()));
    }

    #[test]
    fn sizes_have_three_digits() {
        for (bytes, text) in
            [(0, "0 B"), (999, "999 B"), (1023, "1.00 KiB"), (12 << 20, "12.0 MiB"), (u64::MAX, "16384 PiB")]
        {
            assert_eq!(size(bytes), text);
        }
    }
}
