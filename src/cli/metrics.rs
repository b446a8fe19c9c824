//! `stepfs metrics`

use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, anyhow};

use crate::archive::Status;

use super::status::{Mount, all};

/// Print the numbers of `status` for Prometheus, for all mounts that you may ask.
///
/// Without --listen it prints them once, for the textfile collector of Prometheus' node exporter.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
stepfs metrics > /var/lib/prometheus/node-exporter/stepfs.prom    each minute, by cron\n  \
stepfs metrics --listen 127.0.0.1:9464                            for Prometheus, until Ctrl-C")]
pub(super) struct Args {
    /// Answer GET /metrics at this address instead, with the numbers of that moment. With port 0 it takes a free one.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<String>,
}

/// A client that sends or takes no byte for so long is left.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of a request that are read. Prometheus sends less than one thousand.
const REQUEST: u64 = 8192;

/// A number of a store: its name behind `stepfs_`, its meaning, and its value, if a store has it.
type Gauge = (&'static str, &'static str, fn(&Status) -> Option<u64>);

const GAUGES: &[Gauge] = &[
    ("up", "1 if the daemon of the mount answers.", |status| Some(status.daemon.is_some().into())),
    ("problems", "Problems that `stepfs status` shows.", |status| Some(status.problems.len() as u64)),
    ("files", "Regular files.", |status| known(status, status.files)),
    ("released_files", "Files that are differences in the store.", |status| known(status, status.released)),
    ("failed_files", "Files that could not be archived.", |status| known(status, status.failed.len() as u64)),
    ("logical_bytes", "Bytes that programs see.", |status| known(status, status.logical_bytes)),
    ("stored_bytes", "Bytes that the store takes, without its cache.", |status| known(status, status.stored_bytes)),
    ("resident_bytes", "Bytes of files that are as written.", |status| known(status, status.resident_bytes)),
    ("object_bytes", "Bytes of objects.", |status| known(status, status.object_bytes)),
    ("unnamed_bytes", "Bytes of objects for removed states.", |status| known(status, status.unnamed_bytes)),
    ("cache_bytes", "Bytes of decoded files in the cache.", |status| known(status, status.cache_bytes)),
    ("free_bytes", "Bytes that are free on the disk of the store.", |status| known(status, status.free_bytes)),
    ("queued_steps", "Steps of archiving that wait.", |status| known(status, status.queued)),
    ("settling_files", "Files that wait for the rest of their checkpoint.", |status| known(status, status.settling)),
    ("busy_files", "Files that wait for a handle to be closed.", |status| known(status, status.busy)),
    ("mirror_missing_files", "Files that the mirror lacks.", |status| Some(status.mirror.as_ref()?.files)),
    ("mirror_missing_bytes", "Bytes that the mirror lacks.", |status| Some(status.mirror.as_ref()?.bytes)),
    ("mirror_lag_seconds", "How long the oldest file has waited for the mirror.", |status| {
        Some(status.mirror.as_ref()?.lag_seconds.unwrap_or(0))
    }),
];

/// A daemon that does not answer has no numbers.
fn known(status: &Status, number: u64) -> Option<u64> {
    status.daemon.map(|_| number)
}

pub(super) fn run(args: Args) -> Result<ExitCode> {
    let Some(address) = args.listen else {
        say_part!("{}", text(&all()));
        return Ok(ExitCode::SUCCESS);
    };
    let listener = TcpListener::bind(&address)
        .map_err(|error| anyhow!("cannot listen at {address}: {error}; `--listen 127.0.0.1:0` takes a free port"))?;
    say!("http://{}/metrics", listener.local_addr()?);
    for client in listener.incoming() {
        // A client that goes away is its own concern.
        let _ = client.and_then(answer);
    }
    Ok(ExitCode::SUCCESS)
}

fn answer(client: TcpStream) -> io::Result<()> {
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
    let mut lines = BufReader::new((&client).take(REQUEST)).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    // A connection that is closed before the client has sent all is reset, and the answer may be lost.
    while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    let (status, body) = match request.split(' ').take(2).collect::<Vec<_>>()[..] {
        ["GET", "/metrics"] => ("200 OK", text(&all())),
        ["GET", _] => ("404 Not Found", "the numbers are at /metrics\n".into()),
        _ => ("405 Method Not Allowed", "only GET is answered\n".into()),
    };
    let kind = "Content-Type: text/plain; version=0.0.4; charset=utf-8";
    let head = format!("HTTP/1.1 {status}\r\n{kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    (&client).write_all((head + &body).as_bytes())
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
