//! All that this process shows, and the search for what it must not.

#![allow(clippy::unwrap_used)] // test support

use std::{
    collections::{BTreeMap, HashMap},
    fmt::{Debug, Write as _},
    sync::Mutex,
};

use tracing_subscriber::{filter::LevelFilter, fmt::format::FmtSpan};

static SHOWN: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Shown;

impl std::io::Write for Shown {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        SHOWN.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Keeps every line and span of every crate.
pub(crate) fn log_everything() {
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(LevelFilter::TRACE)
        // With their fields; a line for each time that a span is entered would only repeat them.
        .with_span_events(FmtSpan::NEW | FmtSpan::CLOSE)
        .with_ansi(false)
        .with_writer(|| Shown);
    subscriber.init();
}

/// Keeps what `Debug` shows.
pub(crate) fn show(value: &impl Debug) {
    let mut text = String::new();
    writeln!(text, "{value:?}").unwrap();
    SHOWN.lock().unwrap().extend_from_slice(text.as_bytes());
}

const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Without padding.
fn base64(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let group =
            chunk.iter().fold(0_u32, |sum, byte| sum << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for place in 0..=chunk.len() {
            text.push(char::from(LETTERS[(group >> (18 - 6 * place)) as usize & 63]));
        }
    }
    text
}

/// Eight bytes in every form in which they may be shown.
fn forms(part: &[u8]) -> Vec<String> {
    let listed = |format: fn(&u8) -> String, by: &str| part.iter().map(format).collect::<Vec<_>>().join(by);
    let number: [u8; 8] = part.try_into().unwrap();
    vec![
        String::from_utf8_lossy(part).into_owned(),
        part.escape_ascii().to_string(),
        listed(|byte| format!("{byte:02x}"), ""),
        listed(|byte| format!("{byte:02x}"), " "),
        listed(|byte| format!("{byte:02x}"), ":"),
        listed(|byte| format!("{byte}"), ", "),
        u64::from_le_bytes(number).to_string(),
        u64::from_be_bytes(number).to_string(),
    ]
}

/// Parts of eight bytes, and of nine, which is a whole number of letters of base64.
fn forms_of(value: &[u8]) -> Vec<String> {
    let mut all: Vec<String> = value.windows(8).step_by(4).flat_map(forms).collect();
    all.extend(value.windows(9).map(base64));
    // What is no text is lossy, and found everywhere.
    all.retain(|form| form.len() >= 8 && !form.contains('\u{FFFD}'));
    all
}

/// A form of something secret, and what that is.
type Wanted = (&'static str, String);

/// Finds many strings in one pass. All have eight bytes or more.
struct Search {
    wanted: Vec<Wanted>,
    by_head: HashMap<u64, Vec<usize>>,
    /// Which heads may be there, by some of their bits: most are not.
    hints: Vec<bool>,
}

fn hint(head: u64) -> usize {
    (head.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 44) as usize
}

fn head(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().unwrap())
}

impl Search {
    fn new(wanted: Vec<Wanted>) -> Self {
        let (mut by_head, mut hints) = (HashMap::<u64, Vec<usize>>::new(), vec![false; 1 << 20]);
        for (number, (_, form)) in wanted.iter().enumerate() {
            let head = head(form.as_bytes());
            by_head.entry(head).or_default().push(number);
            hints[hint(head)] = true;
        }
        Self { wanted, by_head, hints }
    }

    /// What of it is in `text`, and where.
    fn found(&self, text: &[u8]) -> BTreeMap<usize, usize> {
        let mut found = BTreeMap::new();
        for (at, bytes) in text.windows(8).enumerate() {
            let head = head(bytes);
            if !self.hints[hint(head)] {
                continue;
            }
            for &number in self.by_head.get(&head).into_iter().flatten() {
                if text[at..].starts_with(self.wanted[number].1.as_bytes()) {
                    found.insert(number, at);
                }
            }
        }
        found
    }

    /// The same in all that was shown, hexadecimal digits of either case.
    fn shown(&self) -> BTreeMap<usize, usize> {
        let shown = SHOWN.lock().unwrap().clone();
        let mut found = self.found(&shown);
        found.extend(self.found(&shown.to_ascii_lowercase()));
        found
    }
}

fn search(secrets: &[(&'static str, Vec<u8>)]) -> Search {
    let wanted =
        secrets.iter().flat_map(|(what, value)| forms_of(value).into_iter().map(|form| (*what, form)));
    Search::new(wanted.collect())
}

/// Shows `value` in each form by the way that is searched, and sees that each is found.
pub(crate) fn assert_shown(value: &[u8]) {
    let search = search(&[("planted", value.to_vec())]);
    assert!(search.shown().is_empty(), "it is there already");
    let shown = String::from_utf8_lossy(&SHOWN.lock().unwrap()).into_owned();
    for name in [
        "tensorwire::worker",
        "tensorwire::fabric",
        "h2::",
        "TRACE",
        "NotFound",
        "tensorwire_bytes_total",
        "Hello {",
    ] {
        assert!(shown.contains(name), "nothing of {name} was shown: the search proves nothing");
    }
    search.wanted.iter().for_each(|(_, form)| SHOWN.lock().unwrap().extend_from_slice(form.as_bytes()));
    let found = search.shown();
    let missing: Vec<_> = (0..search.wanted.len()).filter(|number| !found.contains_key(number)).collect();
    assert!(missing.is_empty(), "{missing:?} is there and is not found");
}

/// Searches all that was shown for `secrets`, and for `keys`, of which no smaller part is secret.
pub(crate) fn assert_not_shown(secrets: &[(&'static str, Vec<u8>)], keys: &[u32]) {
    let mut wanted = search(secrets).wanted;
    let forms = |key: &u32| [key.to_string(), format!("{key:08x}")].map(|form| ("a remote key", form));
    wanted.extend(keys.iter().flat_map(forms));
    let search = Search::new(wanted);
    let found = search.shown();
    let shown = SHOWN.lock().unwrap().clone();
    println!("{} bytes were shown; {} forms were searched for", shown.len(), search.wanted.len());
    if let Some((number, at)) = found.first_key_value() {
        let around = String::from_utf8_lossy(&shown[at.saturating_sub(400)..(at + 100).min(shown.len())]);
        panic!("{} was shown: {around}", search.wanted[*number].0);
    }
}
