//! The cluster in the environment variable `TF_CONFIG`.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
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
        let json: Json = serde_json::from_str(text).map_err(|error| {
            problem("the variable", text, format!("it is not a JSON object: {error}; {EXPECTED}"))
        })?;
        let Json::Object(fields) = json else {
            return Err(problem("the variable", text, format!("it is not a JSON object; {EXPECTED}")));
        };
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
fn only<'json>(name: &str, fields: &'json [(String, Json)]) -> Result<Option<&'json Json>, ClusterError> {
    let mut found = fields.iter().filter(|(field, _)| field == name).map(|(_, value)| value);
    let first = found.next();
    match found.next() {
        Some(second) => Err(problem(name, second, format!("`{name}` is given twice: keep one"))),
        None => Ok(first),
    }
}

fn read_cluster(jobs: &Json) -> Result<ClusterSpec, ClusterError> {
    let Json::Object(jobs) = jobs else {
        return Err(problem("cluster", jobs, EXPECTED));
    };
    let mut spec = ClusterSpec::new();
    for (job, tasks) in jobs {
        only(job, jobs)?;
        spec = read_job(spec, job, tasks)?;
    }
    spec.check()?;
    Ok(spec)
}

/// Reads a job's addresses, from a list or from an object with task numbers as names.
fn read_job(mut spec: ClusterSpec, job: &str, tasks: &Json) -> Result<ClusterSpec, ClusterError> {
    let field = format!("cluster.{job}");
    let numbered: Vec<(String, &Json)> = match tasks {
        Json::List(tasks) => {
            (0..).zip(tasks).map(|(number, task): (u32, _)| (number.to_string(), task)).collect()
        }
        Json::Object(tasks) => tasks.iter().map(|(number, task)| (number.clone(), task)).collect(),
        other => return Err(problem(&field, other, "list the addresses of its tasks: [\"HOST:PORT\", ..]")),
    };
    if numbered.is_empty() {
        return Err(ClusterError::NoHosts { job: job.to_owned() });
    }
    for (number, address) in numbered {
        let Ok(task) = number.parse() else {
            return Err(problem(&field, number, "number its tasks 0, 1, .."));
        };
        let Json::Text(address) = address else {
            return Err(problem(&format!("{field}[{task}]"), address, "write the address as \"HOST:PORT\""));
        };
        spec = spec.task(job, task, address.as_str());
    }
    Ok(spec)
}

/// Reads the protocol of the cluster's servers.
fn read_rpc_layer(layer: &Json) -> Result<FabricKind, ClusterError> {
    let protocol = match layer {
        Json::Text(text) => text.as_str(),
        _ => "",
    };
    fabric_of(protocol).map_err(|remedy| problem("rpc_layer", layer, remedy))
}

fn read_task(cluster: &ClusterSpec, task: &Json) -> Result<(String, u32), ClusterError> {
    let Json::Object(fields) = task else {
        return Err(problem("task", task, "write {\"type\": JOB, \"index\": NUMBER}"));
    };
    let job = match only("type", fields)? {
        Some(Json::Text(job)) => job,
        Some(other) => return Err(problem("task.type", other, "write the name of a job as a string")),
        None => return Err(problem("task.type", "missing", "give the job of this process")),
    };
    let shown = match only("index", fields)? {
        Some(Json::Text(index)) => index.clone(),
        Some(other) => other.to_string(),
        None => return Err(problem("task.index", "missing", "give the number of this process in its job")),
    };
    let Ok(index) = shown.parse() else {
        return Err(problem("task.index", shown, "give a whole number from 0"));
    };
    cluster.task_address(job, index)?;
    Ok((job.clone(), index))
}

/// A JSON value. Objects contain duplicate fields, in the order of the text.
#[derive(Debug)]
enum Json {
    Object(Vec<(String, Json)>),
    List(Vec<Json>),
    Text(String),
    /// A number, true, false or null, as text.
    Other(String),
}

impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Object(fields) => write!(f, "an object of {} fields", fields.len()),
            Self::List(values) => write!(f, "a list of {}", values.len()),
            Self::Text(text) | Self::Other(text) => f.write_str(text),
        }
    }
}

struct JsonVisitor;

impl<'text> Visitor<'text> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<M: MapAccess<'text>>(self, mut map: M) -> Result<Json, M::Error> {
        let mut fields = Vec::new();
        while let Some(field) = map.next_entry()? {
            fields.push(field);
        }
        Ok(Json::Object(fields))
    }

    fn visit_seq<S: SeqAccess<'text>>(self, mut values: S) -> Result<Json, S::Error> {
        let mut list = Vec::new();
        while let Some(value) = values.next_element()? {
            list.push(value);
        }
        Ok(Json::List(list))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Json, E> {
        Ok(Json::Text(text.to_owned()))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Json, E> {
        Ok(Json::Other(number.to_string()))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Json, E> {
        Ok(Json::Other(number.to_string()))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<Json, E> {
        Ok(Json::Other(number.to_string()))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Other(value.to_string()))
    }

    fn visit_unit<E: Error>(self) -> Result<Json, E> {
        Ok(Json::Other("null".to_owned()))
    }
}

impl<'text> Deserialize<'text> for Json {
    fn deserialize<D: Deserializer<'text>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}
