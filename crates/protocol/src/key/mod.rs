//! Keys: the edge of a graph, between two devices, that a value belongs to.

mod device;
mod hasher;

use std::{array, fmt, ops::Range, str::FromStr, sync::Arc};

pub use device::{DeviceName, InvalidDeviceName};
pub(crate) use hasher::KeyHash;

use crate::{
    Code, Status,
    text::{escaped, has_active},
};

/// A five-part key, `source;incarnation;destination;edge;frame:iteration`.
///
/// Equality and order are those of the text.
///
/// ```
/// use tensorwire_protocol::Key;
///
/// let key = Key::builder()
///     .source("/job:ps/replica:0/task:0/device:CPU:0")
///     .incarnation(1234)
///     .destination("/job:worker/replica:0/task:1/device:CPU:0")
///     .edge("weights")
///     .build()?;
/// let text = "/job:ps/replica:0/task:0/device:CPU:0;00000000000004d2;/job:worker/replica:0/task:1/device:CPU:0;weights;0:0";
/// assert_eq!(key.as_str(), text);
/// assert_eq!(Key::parse(text)?, key);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Key {
    text: Arc<str>,
    /// The ends of source, incarnation, destination, edge and frame:iteration within `text`. A semicolon separates each part from
    /// the next.
    ends: [usize; 5],
    incarnation: u64,
    /// Source and destination, which the keys of other edges share.
    devices: Arc<(DeviceName, DeviceName)>,
}

/// The text is no key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("Invalid  rendezvous key: {}", escaped(.0))]
pub struct InvalidKey(pub String);

impl From<InvalidKey> for Status {
    fn from(invalid: InvalidKey) -> Self {
        Self::new(Code::InvalidArgument, invalid.to_string())
    }
}

impl Key {
    /// Parses `text` by TensorFlow's rules for rendezvous keys: five parts, of which the second is a
    /// hexadecimal number of at most 64 bits, the first and third are device names, the fourth and fifth are
    /// not empty. One semicolon at the end is ignored; the fifth part is not parsed. No part has a character that
    /// affects the terminal or log that shows it.
    ///
    /// # Errors
    /// [`InvalidKey`].
    pub fn parse(text: &str) -> Result<Self, InvalidKey> {
        Self::parse_parts(text).ok_or_else(|| InvalidKey(text.to_owned()))
    }

    fn parse_parts(text: &str) -> Option<Self> {
        if has_active(text) {
            return None;
        }
        let (mut parts, mut ends) = ([""; 5], [0; 5]);
        let mut next = 0;
        for (part, end) in parts.iter_mut().zip(&mut ends) {
            *end = text.get(next..)?.find(';').map_or(text.len(), |length| next + length);
            *part = text.get(next..*end).unwrap_or_default();
            next = (*end + 1).min(text.len());
        }
        let [source, incarnation, destination, edge, frame_iteration] = parts;
        if next != text.len() || edge.is_empty() || frame_iteration.is_empty() {
            return None;
        }
        let hexadecimal =
            incarnation.len() <= 16 && incarnation.bytes().all(|digit| digit.is_ascii_hexdigit());
        let incarnation = hexadecimal.then(|| u64::from_str_radix(incarnation, 16).ok())??;
        let devices = (DeviceName::parse(source).ok()?, DeviceName::parse(destination).ok()?);
        Some(Self { text: text.into(), ends, incarnation, devices: Arc::new(devices) })
    }

    /// Makes a key from its parts.
    pub fn builder() -> KeyBuilder {
        KeyBuilder::default()
    }

    /// The text, as parsed.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The text, to be shared.
    pub fn text(&self) -> &Arc<str> {
        &self.text
    }

    fn part(&self, part: usize) -> &str {
        let before = part.checked_sub(1).and_then(|before| self.ends.get(before));
        let start = before.map_or(0, |end| end + 1);
        self.ends.get(part).and_then(|&end| self.text.get(start..end)).unwrap_or_default()
    }

