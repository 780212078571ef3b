//! The cluster in the environment variable `TF_CONFIG`.

use std::fmt;

use serde::de::{Deserialize, DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use tensorwire_fabric::FabricKind;

use super::{ClusterError, ClusterSpec, fabric_of};

/// The environment variable that describes the cluster to training jobs.
pub const TF_CONFIG: &str = "TF_CONFIG";

/// Maximum number of bytes of a value in an error.
const SHOWN_BYTES: usize = 120;

/// The content of `TF_CONFIG`: the cluster, and the task of this process. The field `rpc_layer` is the cluster's
/// [protocol](ClusterSpec::protocol).
///
/// ```
/// let text = r#"{"cluster": {"ps": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222", "10.0.0.3:2222"]},
///                "task": {"type": "worker", "index": 1}}"#;
/// let config: tensorwire::tensorflow::TfConfig = text.parse()?;
/// assert_eq!(config.task, Some(("worker".to_owned(), 1)));
/// assert_eq!(config.cluster.jobs(), ["ps", "worker"]);
/// # Ok::<(), tensorwire::settings::ClusterError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TfConfig {
    /// The cluster, checked.
    pub cluster: ClusterSpec,
    /// Job and number of this process's task, which is in the cluster; `None` if the variable has no task.
    pub task: Option<(String, u32)>,
}

impl TfConfig {
    /// Reads the environment variable of this process.
    ///
    /// # Errors
    /// [`ClusterError::TfConfig`], also if the variable is not set.
    pub fn from_environment() -> Result<Self, ClusterError> {
        match std::env::var(TF_CONFIG) {
            Ok(text) => text.parse(),
            Err(std::env::VarError::NotPresent) => {
                Err(problem("the variable", "not set", "set it, or give the cluster by code or flags"))
            }
            Err(std::env::VarError::NotUnicode(_)) => {
                Err(problem("the variable", "not UTF-8", "set it to JSON text"))
            }
        }
    }

    /// The cluster, and the task of this process.
    ///
    /// # Errors
    /// [`ClusterError::TfConfig`] if it has no task.
    pub(crate) fn into_task(self) -> Result<(ClusterSpec, String, u32), ClusterError> {
        let (job, task) = self.task.ok_or_else(|| {
            problem("task", "missing", "give the task of this process: {\"type\": JOB, \"index\": NUMBER}")
        })?;
        Ok((self.cluster, job, task))
    }
}

impl std::str::FromStr for TfConfig {
    type Err = ClusterError;

    fn from_str(text: &str) -> Result<Self, ClusterError> {
        let json: Box<RawValue> = serde_json::from_str(text)
            .map_err(|error| problem("the variable", text, format!("it is not JSON: {error}; {EXPECTED}")))?;
        let Fields(fields) = read(&json)
            .ok_or_else(|| problem("the variable", text, format!("it is not a JSON object; {EXPECTED}")))?;
        // Other fields, such as "environment", have no meaning here.
        let jobs = only("cluster", &fields)?;
        let jobs = jobs.ok_or_else(|| problem("cluster", "missing", EXPECTED))?;
        let mut cluster = read_cluster(jobs)?;
        cluster.fabric = only("rpc_layer", &fields)?.map(read_rpc_layer).transpose()?;
        let task = only("task", &fields)?.map(|task| read_task(&cluster, task)).transpose()?;
        Ok(Self { cluster, task })
    }
}

const EXPECTED: &str =
    r#"write {"cluster": {"ps": ["HOST:PORT", ..], ..}, "task": {"type": "ps", "index": 0}}"#;

fn problem(field: &str, value: impl fmt::Display, remedy: impl Into<String>) -> ClusterError {
    let mut value = value.to_string();
    if let Some((end, _)) = value.char_indices().find(|(at, _)| *at >= SHOWN_BYTES) {
        value.truncate(end);
        value.push('…');
    }
    ClusterError::TfConfig { field: field.to_owned(), value, remedy: remedy.into() }
}

