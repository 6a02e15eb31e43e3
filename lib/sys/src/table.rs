//! Tables with aligned columns.

use std::io::{self, Write};

use crate::terminal::printable;

/// Columns of text are not made narrower than this.
const MIN_COLUMN: usize = 6;

/// Rows of text under a heading.
#[derive(Debug)]
pub struct Table {
    /// Whether each column is aligned to the right.
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table with these columns. A heading that starts with `>` aligns its column to the right.
    #[must_use]
    pub fn new(heads: &[&str]) -> Self {
        let right = heads.iter().map(|head| head.starts_with('>')).collect();
        let names = heads.iter().map(|head| head.trim_start_matches('>').to_owned());
        Self { right, rows: vec![names.collect()] }
    }

    /// Adds a row; missing columns stay empty.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let mut row: Vec<String> = cells.into_iter().map(|cell| printable(&cell)).collect();
        row.resize(self.right.len(), String::new());
        self.rows.push(row);
    }

    /// Whether the table has no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }

    /// Returns the lines, the heading first. The widest columns of text are shortened until a line has at most `width` characters.
    /// Columns that are aligned to the right are not shortened, since a number without its last characters is another number.
    #[must_use]
    pub fn lines(&self, width: Option<usize>) -> Vec<String> {
        let widest =
            |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let mut widths: Vec<usize> = (0..self.right.len()).map(widest).collect();
        let room = width.unwrap_or(usize::MAX).saturating_sub(2 * widths.len().saturating_sub(1));
        while widths.iter().sum::<usize>() > room {
            let text =
                widths.iter_mut().zip(&self.right).filter(|(_, right)| !**right).map(|(width, _)| width);
            let Some(widest) = text.max().filter(|width| **width > MIN_COLUMN) else { break };
            *widest -= 1;
        }
        let line = |row: &Vec<String>| {
            let cells = row.iter().zip(&widths).zip(&self.right).map(|((cell, &width), &right)| {
                let is_long = cell.chars().count() > width;
                let cell: String =
                    cell.chars().take(width - usize::from(is_long)).chain(is_long.then_some('…')).collect();
                if right { format!("{cell:>width$}") } else { format!("{cell:width$}") }
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        self.rows.iter().map(line).collect()
    }

    /// Prints the table, each line after `indent` blanks.
    ///
    /// # Errors
    /// Writing fails.
    pub fn print(&self, indent: usize, out: &mut dyn Write) -> io::Result<()> {
        self.lines(None).iter().try_for_each(|line| writeln!(out, "{:indent$}{line}", ""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_end_with_text() {
        let mut table = Table::new(&["name", ">n", "note"]);
        assert!(table.is_empty());
        table.row(["a µ".to_owned(), "5".to_owned()]);
        table.row(["abcdef".to_owned(), "123".to_owned(), "x".to_owned()]);
        let mut out = Vec::new();
        table.print(1, &mut out).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), " name      n  note\n a µ       5\n abcdef  123  x\n");
    }

    #[test]
    fn widest_columns_are_shortened_until_lines_fit() {
        let mut table = Table::new(&["POD", "NODE", ">SIZE"]);
        table.row(["a-pod-with-a-long-name".into(), "a-node".into(), "8Mi".into()]);
        assert_eq!(table.lines(Some(27)), ["POD            NODE    SIZE", "a-pod-with-a…  a-node   8Mi"]);
        table.row(["a-pod".into(), "a-node".into(), "123.4 KiB".into()]);
        assert_eq!(table.lines(Some(5))[2], "a-pod   a-node  123.4 KiB");
        // Six characters of each column of text, and two blanks between columns.
        assert!(table.lines(Some(5)).iter().all(|line| line.chars().count() <= 6 + 2 + 6 + 2 + 9));
    }

    #[test]
    fn cells_cannot_control_the_terminal() {
        let mut table = Table::new(&["A", "B"]);
        table.row(["a\x1b[2J".into(), "b\r\n".into()]);
        assert_eq!(table.lines(None)[1], "a\u{fffd}[2J  b\u{fffd}\u{fffd}");
    }
}