    /// The source device, as written.
    pub fn source(&self) -> &str {
        self.part(0)
    }

    /// The source device. An empty one means this worker.
    pub fn source_device(&self) -> &DeviceName {
        &self.devices.0
    }

    /// The incarnation of the source that the key was made for.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// The destination device, as written.
    pub fn destination(&self) -> &str {
        self.part(2)
    }

    /// The destination device.
    pub fn destination_device(&self) -> &DeviceName {
        &self.devices.1
    }

    /// The edge.
    pub fn edge(&self) -> &str {
        self.part(3)
    }

    /// `frame:iteration`, as written.
    pub fn frame_iteration(&self) -> &str {
        self.part(4)
    }

    /// The same key for another edge. Costs less than making it of its parts.
    ///
    /// # Errors
    /// [`InvalidKey`] if `edge` is empty, or has a semicolon or a character that affects what shows it.
    pub fn with_edge(&self, edge: &str) -> Result<Self, InvalidKey> {
        let (before, after) = self.around_edge();
        let text = [before, edge, after].concat();
        if is_edge(edge) { Ok(self.alike(text.into(), edge.len())) } else { Err(InvalidKey(text)) }
    }

    /// The key in `text`, if `text` differs from this key's text in the edge only. Costs less than [`parse`](Self::parse), and
    /// shares `text`.
    pub fn parse_alike(&self, text: &Arc<str>) -> Option<Self> {
        let (before, after) = self.around_edge();
        let edge = text.strip_prefix(before)?.strip_suffix(after)?;
        is_edge(edge).then(|| self.alike(text.clone(), edge.len()))
    }

    /// The key in `text`, which differs from this key's text in the edge only. The edge in `text` has `edge` bytes.
    fn alike(&self, text: Arc<str>, edge: usize) -> Self {
        let [source, incarnation, destination, edge_end, last] = self.ends;
        let end = destination + 1 + edge;
        let ends = [source, incarnation, destination, end, end + (last - edge_end)];
        Self { text, ends, incarnation: self.incarnation, devices: self.devices.clone() }
    }

    /// The text before the edge, and after it.
    fn around_edge(&self) -> (&str, &str) {
        let [_, _, destination, edge, _] = self.ends;
        (self.text.get(..=destination).unwrap_or_default(), self.text.get(edge..).unwrap_or_default())
    }

    /// The same edge for another incarnation of the source.
    #[must_use]
    pub fn with_incarnation(&self, incarnation: u64) -> Self {
        // The other parts were parsed before, so this parses too.
        Self::parse(&self.text_with_incarnation(incarnation)).unwrap_or_else(|_| self.clone())
    }

    /// The text of [`with_incarnation`](Self::with_incarnation).
    pub fn text_with_incarnation(&self, incarnation: u64) -> String {
        let digits: [u8; 2 * size_of::<u64>()] = array::from_fn(|digit| {
            let value = (incarnation >> (60 - 4 * digit)) as u8 & 0xf;
            value + if value < 10 { b'0' } else { b'a' - 10 }
        });
        let digits = str::from_utf8(&digits).unwrap_or_default();
        let [source, end, .., last] = self.ends;
        let part = |range| self.text.get(range).unwrap_or_default();
        [part(0..source), ";", digits, part(end..last)].concat()
    }

    /// The key without its incarnation, which is compared separately: `source;destination;edge;frame:iteration`.
    pub fn table_key(&self) -> String {
        self.table_key_parts().map(|part| self.text.get(part).unwrap_or_default()).concat()
    }

    /// The range of [`table_key`](Self::table_key) within the text.
    pub fn table_key_parts(&self) -> [Range<usize>; 2] {
        let [source, incarnation, .., last] = self.ends;
        [0..source, incarnation..last]
    }
}

/// Whether `edge` can be the edge of a key.
fn is_edge(edge: &str) -> bool {
    !edge.is_empty() && !edge.contains(';') && !has_active(edge)
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.text.cmp(&other.text)
    }
}

