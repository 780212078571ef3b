//! Device names: `/job:j/replica:r/task:t/device:TYPE:id`.

use std::{fmt, str::FromStr};

/// A parsed device name, in TensorFlow's notation. Every part may be absent or `*`, which is the same. A job may also have hyphens,
/// as names of hosts and pods do.
///
/// ```
/// use tensorwire_protocol::DeviceName;
///
/// let device = DeviceName::parse("/job:worker/replica:0/task:1/device:GPU:2")?;
/// assert_eq!(device.worker().as_deref(), Some("/job:worker/replica:0/task:1"));
/// assert_eq!(device.id, Some(2));
/// # Ok::<(), tensorwire_protocol::InvalidDeviceName>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct DeviceName {
    /// Job.
    pub job: Option<String>,
    /// Replica.
    pub replica: Option<u32>,
    /// Task.
    pub task: Option<u32>,
    /// Device type, such as `CPU`.
    pub device_type: Option<String>,
    /// Number of the device among those of its type.
    pub id: Option<u32>,
}

/// The text is no device name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{}` is no device name; one looks like /job:worker/replica:0/task:1/device:CPU:0", crate::text::escaped(.0))]
pub struct InvalidDeviceName(pub String);

impl DeviceName {
    /// Parses `text`: any order and repetition of `/job:N`, `/replica:n`, `/task:n`, `/device:TYPE:id` and the
    /// legacy `/cpu:n`, `/CPU:n`, `/gpu:n`, `/GPU:n`. `/` and the empty text specify nothing.
    ///
    /// # Errors
    /// [`InvalidDeviceName`].
    pub fn parse(text: &str) -> Result<Self, InvalidDeviceName> {
        let mut name = Self::default();
        let mut rest = if text == "/" { "" } else { text };
        while !rest.is_empty() {
            rest = name.consume_part(rest).ok_or_else(|| InvalidDeviceName(text.to_owned()))?;
        }
        Ok(name)
    }

    /// Takes one part off the front of `text`.
    fn consume_part<'text>(&mut self, text: &'text str) -> Option<&'text str> {
        if let Some(rest) = text.strip_prefix("/job:") {
            let (job, rest) = wildcard_or(rest, |text| identifier(text, "_-"))?;
            self.job = job;
            return Some(rest);
        }
        if let Some(rest) = text.strip_prefix("/replica:") {
            let (replica, rest) = wildcard_or(rest, number)?;
            self.replica = replica;
            return Some(rest);
        }
        if let Some(rest) = text.strip_prefix("/task:") {
            let (task, rest) = wildcard_or(rest, number)?;
            self.task = task;
            return Some(rest);
        }
        if let Some(rest) = text.strip_prefix("/device:") {
            let (device_type, rest) = wildcard_or(rest, |text| identifier(text, "_"))?;
            self.device_type = device_type;
            let Some(rest) = rest.strip_prefix(':') else {
                self.id = None;
                return Some(rest);
            };
            let (id, rest) = wildcard_or(rest, number)?;
            self.id = id;
            return Some(rest);
        }
        let (legacy, rest) = legacy_type(text)?;
        let (id, rest) = wildcard_or(rest, number)?;
        self.device_type = Some(legacy.to_owned());
        self.id = id;
        Some(rest)
    }

    /// The worker part, `/job:j/replica:r/task:t`; `None` unless all three are present.
    pub fn worker(&self) -> Option<String> {
        let (job, replica, task) = (self.job.as_ref()?, self.replica?, self.task?);
        Some(format!("/job:{job}/replica:{replica}/task:{task}"))
    }

    /// Worker part and local part `TYPE:id`; `None` unless both are present.
    pub fn split(&self) -> Option<(String, String)> {
        let (device_type, id) = (self.device_type.as_ref()?, self.id?);
        let worker = Self { device_type: None, id: None, ..self.clone() };
        Some((worker.to_string(), format!("{device_type}:{id}")))
    }

    /// Whether both names are of devices of one process: both have a job, a replica and a task, and these are equal. Compares the
    /// numbers and not their text, so `task:1` is not `task:10`.
    pub fn is_same_address_space(&self, other: &Self) -> bool {
        let complete = self.job.is_some() && self.replica.is_some() && self.task.is_some();
        complete && self.job == other.job && self.replica == other.replica && self.task == other.task
    }
}

impl FromStr for DeviceName {
    type Err = InvalidDeviceName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(job) = &self.job {
            write!(f, "/job:{job}")?;
        }
        if let Some(replica) = self.replica {
            write!(f, "/replica:{replica}")?;
        }
        if let Some(task) = self.task {
            write!(f, "/task:{task}")?;
        }
        match (&self.device_type, self.id) {
            (None, None) => Ok(()),
            (Some(device_type), Some(id)) => write!(f, "/device:{device_type}:{id}"),
            (Some(device_type), None) => write!(f, "/device:{device_type}:*"),
            (None, Some(id)) => write!(f, "/device:*:{id}"),
        }
    }
}

fn wildcard_or<T>(text: &str, read: impl FnOnce(&str) -> Option<(T, &str)>) -> Option<(Option<T>, &str)> {
    match text.strip_prefix('*') {
        Some(rest) => Some((None, rest)),
        None => read(text).map(|(value, rest)| (Some(value), rest)),
    }
}

