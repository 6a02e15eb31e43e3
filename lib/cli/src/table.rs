//! Tables with aligned columns.

use std::io::{self, Write};

/// The alignment of a column.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// Rows of text under a heading.
#[derive(Debug)]
pub(crate) struct Table {
    align: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table with these columns. A heading that starts with `>` aligns its column to the right.
    pub(crate) fn new(heads: &[&str]) -> Self {
        let align = heads.iter().map(|head| if head.starts_with('>') { Align::Right } else { Align::Left });
        let names = heads.iter().map(|head| head.trim_start_matches('>').to_owned());
        Self { align: align.collect(), rows: vec![names.collect()] }
    }

    /// Adds a row; missing columns stay empty.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let mut row: Vec<String> = cells.into_iter().collect();
        row.resize(self.align.len(), String::new());
        self.rows.push(row);
    }

    /// Whether the table has no rows.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }

    /// Prints the table, each line after `indent` blanks.
    pub(crate) fn print(&self, indent: usize, out: &mut dyn Write) -> io::Result<()> {
        let columns = 0..self.align.len();
        let width =
            |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = columns.map(width).collect();
        for row in &self.rows {
            let cells = row.iter().zip(&widths).zip(&self.align).map(|((cell, &width), align)| match align {
                Align::Left => format!("{cell:width$}"),
                Align::Right => format!("{cell:>width$}"),
            });
            let line = cells.collect::<Vec<_>>().join("  ");
            writeln!(out, "{:indent$}{}", "", line.trim_end())?;
        }
        Ok(())
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
}
