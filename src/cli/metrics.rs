//! `stepfs metrics`

use std::fmt::Write;

use anyhow::Result;

use crate::archive::Status;

use super::status::all;
use super::view::Mount;

/// Print the numbers of `status` for Prometheus, for all mounts that you may ask.
///
/// The node exporter of Prometheus takes them from a file. It must not find half a file, so rename a whole one.
#[derive(clap::Args)]
#[command(after_help = "Example: each minute, by cron\n  \
cd /var/lib/prometheus/node-exporter && stepfs metrics > stepfs.new && mv stepfs.new stepfs.prom")]
pub(super) struct Args {}

/// A number of a store: its name behind `stepfs_`, its meaning, and its value, if a store has it. Prometheus computes with doubles.
type Gauge = (&'static str, &'static str, fn(&Status) -> Option<f64>);

const GAUGES: &[Gauge] = &[
    ("up", "1 if the daemon of the mount answers.", |status| Some(u8::from(status.daemon.is_some()).into())),
    ("problems", "Problems that `stepfs status` shows.", |status| Some(status.problems.len() as f64)),
    ("files", "Regular files.", |status| known(status, status.files)),
    ("released_files", "Files that are differences in the store.", |status| known(status, status.released)),
    ("failed_files", "Files that could not be archived; more than 32 count as 32.", |status| {
        known(status, status.failed.len() as u64)
    }),
    ("logical_bytes", "Bytes that programs see.", |status| known(status, status.logical_bytes)),
    ("stored_bytes", "Bytes that the store takes, without its cache.", |status| known(status, status.stored_bytes)),
    ("resident_bytes", "Bytes of files that are as written.", |status| known(status, status.resident_bytes)),
    ("object_bytes", "Bytes of objects.", |status| known(status, status.object_bytes)),
    ("unnamed_bytes", "Bytes of objects for removed states.", |status| known(status, status.unnamed_bytes)),
    ("trash_files", "Removed files in the trash.", |status| known(status, status.trash_files)),
    ("trash_bytes", "Bytes that programs see of the removed files in the trash.", |status| {
        known(status, status.trash_bytes)
    }),
    ("cache_bytes", "Bytes of decoded files in the cache.", |status| known(status, status.cache_bytes)),
    ("free_bytes", "Bytes that are free on the disk of the store.", |status| {
        // 0 also stands for a disk that cannot be asked.
        let is_full = status.problems.iter().any(|problem| problem.kind == "full");
        known(status, status.free_bytes).filter(|&free| free > 0.0 || is_full)
    }),
    ("queued_steps", "Steps of archiving that wait.", |status| known(status, status.queued)),
    ("backlog_seconds", "How long the oldest of these steps has waited.", |status| {
        known(status, status.backlog_seconds.unwrap_or(0))
    }),
    ("settling_files", "Files that wait for the rest of their checkpoint.", |status| known(status, status.settling)),
    ("busy_files", "Files that wait for a handle to be closed.", |status| known(status, status.busy)),
    ("room_checkpoints", "Checkpoints for which there is room; absent if the store does not grow.", |status| {
        Some(status.room.as_ref()?.checkpoints? as f64)
    }),
    ("growth_bytes_per_day", "Bytes by which the store grows in a day, while a run goes on.", |status| {
        Some(status.room.as_ref()?.bytes_per_day? as f64)
    }),
    ("last_save_bytes", "Bytes of the last checkpoint that was saved.", |status| {
        Some(status.saves.first()?.bytes as f64)
    }),
    ("last_save_seconds", "From its first open for writing to its last close.", |status| {
        Some(status.saves.first()?.milliseconds as f64 / 1000.0)
    }),
    ("last_save_timestamp_seconds", "When it was closed, in seconds since 1970.", |status| {
        Some(status.saves.first()?.closed as f64)
    }),
    ("mirror_missing_files", "Files that the mirror lacks.", |status| Some(status.mirror.as_ref()?.files as f64)),
    ("mirror_missing_bytes", "Bytes that the mirror lacks.", |status| Some(status.mirror.as_ref()?.bytes as f64)),
    ("mirror_lag_seconds", "How long the oldest file has waited for the mirror.", |status| {
        Some(status.mirror.as_ref()?.lag_seconds.unwrap_or(0) as f64)
    }),
];

/// A daemon that does not answer has no numbers.
fn known(status: &Status, number: u64) -> Option<f64> {
    status.daemon.map(|_| number as f64)
}

pub(super) fn run(_: Args) -> Result<()> {
    say_part!("{}", text(&all()));
    Ok(())
}

/// The numbers in the text format of Prometheus, version 0.0.4.
fn text(mounts: &[Mount]) -> String {
    let mut text = String::new();
    for (name, help, of) in GAUGES {
        let numbers: Vec<_> = mounts.iter().filter_map(|mount| Some((mount, of(&mount.status)?))).collect();
        if !numbers.is_empty() {
            let _ = writeln!(text, "# HELP stepfs_{name} {help}\n# TYPE stepfs_{name} gauge");
        }
        for (mount, number) in numbers {
            let (point, store) = (mount.mount.to_string_lossy(), mount.store.to_string_lossy());
            let (point, store) = (escaped(&point), escaped(&store));
            let _ = writeln!(text, "stepfs_{name}{{mount=\"{point}\",store=\"{store}\"}} {number}");
        }
    }
    text
}

/// The value of a label.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}