/// A letter, then letters, digits and the characters of `marks`.
fn identifier<'text>(text: &'text str, marks: &str) -> Option<(String, &'text str)> {
    text.starts_with(|first: char| first.is_ascii_alphabetic()).then_some(())?;
    let part_of = |next: char| next.is_ascii_alphanumeric() || marks.contains(next);
    let end = text.find(|next| !part_of(next)).unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    Some((name.to_owned(), rest))
}

fn number(text: &str) -> Option<(u32, &str)> {
    let end = text.find(|next: char| !next.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    Some((digits.parse().ok()?, rest))
}

fn legacy_type(text: &str) -> Option<(&'static str, &str)> {
    let legacy = [("/cpu:", "CPU"), ("/CPU:", "CPU"), ("/gpu:", "GPU"), ("/GPU:", "GPU")];
    legacy.into_iter().find_map(|(prefix, name)| Some((name, text.strip_prefix(prefix)?)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> DeviceName {
        DeviceName::parse(text).unwrap()
    }

    #[test]
    fn s2_2_full_name_has_every_part() {
        let name = parse("/job:worker_2/replica:3/task:4/device:GPU:5");
        assert_eq!(name.job.as_deref(), Some("worker_2"));
        assert_eq!((name.replica, name.task), (Some(3), Some(4)));
        assert_eq!((name.device_type.as_deref(), name.id), (Some("GPU"), Some(5)));
        assert_eq!(name.worker().unwrap(), "/job:worker_2/replica:3/task:4");
    }

    #[test]
    fn a_job_may_have_the_name_of_a_host() {
        let name = parse("/job:web-7f-2--/replica:0/task:4/device:GPU:5");
        assert_eq!(name.job.as_deref(), Some("web-7f-2--"));
        assert_eq!(parse(&name.to_string()), name);
        assert!(!name.is_same_address_space(&parse("/job:web-7f/replica:0/task:4")));
    }

    #[test]
    fn s2_2_parts_come_in_any_order_and_the_last_of_a_kind_counts() {
        assert_eq!(parse("/task:1/job:a/task:2"), parse("/job:a/task:2"));
        assert_eq!(parse("/device:CPU:1/job:a/gpu:2"), parse("/job:a/device:GPU:2"));
        assert_eq!(parse("/device:CPU:1/device:GPU"), parse("/device:GPU:*"));
    }

    #[test]
    fn s2_2_legacy_forms_are_devices() {
        for (text, device_type) in
            [("/cpu:7", "CPU"), ("/CPU:7", "CPU"), ("/gpu:7", "GPU"), ("/GPU:7", "GPU")]
        {
            assert_eq!(parse(text), parse(&format!("/device:{device_type}:7")), "{text}");
        }
        assert_eq!(parse("/cpu:*").id, None);
    }

    #[test]
    fn s2_2_wildcards_and_empty_texts_specify_nothing() {
        assert_eq!(parse("/job:*/replica:*/task:*/device:*:*"), DeviceName::default());
        assert_eq!(parse("/"), DeviceName::default());
        assert_eq!(parse(""), DeviceName::default());
        assert_eq!(parse("/device:*:3").id, Some(3));
    }

    #[test]
    fn s2_2_what_is_no_device_name() {
        for text in [
            "x",
            "//",
            "/job:",
            "/job:1a",
            "/job:-a",
            "/job:a.b",
            "/job:a;b",
            "/device:A-B:0",
            "/job:_a",
            "/replica:",
            "/replica:x",
            "/replica:-1",
            "/task:4294967296",
            "/task:1 ",
            "/device:",
            "/device:CPU:",
            "/device:0",
            "/tpu:0",
            "/job:a/",
            "/Job:a",
        ] {
            assert_eq!(DeviceName::parse(text), Err(InvalidDeviceName(text.to_owned())), "{text}");
        }
    }

    #[test]
    fn s2_2_split_needs_type_and_id() {
        let split = parse("/job:a/task:0/cpu:1").split().unwrap();
        assert_eq!(split, ("/job:a/task:0".to_owned(), "CPU:1".to_owned()));
        assert_eq!(parse("/job:a/replica:0/task:0").split(), None);
        assert_eq!(parse("/device:CPU:*").split(), None);
    }

    #[test]
    fn s2_2_same_address_space_compares_parts_not_prefixes() {
        let one = parse("/job:a/replica:0/task:1");
        assert!(one.is_same_address_space(&parse("/job:a/replica:0/task:1/cpu:0")));
        assert!(!one.is_same_address_space(&parse("/job:a/replica:0/task:10")));
        assert!(!one.is_same_address_space(&parse("/job:ab/replica:0/task:1")));
        let partial = parse("/job:a/task:1");
        assert!(!partial.is_same_address_space(&partial));
    }

    proptest! {
        #[test]
        fn s2_2_display_parses_back(
            job in proptest::option::of("[a-zA-Z][a-zA-Z0-9_-]{0,8}"),
            replica in proptest::option::of(any::<u32>()),
            task in proptest::option::of(any::<u32>()),
            device_type in proptest::option::of("[a-zA-Z][a-zA-Z0-9_]{0,8}"),
            id in proptest::option::of(any::<u32>()),
        ) {
            let name = DeviceName { job, replica, task, device_type, id };
            prop_assert_eq!(DeviceName::parse(&name.to_string()), Ok(name));
        }

        #[test]
        fn any_text_parses_or_is_refused(text in ".{0,64}") {
            let _ = DeviceName::parse(&text);
        }
    }
}