impl std::hash::Hash for Key {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.text.hash(state);
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Key").field(&self.text).finish()
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Key {
    type Err = InvalidKey;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
    }
}

impl AsRef<str> for Key {
    fn as_ref(&self) -> &str {
        &self.text
    }
}

/// The parts of a [`Key`]; those not given are empty or 0.
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct KeyBuilder {
    source: String,
    incarnation: u64,
    destination: String,
    edge: String,
    frame: u64,
    iteration: i64,
}

impl KeyBuilder {
    /// The source device.
    pub fn source(mut self, device: impl Into<String>) -> Self {
        self.source = device.into();
        self
    }

    /// The source's incarnation.
    pub fn incarnation(mut self, incarnation: u64) -> Self {
        self.incarnation = incarnation;
        self
    }

    /// The destination device.
    pub fn destination(mut self, device: impl Into<String>) -> Self {
        self.destination = device.into();
        self
    }

    /// The edge.
    pub fn edge(mut self, edge: impl Into<String>) -> Self {
        self.edge = edge.into();
        self
    }

    /// The loop frame.
    pub fn frame(mut self, frame: u64) -> Self {
        self.frame = frame;
        self
    }

    /// The iteration within the frame.
    pub fn iteration(mut self, iteration: i64) -> Self {
        self.iteration = iteration;
        self
    }

