//! `stepfs ls`

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};

use super::format::{name, percent, size, table};
use super::listing::survey;
use super::mirror::At;
use super::say_json;
use super::source::Source;

/// List files and their size in the store, or on a mirror.
///
/// States: staged (being written), sealed (closed, durable, exact as written), archived (its object is durable, but a
/// handle is still open), released (kept as an object and decoded on read). Pinned files never change state.
///
/// Kinds: a keyframe depends on no other object. A delta is the difference to the state before. Every eighth state is a
/// super-step: the difference to the super-step before, so a read applies at most 12 objects (chain). With --json,
/// `note` gives the predicted size of a super-step and of a keyframe in its place.
///
/// An error is the largest of a weight, in updates: 1 is as far as training moved that weight's tensor, in root mean
/// square, to the next newer checkpoint.
///
/// LOSSY before an error: the name, a profile or the checkpoint's own files ask for more than the file holds. It is a
/// copy of a released file, or was released before that request. With --json, `lossy` gives the error of each kind of
/// tensor, and `original` is the SHA-256 of the file as written.
#[derive(clap::Args)]
pub(super) struct Args {
    /// A store, a mount, a path in a mount, or the URL of a mirror.
    path: PathBuf,
    /// Of a mirror: as it was then. An age such as 3h or 2d, or @ and seconds since 1970.
    #[arg(long, value_name = "TIME")]
    at: Option<At>,
    /// Print a JSON array, one object per file.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> Result<ExitCode> {
    let entries = match Source::of(&args.path)? {
        Source::Mirror(mirror) => return mirror.at(args.at).list(args.json),
        Source::Local(_) if args.at.is_some() => bail!("--at belongs to the URL of a mirror"),
        Source::Local(local) => survey(&local)?,
    };
    if args.json {
        say_json(&entries)?;
        return Ok(ExitCode::SUCCESS);
    }
    let head = ["state", "size", "stored", "", "weights", "kind", "chain", "error", "path"];
    let mut rows = vec![head.map(String::from).to_vec()];
    let (mut logical, mut stored) = (0, 0);
    for entry in &entries {
        logical += entry.logical_bytes;
        stored += entry.stored_bytes;
        let weights = entry.roles.get("weight").map(|weight| percent(weight.stored_bytes, weight.raw_bytes));
        let error = match &entry.damage {
            Some(_) => "DAMAGED".into(),
            None if entry.lossy == "0" => "exact".into(),
            None if entry.chain_len == 0 => "as read".into(),
            None => entry.error_updates.map_or_else(|| "lossy".into(), in_updates),
        };
        let error = if entry.is_less_than_asked { format!("LOSSY {error}") } else { error };
        rows.push(vec![
            format!("{}{}", entry.state, if entry.pinned { ", pinned" } else { "" }),
            size(entry.logical_bytes),
            size(entry.stored_bytes),
            percent(entry.stored_bytes, entry.logical_bytes),
            weights.unwrap_or_default(),
            entry.kind.unwrap_or_default().to_string(),
            if entry.chain_len == 0 { String::new() } else { entry.chain_len.to_string() },
            error,
            name(&entry.path),
        ]);
    }
    let total = [
        &format!("{} file{}", entries.len(), if entries.len() == 1 { "" } else { "s" }),
        &size(logical),
        &size(stored),
        &percent(stored, logical),
    ];
    rows.push(total.map(String::clone).to_vec());
    say_part!("{}", table(&rows, &[false, true, true, true, true, false, true, true, false]));
    Ok(ExitCode::SUCCESS)
}

/// An error with one digit, never too small.
fn in_updates(error: f64) -> String {
    let tenths = (error * 10.0).ceil();
    format!("{:.1} update{}", tenths / 10.0, if tenths > 10.0 { "s" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_shown_in_updates() {
        let shown = [0.001, 0.51, 1.0, 2.41].map(in_updates);
        assert_eq!(shown, ["0.1 update", "0.6 update", "1.0 update", "2.5 updates"]);
    }
}
