//! Colour on standard output, where a terminal has it.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::ColorChoice;

/// Set once, before the command runs.
static ON: AtomicBool = AtomicBool::new(false);

/// Decides for the rest of the process. By itself text has colour on a terminal, unless NO_COLOR is set.
pub fn decide(when: ColorChoice) {
    let set = |name| std::env::var_os(name).is_some_and(|value: std::ffi::OsString| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    let on = match when {
        ColorChoice::Always => true,
        ColorChoice::Never => false,
        ColorChoice::Auto => std::io::stdout().is_terminal() && !set("NO_COLOR") && !is_dumb,
    };
    ON.store(on, Ordering::Relaxed);
}

/// Whether text has colour.
pub fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// The look of a text; each is readable on a light and on a dark ground.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Look {
    /// As any other text.
    #[default]
    Plain,
    /// Something is wrong.
    Bad,
    /// Something to choose.
    Good,
    /// A head or a total.
    Head,
}

/// A text with its look.
pub fn paint(look: Look, text: &str) -> String {
    let code = match look {
        _ if !is_on() => "",
        Look::Plain => "",
        Look::Bad => "1;31",
        Look::Good => "32",
        Look::Head => "1",
    };
    if code.is_empty() { text.into() } else { format!("\x1b[{code}m{text}\x1b[0m") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_has_colour_only_if_asked() {
        decide(ColorChoice::Auto);
        assert_eq!(paint(Look::Bad, "x"), "x");
        decide(ColorChoice::Always);
        assert_eq!(paint(Look::Bad, "x"), "\x1b[1;31mx\x1b[0m");
        assert_eq!(paint(Look::Plain, "x"), "x");
        decide(ColorChoice::Never);
        assert_eq!(paint(Look::Good, "x"), "x");
    }
}