    /// Puts the parts together.
    ///
    /// # Errors
    /// [`InvalidKey`] when the parts make none: a device that is no device name, no edge, or a semicolon
    /// inside a part.
    pub fn build(&self) -> Result<Key, InvalidKey> {
        let Self { source, incarnation, destination, edge, frame, iteration } = self;
        Key::parse(&format!("{source};{incarnation:016x};{destination};{edge};{frame}:{iteration}"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const EXAMPLE: &str = "/job:mnist/replica:1/task:2/CPU:0;0000000000001ed2;\
                           /job:mnist/replica:1/task:2/device:GPU:0;var0;0:0";

    #[test]
    fn s2_9_01_the_worked_example() {
        let key = Key::parse(EXAMPLE).unwrap();
        assert_eq!(key.source(), "/job:mnist/replica:1/task:2/CPU:0");
        assert_eq!(key.source_device().device_type.as_deref(), Some("CPU"));
        assert_eq!(key.incarnation(), 7890);
        assert_eq!(key.destination_device().device_type.as_deref(), Some("GPU"));
        assert_eq!(key.edge(), "var0");
        assert_eq!(key.frame_iteration(), "0:0");
        assert_eq!((key.as_str(), key.to_string().as_str()), (EXAMPLE, EXAMPLE));
        let table_key = "/job:mnist/replica:1/task:2/CPU:0;/job:mnist/replica:1/task:2/device:GPU:0;var0;0:0";
        assert_eq!(key.table_key(), table_key);
    }

    #[test]
    fn s2_1_the_builder_makes_the_worked_example() {
        let key = Key::builder()
            .source("/job:mnist/replica:1/task:2/CPU:0")
            .incarnation(7890)
            .destination("/job:mnist/replica:1/task:2/device:GPU:0")
            .edge("var0")
            .build();
        assert_eq!(key, Key::parse(EXAMPLE));
    }

    #[test]
    fn s2_9_01_what_is_no_key() {
        let two_part_device = EXAMPLE.replacen("/job:mnist/replica:1/task:2/CPU:0", "job:mnist/CPU:0", 1);
        let doubled = format!("{EXAMPLE};{EXAMPLE}");
        let two_semicolons = format!("{EXAMPLE};;");
        for text in [
            "",
            "foo;bar;baz",
            &two_part_device,
            &doubled,
            &two_semicolons,
            "/cpu:0;1;/cpu:0;edge",
            "/cpu:0;1;/cpu:0;edge;",
            "/cpu:0;1;/cpu:0;;0:0",
            "/cpu:0;;/cpu:0;edge;0:0",
            "/cpu:0;+1;/cpu:0;edge;0:0",
            "/cpu:0;g;/cpu:0;edge;0:0",
            "/cpu:0;00000000000000001;/cpu:0;edge;0:0",
            "/cpu:0;1;cpu;edge;0:0",
            "/cpu:0;1;/cpu:0;ed\nge;0:0",
            "/cpu:0;1;/cpu:0;edge;\u{1b}[2J",
            "/cpu:0;1;/cpu:0;\u{202e}edge;0:0",
        ] {
            let invalid = Key::parse(text).unwrap_err();
            assert_eq!(invalid.to_string(), format!("Invalid  rendezvous key: {}", escaped(text)));
            assert_eq!(Status::from(invalid).code, Code::InvalidArgument);
        }
    }

    #[test]
    fn s2_2_one_semicolon_at_the_end_is_swallowed() {
        let key = Key::parse(&format!("{EXAMPLE};")).unwrap();
        assert_eq!(key.frame_iteration(), "0:0");
        assert_eq!(key.as_str().len(), EXAMPLE.len() + 1);
        assert_eq!(key.table_key(), Key::parse(EXAMPLE).unwrap().table_key());
    }

    #[test]
    fn s2_2_the_fifth_part_is_any_text_and_devices_may_be_empty() {
        let key = Key::parse(";Ff;;edge;anything").unwrap();
        assert_eq!((key.incarnation(), key.frame_iteration()), (255, "anything"));
        assert_eq!(*key.source_device(), DeviceName::default());
    }

    #[test]
    fn s2_2_a_key_of_another_edge_is_as_if_parsed() {
        let key = Key::parse(&format!("{EXAMPLE};")).unwrap();
        let other = key.with_edge("w").unwrap();
        assert_eq!(other.as_str(), format!("{};", EXAMPLE.replace("var0", "w")));
        assert_eq!((other.edge(), other.frame_iteration()), ("w", "0:0"));
        for edge in ["", ";", "a;b", "a\nb"] {
            assert!(key.with_edge(edge).is_err(), "{edge:?}");
        }
        let key = Key::parse(EXAMPLE).unwrap();
        for text in [
            "",
            &EXAMPLE.replace("var0", ""),
            &EXAMPLE.replace("var0", "a;b"),
            &EXAMPLE.replace("1ed2", "1ed3"),
            &EXAMPLE.replace("0:0", "0:1"),
        ] {
            assert_eq!(key.parse_alike(&text.into()), None, "{text}");
        }
    }

    #[test]
    fn a_semicolon_inside_a_part_is_refused() {
        assert!(Key::builder().edge("a;b").build().is_err());
        assert!(Key::builder().build().is_err(), "no edge");
    }

    proptest! {
        #[test]
        fn built_keys_parse_back(
            incarnation: u64, frame: u64, iteration: i64, edge in r"[^;\p{Cc}\u{2028}-\u{202e}\u{2066}-\u{2069}]{1,40}", task: u32,
        ) {
            let source = format!("/job:a/replica:0/task:{task}/device:CPU:0");
            let builder = Key::builder().source(&source).incarnation(incarnation).destination("/gpu:1");
            let key = builder.edge(&edge).frame(frame).iteration(iteration).build().unwrap();
            let again = Key::parse(key.as_str()).unwrap();
            prop_assert_eq!(again.incarnation(), incarnation);
            prop_assert_eq!(again.edge(), &edge);
            prop_assert_eq!(again.source(), &source);
            prop_assert_eq!(again.frame_iteration(), format!("{frame}:{iteration}"));
            let alike = key.with_edge("another").unwrap().parse_alike(key.text()).unwrap();
            prop_assert_eq!(alike.ends, again.ends);
            prop_assert_eq!((&alike.devices, alike.table_key()), (&again.devices, again.table_key()));
        }

        #[test]
        fn any_text_is_a_key_or_is_refused(text in "[;/a-z0-9:]{0,40}|.{0,40}") {
            let _ = Key::parse(&text);
        }
    }
}
