//! Sizes and progress for people.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A size with a binary unit and three digits: `12.4 MiB`.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match (unit, value) {
        (0, _) => format!("{bytes} B"),
        (_, v) if v < 9.995 => format!("{v:.2} {}", UNITS[unit]),
        (_, v) if v < 99.95 => format!("{v:.1} {}", UNITS[unit]),
        (_, v) => format!("{v:.0} {}", UNITS[unit]),
    }
}

/// Parses a size: `512M`, `2G`, `1.5GiB`, `1000000`.
pub fn parse_size(text: &str) -> Result<u64, String> {
    const WRITE: &str = "write a size such as 512M or 2G";
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    if digits.is_empty() {
        return Err(WRITE.into());
    }
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1u64 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        "t" | "tb" | "tib" => 1 << 40,
        unit => return Err(format!("{unit} is not a unit; write K, M, G or T")),
    };
    let bytes = digits.parse::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0);
    match bytes.map(|number| number * unit as f64) {
        Some(bytes) if bytes < u64::MAX as f64 => Ok(bytes as u64),
        _ => Err(WRITE.into()),
    }
}

/// A time for people, in seconds since 1970: the minute, or the year if that is another one than now.
pub fn time(seconds: i64) -> String {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let local = |seconds: i64| {
        // SAFETY: all fields of `tm` are numbers or a pointer, for which zeros are valid.
        let mut tm: libc::tm = unsafe { std::mem::zeroed() };
        // SAFETY: both pointers are valid for the call.
        unsafe { libc::localtime_r(&seconds, &mut tm) };
        tm
    };
    let tm = local(seconds);
    let month = usize::try_from(tm.tm_mon).ok().and_then(|month| MONTHS.get(month)).unwrap_or(&"?");
    let day = format!("{month} {:2}", tm.tm_mday);
    match tm.tm_year == local(crate::clock::wall_ns() / 1_000_000_000).tm_year {
        true => format!("{day} {:02}:{:02}", tm.tm_hour, tm.tm_min),
        false => format!("{day}  {}", 1900 + tm.tm_year),
    }
}

/// A share in percent, with suitable digits.
pub fn percent(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".into(),
        _ => format!("{:.1}%", 100.0 * part as f64 / whole as f64),
    }
}

/// A name for a terminal. Control characters, which may be in any file or tensor name, are escaped.
pub fn name(name: &str) -> String {
    escaped(name, char::is_control)
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

/// A table: columns as wide as their widest cell. `right` marks the columns of numbers.
pub fn table(rows: &[Vec<String>], right: &[bool]) -> String {
    let width =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..right.len()).map(width).collect();
    let mut out = String::new();
    for row in rows {
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
    fn sizes_have_three_digits() {
        for (bytes, text) in
            [(0, "0 B"), (999, "999 B"), (1023, "1.00 KiB"), (12 << 20, "12.0 MiB"), (u64::MAX, "16384 PiB")]
        {
            assert_eq!(size(bytes), text);
        }
    }
}
