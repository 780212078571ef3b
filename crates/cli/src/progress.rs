//! Progress bars that count bytes. They draw on standard error, and only where that is a terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar for `bytes` bytes; `what` stands before it, and the message behind it.
pub(crate) fn byte_bar(what: &str, bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(bytes).with_prefix(what.to_owned());
    let template = "{prefix} {bar:30} {binary_bytes}/{binary_total_bytes}  {binary_bytes_per_sec}  {msg}";
    // A template that does not parse would show the default bar.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}
