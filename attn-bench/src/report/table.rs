//! Tables, and the words in their cells.

use comfy_table::{CellAlignment, Table, presets};

/// A table with a header, whose first `left` columns are text and whose others are numbers.
pub fn table(header: &[&str], left: usize, rows: impl IntoIterator<Item = Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY).set_header(header.to_vec()).add_rows(rows);
    let mut style = table.style();
    style = style.row_separator(comfy_table::LineStyle::none());
    table.load_style(style);
    for column in table.column_iter_mut().skip(left) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// The text of a cell without a value.
pub const NONE: &str = "–";

/// A value's text, or [`NONE`].
pub fn or_none<T>(value: Option<T>, text: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| NONE.into(), text)
}

/// A share as `85.3 %`.
pub fn percent(share: f64) -> String {
    if share.is_nan() { NONE.into() } else { format!("{:.1} %", 100.0 * share) }
}

/// A length or count with thin grouping: `16 384`.
pub fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) && digits.len() > 4 {
            out.push('\u{202f}');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_read_as_percent() {
        assert_eq!([0.8531, 1.0, f64::NAN].map(percent), ["85.3 %", "100.0 %", "–"]);
    }

    #[test]
    fn long_numbers_are_grouped() {
        assert_eq!([7, 4096, 16384, 1_234_567].map(grouped), ["7", "4096", "16\u{202f}384", "1\u{202f}234\u{202f}567"]);
    }
}
