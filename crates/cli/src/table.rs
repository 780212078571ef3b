//! Tables of text.

/// Rows below a head, in columns. The first `texts` columns begin at the same place, the others are numbers and end at the same place.
pub(crate) fn table<const N: usize>(texts: usize, head: [&str; N], rows: Vec<[String; N]>) -> String {
    let mut all = vec![head.map(str::to_owned)];
    all.extend(rows);
    let width = |column: usize| all.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    let mut text = String::new();
    for row in &all {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
            if column < texts { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        text += &cells.collect::<Vec<_>>().join("  ");
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::table;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = vec![
            ["größe".to_owned(), "u8".to_owned(), "1".to_owned()],
            ["b".to_owned(), "bool".to_owned(), "22".to_owned()],
        ];
        assert_eq!(
            table(1, ["name", "type", "x"], rows),
            "name   type   x\ngröße    u8   1\nb      bool  22\n"
        );
    }
}
