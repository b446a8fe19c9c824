//! Runs the user's command that scores a checkpoint.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::terminal::format::name;
use crate::terminal::interrupt::Temporary;

/// Bytes of output to examine, from the end.
const TAIL_BYTES: u64 = 4096;
/// Lines of standard error to show.
const SHOWN_LINES: usize = 8;

/// A command that prints a number.
pub(super) struct Evaluator<'a> {
    script: String,
    scratch: &'a Path,
}

/// The end of a command's output, without a line that is cut off. The output goes into a file, so that no thread has to
/// read it while the command runs.
fn tail(mut output: &File) -> Result<String> {
    let from = output.metadata()?.len().saturating_sub(TAIL_BYTES);
    output.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    output.take(TAIL_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    Ok(match text.split_once('\n') {
        Some((_, rest)) if from > 0 => rest.to_string(),
        _ => text,
    })
}

/// The last non-empty line must be exactly one number.
fn number(output: &str) -> Option<f64> {
    output.lines().map(str::trim).rfind(|line| !line.is_empty())?.parse().ok()
}

/// The script for the shell. The path is the command's last argument, unless the command places it itself.
fn script(command: &str) -> String {
    let says = ["$1", "${1", "$@", "$*", "${@", "${*"].iter().any(|word| command.contains(word));
    if says { command.to_string() } else { format!("{command} \"$@\"") }
}

impl<'a> Evaluator<'a> {
    pub(super) fn new(command: &str, scratch: &'a Path) -> Evaluator<'a> {
        Evaluator { script: script(command), scratch }
    }

    /// Runs the command on a checkpoint. The score may be NaN or infinite.
    ///
    /// # Errors
    /// The command fails, or prints no number.
    pub(super) fn score(&self, checkpoint: &Path) -> Result<f64> {
        let output = || tempfile::tempfile_in(self.scratch).with_context(|| format!("{}", self.scratch.display()));
        let (out, err) = (output()?, output()?);
        let mut command = Command::new("sh");
        command.args(["-c", &self.script, "stepfs-tune"]).arg(checkpoint).stdin(Stdio::null());
        command.stdout(out.try_clone()?).stderr(err.try_clone()?);
        let (mut child, _held) = Temporary::program(&mut command).context("cannot start sh")?;
        let status = child.wait()?;
        let said = || -> Result<String> {
            let text = tail(&err)?;
            let lines: Vec<String> = text.lines().map(name).collect();
            let shown = lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n  ");
            Ok(if shown.is_empty() { String::new() } else { format!("; its last words:\n  {shown}") })
        };
        if !status.success() {
            bail!("--eval {:?} failed ({status}){}", self.script, said()?);
        }
        match number(&tail(&out)?) {
            Some(number) => Ok(number),
            None => bail!("--eval {:?}: the last line of its output must be a number{}", self.script, said()?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_is_the_number() {
        for (text, expected) in [("1.5", 1.5), ("loss\n 2e-3 \n\n", 2e-3), ("3\n-4", -4.0), ("inf", f64::INFINITY)] {
            assert_eq!(number(text), Some(expected));
        }
        assert!(number("nan").is_some_and(f64::is_nan));
        for text in ["", "\n", "loss 1.5", "1.5\ndone", "1,5", "0x10"] {
            assert_eq!(number(text), None, "{text}");
        }
    }

    #[test]
    fn the_path_is_the_last_argument_unless_the_command_says_where() {
        assert_eq!(script("python eval.py"), "python eval.py \"$@\"");
        for command in ["eval.py \"$1\" --fast", "x ${1}", "x $@"] {
            assert_eq!(script(command), command);
        }
    }

    fn score(command: &str) -> Result<f64> {
        let scratch = tempfile::tempdir().unwrap();
        let evaluator = Evaluator::new(command, scratch.path());
        let score = evaluator.score(Path::new("a b.pt"));
        assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0, "it leaves nothing");
        score
    }

    #[test]
    fn a_command_gets_the_path_and_its_failures_are_told() {
        assert_eq!(score("printf '%s\\n' noise; printf '%s' \"$1\" | wc -c").unwrap(), 6.0);
        assert_eq!(score("yes 0123456789 | head -c 100000; echo; echo 7; true").unwrap(), 7.0);
        let failed = score("echo 1; echo why >&2; exit 3 #").unwrap_err().to_string();
        assert!(failed.contains("exit status: 3") && failed.contains("why"), "{failed}");
        assert!(score("true").unwrap_err().to_string().contains("must be a number"));
    }
}
