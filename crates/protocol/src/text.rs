//! Makes a peer's text safe to show: it can neither forge a line of a log, nor move a terminal's cursor, nor change the
//! direction of the text around it.
//!
//! Free text (messages of statuses) is escaped where it is decoded. Names and keys are compared and sent back, so a name
//! that would need escaping is refused instead: by [`wire`](crate::wire) from a peer, by [`check_name`] from this
//! process.

use std::{borrow::Cow, str::FromStr};

/// The remedy for a refused name.
pub(crate) const REMEDY: &str =
    "leave out control characters, line separators and marks that change the direction of text";

/// Whether `character` affects the terminal or log that shows it: a control character (C0, DEL, C1), a separator of
/// lines or paragraphs, or a mark that embeds, overrides or isolates a direction of text.
///
/// ```
/// use tensorwire_protocol::text::is_active;
///
/// assert!("\n\u{1b}\u{9b}\u{202e}\u{2028}".chars().all(is_active));
/// assert!(!"größe.权重.🚀 `\\`".contains(is_active));
/// ```
pub fn is_active(character: char) -> bool {
    character.is_control() || matches!(character, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A decimal number without leading zeros: each number has one text.
pub(crate) fn number<N: FromStr>(text: &str) -> Option<N> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    text.parse().ok().filter(|_| is_plain)
}

/// Whether `text` has an active character.
pub(crate) fn has_active(text: &str) -> bool {
    // Most names are of printable ASCII, which needs no decoding. Without an early end, several bytes are compared at once.
    let is_plain = text.bytes().fold(true, |is_plain, byte| is_plain & matches!(byte, b' '..=b'~'));
    !is_plain && text.contains(is_active)
}

/// `text` with each active character as Rust's literals write it: `\n`, `\u{1b}`. Escaped text stays as it is.
///
/// ```
/// use tensorwire_protocol::text::escaped;
///
/// assert_eq!(escaped("no `w`\n\u{1b}[2J"), r"no `w`\n\u{1b}[2J");
/// ```
pub fn escaped(text: &str) -> Cow<'_, str> {
    if has_active(text) { Cow::Owned(escaped_within(text, usize::MAX)) } else { Cow::Borrowed(text) }
}

/// As [`escaped`], cut before the character that would take it above `bytes_max` bytes.
pub fn escaped_within(text: &str, bytes_max: usize) -> String {
    let mut shown = String::new();
    for character in text.chars() {
        let before = shown.len();
        if is_active(character) {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
        if shown.len() > bytes_max {
            shown.truncate(before);
            break;
        }
    }
    shown
}

/// Whether `name` can be a name or a key.
///
/// # Errors
/// What is wrong with it, and the remedy, to be shown with the [`escaped`] `name`.
pub fn check_name(name: &str) -> Result<(), String> {
    let found = if has_active(name) { name.chars().find(|character| is_active(*character)) } else { None };
    match found {
        None => Ok(()),
        Some(found) => Err(format!("it has the character {}: {REMEDY}", found.escape_default())),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Every character that acts on what shows it, and its neighbours, which do not.
    #[test]
    fn s5_active_characters_are_those_that_act_on_terminals_logs_and_reading_order() {
        let active = [0..0x20, 0x7f..0xa0, 0x2028..0x202f, 0x2066..0x206a];
        for character in (0..=0x0010_FFFF).filter_map(char::from_u32) {
            let expected = active.iter().any(|range| range.contains(&u32::from(character)));
            assert_eq!(is_active(character), expected, "{}", character.escape_unicode());
            let name = format!("a{character}");
            assert_eq!((check_name(&name).is_err(), has_active(&name)), (expected, expected));
        }
    }

    proptest! {
        #[test]
        fn s5_escaped_text_has_no_active_character_and_says_what_was_there(text: String, most in 0usize..80) {
            let whole = escaped(&text);
            prop_assert!(!whole.contains(is_active));
            prop_assert_eq!(escaped(&whole), whole.as_ref());
            prop_assert!(text.contains(is_active) || whole == text);
            let cut = escaped_within(&text, most);
            prop_assert!(whole.starts_with(&cut) && cut.len() <= most);
            // The longest escape has 8 bytes.
            prop_assert!(cut == whole || cut.len() + 8 > most);
        }
    }
}
