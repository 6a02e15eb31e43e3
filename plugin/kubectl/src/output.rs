//! Colours, tables and wrapped lines that follow the terminal.

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};

use shmesh_sys::table::Table;
use shmesh_sys::terminal::{columns, printable, wrap};

/// The output format of a subcommand.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Format {
    /// Aligned columns and sentences, for people
    Text,
    /// JSON, for other programs
    Json,
}

/// How text is printed.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Style {
    /// Whether colours are used.
    pub(crate) has_color: bool,
    /// Width of the terminal; `None` means that lines are not shortened.
    pub(crate) columns: Option<usize>,
}

/// A colour with a meaning.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Color {
    Red = 31,
    Green = 32,
    Yellow = 33,
    Grey = 90,
}

impl Style {
    /// The style for standard output: `NO_COLOR` and `TERM=dumb` switch colours off.
    pub(crate) fn of_stdout() -> Self {
        let columns = columns(io::stdout()).map(usize::from);
        Self::new(io::stdout().is_terminal(), columns, std::env::var_os)
    }

    fn new(
        is_terminal: bool,
        columns: Option<usize>,
        variable: impl Fn(&'static str) -> Option<OsString>,
    ) -> Self {
        let refuses = variable("NO_COLOR").is_some_and(|value| !value.is_empty())
            || variable("TERM").is_some_and(|term| term == "dumb");
        Self { has_color: is_terminal && !refuses, columns: columns.filter(|_| is_terminal) }
    }

    /// `text` in a colour.
    pub(crate) fn paint(self, color: Color, text: &str) -> String {
        if self.has_color { format!("\x1b[{}m{text}\x1b[0m", color as u8) } else { text.to_owned() }
    }

    /// Prints words after `indent` blanks in each line; the first line continues one with that many characters.
    pub(crate) fn wrap(self, indent: usize, text: &str, out: &mut dyn Write) -> io::Result<()> {
        let width = self.columns.map_or(usize::MAX, |columns| columns.saturating_sub(indent).max(20));
        let lines: Vec<String> = wrap(text, width).iter().map(|line| printable(line)).collect();
        writeln!(out, "{}", lines.join(&format!("\n{:indent$}", "")))
    }

    /// Prints a table that fits the terminal.
    pub(crate) fn table(self, table: &Table, out: &mut dyn Write) -> io::Result<()> {
        let lines = table.lines(self.columns);
        let (heading, rows) = lines.split_first().map_or(("", &[][..]), |(heading, rows)| (heading, rows));
        writeln!(out, "{}", self.paint(Color::Grey, heading))?;
        rows.iter().try_for_each(|row| writeln!(out, "{row}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(print: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> String {
        let mut out = Vec::new();
        print(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn colours_and_width_are_those_of_a_terminal() {
        let set = |name: &'static str, value: &'static str| {
            move |asked: &'static str| (asked == name).then(|| OsString::from(value))
        };
        let plain = Style { has_color: false, columns: Some(80) };
        let colored = Style { has_color: true, columns: Some(80) };
        assert_eq!(Style::new(true, Some(80), |_| None), colored);
        assert_eq!(Style::new(true, Some(80), set("NO_COLOR", "")), colored);
        assert_eq!(Style::new(true, Some(80), set("NO_COLOR", "1")), plain);
        assert_eq!(Style::new(true, Some(80), set("TERM", "dumb")), plain);
        assert_eq!(Style::new(false, Some(80), |_| None), Style::default());
    }

    #[test]
    fn words_are_wrapped_below_the_first() {
        let style = Style { has_color: false, columns: Some(30) };
        assert_eq!(
            printed(|out| style.wrap(8, "one two three four five six seven", out)),
            "one two three four\n        five six seven\n"
        );
        assert_eq!(printed(|out| Style::default().wrap(8, "one\ntwo", out)), "one two\n");
    }
}
