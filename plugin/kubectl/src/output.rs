//! Tables, colours and wrapped lines that follow the terminal.

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};

/// Columns of a table are not made narrower than this.
const MIN_COLUMN: usize = 6;

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
        let columns = shmesh_sys::terminal::columns(io::stdout()).map(usize::from);
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
        let mut used = 0;
        for word in printable(text).split_whitespace() {
            let len = word.chars().count();
            if used > 0 && used + 1 + len > width {
                write!(out, "\n{:indent$}", "")?;
                used = 0;
            } else if used > 0 {
                write!(out, " ")?;
                used += 1;
            }
            write!(out, "{word}")?;
            used += len;
        }
        writeln!(out)
    }
}

/// The text without control characters: it comes from other machines and must not control the terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { ' ' } else { c }).collect()
}

/// Rows of text under a heading.
#[derive(Debug)]
pub(crate) struct PodTable {
    rows: Vec<Vec<String>>,
    /// Whether the column is aligned to the right.
    right: Vec<bool>,
}

impl PodTable {
    /// Creates a table with the columns of a pod, and these. A heading that starts with `>` aligns its column to the right.
    pub(crate) fn new(heads: &[&str]) -> Self {
        let heads = [&["NAMESPACE", "POD", "NODE"], heads].concat();
        let right = heads.iter().map(|head| head.starts_with('>')).collect();
        let names = heads.iter().map(|head| head.trim_start_matches('>').to_owned());
        Self { rows: vec![names.collect()], right }
    }

    /// Adds a row; missing columns stay empty.
    pub(crate) fn row(&mut self, pod: &[String; 3], cells: impl IntoIterator<Item = String>) {
        let mut row: Vec<String> =
            pod.iter().cloned().chain(cells).map(|cell| printable(&cell).replace('\n', " ")).collect();
        row.resize(self.right.len(), String::new());
        self.rows.push(row);
    }

    /// Whether the table has no rows.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }

    /// Prints the table. The widest columns are shortened until a line fits the terminal.
    pub(crate) fn print(&self, style: Style, out: &mut dyn Write) -> io::Result<()> {
        let widest =
            |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let mut widths: Vec<usize> = (0..self.right.len()).map(widest).collect();
        let room = style.columns.unwrap_or(usize::MAX).saturating_sub(2 * widths.len().saturating_sub(1));
        while widths.iter().sum::<usize>() > room {
            let Some(widest) = widths.iter_mut().max().filter(|width| **width > MIN_COLUMN) else { break };
            *widest -= 1;
        }
        for (at, row) in self.rows.iter().enumerate() {
            let cells = row.iter().zip(&widths).zip(&self.right).map(|((cell, &width), &right)| {
                let cell = if cell.chars().count() > width {
                    cell.chars().take(width - 1).chain(['…']).collect()
                } else {
                    cell.clone()
                };
                if right { format!("{cell:>width$}") } else { format!("{cell:width$}") }
            });
            let line = cells.collect::<Vec<_>>().join("  ");
            let line = line.trim_end();
            writeln!(out, "{}", if at == 0 { style.paint(Color::Grey, line) } else { line.to_owned() })?;
        }
        Ok(())
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
    fn table_fits_the_terminal_and_shortens_the_widest_columns() {
        let mut table = PodTable::new(&["LINK", ">SIZE"]);
        assert!(table.is_empty());
        table.row(
            &["ns".into(), "a-pod-with-a-long-name".into(), "node".into()],
            ["radio".into(), "8Mi".into()],
        );
        let whole = printed(|out| table.print(Style::default(), out));
        assert_eq!(
            whole,
            "NAMESPACE  POD                     NODE  LINK   SIZE\nns         a-pod-with-a-long-name  node  radio   8Mi\n"
        );
        let narrow = printed(|out| table.print(Style { has_color: false, columns: Some(42) }, out));
        assert!(narrow.lines().all(|line| line.chars().count() <= 42), "{narrow}");
        assert!(narrow.contains("a-pod-with-…  node  radio   8Mi"), "{narrow}");
        let colored = printed(|out| table.print(Style { has_color: true, columns: None }, out));
        assert!(colored.starts_with("\x1b[90mNAMESPACE"), "{colored:?}");
    }

    #[test]
    fn text_of_a_pod_cannot_control_the_terminal() {
        let mut table = PodTable::new(&["LINK"]);
        table.row(&["a\x1b[2J".into(), "b\r".into(), "c\n".into()], ["d\x07".into()]);
        let text = printed(|out| table.print(Style::default(), out));
        assert!(!text.contains(['\x1b', '\r', '\x07']) && text.lines().count() == 2, "{text:?}");
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
