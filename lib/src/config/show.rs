//! Quoting a text in a message about it.

/// Text from a file made fit to print: quoted, control characters escaped, at most 64 characters.
pub(super) fn shown(text: &str) -> String {
    const LIMIT: usize = 64;
    match text.char_indices().nth(LIMIT) {
        Some((end, _)) => format!("{:?}...", &text[..end]),
        None => format!("{text:?}"),
    }
}

/// A message about a text, with the line and column that it is about below it. Every program shows a mistake in a YAML text in
/// the parser's form, which has the position once.
pub fn show_mistake(name: &str, text: &str, message: &str, location: Option<(u64, u64)>) -> String {
    /// Maximum number of characters of a line that are shown.
    const WIDTH: usize = 120;
    let Some((line, column)) = location else { return format!("{name}: {message}") };
    let at = |number: u64| usize::try_from(number - 1).unwrap_or(usize::MAX);
    let source = text.lines().nth(at(line.max(1))).unwrap_or_default();
    // A long line is shown from shortly before the column. Characters that could control a terminal are not shown.
    let skipped = if at(column.max(1)) < WIDTH { 0 } else { at(column) - WIDTH / 2 };
    let printable = |c: char| if c.is_control() { ' ' } else { c };
    let source: String = source.chars().skip(skipped).take(WIDTH).map(printable).collect();
    let (number, caret) = (line.to_string(), " ".repeat((at(column.max(1)) - skipped).min(WIDTH)));
    let margin = " ".repeat(number.len());
    format!(
        "{message}\n{margin}--> {name}:{line}:{column}\n{margin} |\n{number} | {}\n{margin} | {caret}^",
        source.trim_end()
    )
}
