//! Numbers of bytes on the command line.

/// Reads a size such as `64K`, of 1 to `most` bytes. `remedy` is the remedy in its error.
pub(crate) fn size(text: &str, most: u64, remedy: &str) -> Result<u64, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
        Some(b'G' | b'g') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| format!("not a size: {remedy}"))?;
    match number.checked_mul(1 << shift) {
        Some(bytes) if (1..=most).contains(&bytes) => Ok(bytes),
        _ => Err(format!("out of range: {remedy}")),
    }
}
