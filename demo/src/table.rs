//! Tables for the terminal.

use comfy_table::{CellAlignment, LineStyle, Table, presets};

/// A table whose first `left` columns are text, the others numbers.
pub(crate) fn table(header: &[&str], left: usize, rows: impl IntoIterator<Item = Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY).set_header(header.iter().copied()).add_rows(rows);
    let style = table.style().row_separator(LineStyle::none());
    table.load_style(style);
    table.column_iter_mut().skip(left).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}