/// The field with this name, if there is one.
fn only<'json>(
    name: &str,
    fields: &'json [(String, Box<RawValue>)],
) -> Result<Option<&'json RawValue>, ClusterError> {
    let mut found = fields.iter().filter(|(field, _)| field == name).map(|(_, value)| &**value);
    let first = found.next();
    match found.next() {
        Some(second) => Err(problem(name, shown(second), format!("`{name}` is given twice: keep one"))),
        None => Ok(first),
    }
}

fn read_cluster(jobs: &RawValue) -> Result<ClusterSpec, ClusterError> {
    let Fields(jobs) = read(jobs).ok_or_else(|| problem("cluster", shown(jobs), EXPECTED))?;
    let mut spec = ClusterSpec::new();
    for (job, tasks) in &jobs {
        only(job, &jobs)?;
        spec = read_job(spec, job, tasks)?;
    }
    spec.check()?;
    Ok(spec)
}

/// Reads a job's addresses, from a list or from an object with task numbers as names.
fn read_job(mut spec: ClusterSpec, job: &str, tasks: &RawValue) -> Result<ClusterSpec, ClusterError> {
    let field = format!("cluster.{job}");
    let listed = |tasks: Vec<Box<RawValue>>| {
        Fields((0..).zip(tasks).map(|(number, task): (u32, _)| (number.to_string(), task)).collect())
    };
    let numbered = read(tasks).map(listed).or_else(|| read(tasks));
    let Fields(numbered) = numbered.ok_or_else(|| {
        problem(&field, shown(tasks), "list the addresses of its tasks: [\"HOST:PORT\", ..]")
    })?;
    if numbered.is_empty() {
        return Err(ClusterError::NoHosts { job: job.to_owned() });
    }
    for (number, address) in numbered {
        let Ok(task) = number.parse() else {
            return Err(problem(&field, number, "number its tasks 0, 1, .."));
        };
        let remedy = "write the address as \"HOST:PORT\"";
        let address: String =
            read(&address).ok_or_else(|| problem(&format!("{field}[{task}]"), shown(&address), remedy))?;
        spec = spec.task(job, task, address);
    }
    Ok(spec)
}

/// Reads the protocol of the cluster's servers.
fn read_rpc_layer(layer: &RawValue) -> Result<FabricKind, ClusterError> {
    let protocol: String = read(layer).unwrap_or_default();
    fabric_of(&protocol).map_err(|remedy| problem("rpc_layer", shown(layer), remedy))
}

fn read_task(cluster: &ClusterSpec, task: &RawValue) -> Result<(String, u32), ClusterError> {
    let Fields(fields) =
        read(task).ok_or_else(|| problem("task", shown(task), "write {\"type\": JOB, \"index\": NUMBER}"))?;
    let missing = |field, remedy| problem(field, "missing", remedy);
    let job = only("type", &fields)?.ok_or_else(|| missing("task.type", "give the job of this process"))?;
    let job: String =
        read(job).ok_or_else(|| problem("task.type", shown(job), "write the name of a job as a string"))?;
    let index = only("index", &fields)?
        .ok_or_else(|| missing("task.index", "give the number of this process in its job"))?;
    let index = shown(index);
    let index = index.parse().map_err(|_| problem("task.index", &index, "give a whole number from 0"))?;
    cluster.task_address(&job, index)?;
    Ok((job, index))
}

/// The fields of a JSON object, in the order of the text, also those that are given twice.
struct Fields(Vec<(String, Box<RawValue>)>);

impl<'text> Deserialize<'text> for Fields {
    fn deserialize<D: Deserializer<'text>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'text> Visitor<'text> for FieldsVisitor {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<M: MapAccess<'text>>(self, mut map: M) -> Result<Fields, M::Error> {
        let mut fields = Vec::new();
        while let Some(field) = map.next_entry()? {
            fields.push(field);
        }
        Ok(Fields(fields))
    }
}

/// `value` as a `T`, if it is one.
fn read<T: DeserializeOwned>(value: &RawValue) -> Option<T> {
    serde_json::from_str(value.get()).ok()
}

/// A string without quotes, and other values as they are in the text.
fn shown(value: &RawValue) -> String {
    read(value).unwrap_or_else(|| value.get().to_owned())
}
