//! Progress on standard error, only if that is a terminal: the present phase, and bars that count bytes.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar for `bytes` bytes; `what` is shown before it, and the message after it.
pub(crate) fn byte_bar(what: &str, bytes: u64) -> ProgressBar {
    styled(ProgressBar::new(bytes), what, &bar_template(columns()))
}

/// The template of a bar that fits into this many columns.
fn bar_template(columns: usize) -> String {
    // Without the bar it takes up to 72 columns and the transport.
    let bar = columns.saturating_sub(84).min(30);
    match columns {
        ..74 => "{prefix} {percent} %".to_owned(),
        _ => format!(
            "{{prefix}} {{bar:{bar}}} {{binary_bytes}}/{{binary_total_bytes}}  {{binary_bytes_per_sec}}  {{eta}} left  {{wide_msg}}"
        ),
    }
}

/// Columns of the terminal that shows the progress.
fn columns() -> usize {
    const USUAL: usize = 80;
    let size = rustix::termios::tcgetwinsize(std::io::stderr());
    size.ok().map(|size| size.ws_col.into()).filter(|&columns| columns > 0).unwrap_or(USUAL)
}

/// A line for work of unknown duration. Dropping it removes the line.
pub(crate) fn phase(what: &str) -> StatusLine {
    let bar = styled(ProgressBar::new_spinner(), what, "{prefix} …");
    bar.tick();
    StatusLine(bar)
}

/// A line that shows the present phase, until it is dropped.
#[derive(Debug)]
#[must_use = "the line goes when it is dropped"]
pub(crate) struct StatusLine(ProgressBar);

impl Drop for StatusLine {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn styled(bar: ProgressBar, what: &str, template: &str) -> ProgressBar {
    let bar = bar.with_prefix(what.to_owned());
    // A template that does not parse would show the default bar.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}
