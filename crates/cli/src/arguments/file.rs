//! The configuration file: values of settings, in a section for each subcommand.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use clap::{
    Arg, Command, Error,
    error::{ContextKind, ContextValue, ErrorKind},
};
use tensorwire_protocol::text::escaped;
use toml::{Table, Value};

use super::variables::{is_flag, is_setting, with_variables};

/// The file's path below the folder of the user's configuration.
const USUAL: &str = "tensorwire/config.toml";

/// A configuration file in which every section, key and value is right.
#[derive(Debug)]
pub(crate) struct ConfigFile {
    path: PathBuf,
    sections: Table,
}

impl ConfigFile {
    /// Reads the file that the user has `named`, or else the usual one, if it is there.
    ///
    /// # Errors
    /// The file cannot be read, or has a section, key or value that cannot be used.
    pub(crate) fn read(named: Option<&Path>) -> Result<Option<Self>, Error> {
        let Some(path) = named.map(Path::to_owned).or_else(usual) else { return Ok(None) };
        // The home of another user, which `sudo` may leave in HOME, is often closed.
        if named.is_none() && fs::metadata(&path).is_err() {
            return Ok(None);
        }
        let unreadable =
            |error| refused(&path, &format!("{error}: name a file that can be read with --config"));
        let text = fs::read_to_string(&path).map_err(unreadable)?;
        let sections: Table =
            toml::from_str(&text).map_err(|error| refused(&path, &not_toml(&text, &error)))?;
        check(&sections).map_err(|problem| refused(&path, &problem))?;
        Ok(Some(Self { path, sections }))
    }

    /// The words of a command line for the settings of `subcommand` for which `is_wanted` holds.
    pub(crate) fn words(&self, subcommand: &Command, is_wanted: impl Fn(&Arg) -> bool) -> Vec<String> {
        let values = self.sections.get(subcommand.get_name()).and_then(Value::as_table);
        let values = values.into_iter().flatten();
        let set = values.filter_map(|(key, value)| Some((setting(subcommand, key)?, value)));
        let wanted = set.filter(|(option, _)| is_wanted(option));
        // They have been checked.
        wanted.filter_map(|(option, value)| words(option, value).ok()).flatten().collect()
    }

    /// The sentence about keys of this file in an error.
    pub(crate) fn tip(&self, subcommand: &str, keys: &[&str]) -> String {
        let path = self.path.display().to_string();
        format!("{} sets [{subcommand}] {}: change or remove it", escaped(&path), keys.join(" and "))
    }
}

/// The file's usual path: in the folder for the user's configuration (XDG Base Directory Specification).
fn usual() -> Option<PathBuf> {
    let folder = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = folder("XDG_CONFIG_HOME").or_else(|| Some(folder("HOME")?.join(".config")));
    folder.map(|folder| folder.join(USUAL))
}

fn refused(path: &Path, problem: &str) -> Error {
    let path = path.display().to_string();
    Error::raw(ErrorKind::ValueValidation, format!("{}: {}\n", escaped(&path), escaped(problem)))
}

fn not_toml(text: &str, error: &toml::de::Error) -> String {
    let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    format!("line {line}: {}: write TOML, for instance [pull] and below it memory = \"1G\"", error.message())
}

/// The setting of a subcommand that a key names.
fn setting<'a>(subcommand: &'a Command, key: &str) -> Option<&'a Arg> {
    subcommand.get_arguments().find(|option| is_setting(option) && option.get_long() == Some(key))
}

/// Checks every section, key and value, also of other subcommands than the one that runs.
fn check(sections: &Table) -> Result<(), String> {
    // Without any variables: a value of the environment might be the one that is refused.
    let command = with_variables(&|_| false)
        .mut_subcommands(|subcommand| subcommand.mut_args(|option| option.env(None)));
    let known: Vec<&Command> = command.get_subcommands().filter(|one| has_settings(one)).collect();
    let names = || known.iter().map(|one| format!("[{}]", one.get_name())).collect::<Vec<_>>().join(", ");
    for (section, values) in sections {
        let Some(values) = values.as_table() else {
            let value = shown(values);
            return Err(format!(
                "{section} = `{value}`: it is in no section: put it below one of {}",
                names()
            ));
        };
        let Some(subcommand) = known.iter().find(|one| one.get_name() == section) else {
            return Err(format!("[{section}]: there is no such section: use one of {}", names()));
        };
        for (key, value) in values {
            let problem = problem(&command, subcommand, key, value);
            if let Some(problem) = problem {
                return Err(format!("[{section}] {key} = `{}`: {problem}", shown(value)));
            }
        }
    }
    Ok(())
}

fn has_settings(subcommand: &Command) -> bool {
    subcommand.get_arguments().any(is_setting)
}

/// What is wrong with a key or its value, and the remedy.
fn problem(command: &Command, subcommand: &Command, key: &str, value: &Value) -> Option<String> {
    let Some(option) = setting(subcommand, key) else {
        let keys = subcommand.get_arguments().filter(|option| is_setting(option)).filter_map(Arg::get_long);
        return Some(format!("there is no such key: use one of {}", keys.collect::<Vec<_>>().join(", ")));
    };
    match words(option, value) {
        Err(remedy) => Some(format!("it is a TOML {}: {remedy}", value.type_str())),
        Ok(words) => words.iter().find_map(|word| refusal(command, subcommand.get_name(), word)),
    }
}

/// The words of a command line that set `option` to `value`.
///
/// # Errors
/// The remedy for a value of the wrong type.
fn words(option: &Arg, value: &Value) -> Result<Vec<String>, &'static str> {
    let long = option.get_long().unwrap_or_default();
    let with = |value: &Value, remedy| match value {
        Value::String(_) | Value::Integer(_) | Value::Float(_) => Ok(format!("--{long}={}", shown(value))),
        _ => Err(remedy),
    };
    let is_list = matches!(option.get_action(), clap::ArgAction::Append);
    match value {
        Value::Boolean(is_on) if is_flag(option) => {
            Ok(is_on.then(|| format!("--{long}")).into_iter().collect())
        }
        _ if is_flag(option) => Err("give true or false"),
        Value::Array(values) if is_list => {
            values.iter().map(|value| with(value, "give a list of texts or numbers")).collect()
        }
        _ if is_list => with(value, "give a text, a number, or a list of them").map(|word| vec![word]),
        _ => with(value, "give a text or a number").map(|word| vec![word]),
    }
}

/// Why the command line does not accept the value in `word`; what else such a line lacks does not matter.
fn refusal(command: &Command, subcommand: &str, word: &str) -> Option<String> {
    let error = command.clone().try_get_matches_from(["tensorwire", subcommand, word]).err()?;
    match error.kind() {
        ErrorKind::ValueValidation => {
            let source = std::error::Error::source(&error).map(ToString::to_string);
            Some(source.unwrap_or_else(|| "it cannot be used: see --help".to_owned()))
        }
        ErrorKind::InvalidValue => Some(match error.get(ContextKind::ValidValue) {
            Some(ContextValue::Strings(values)) if !values.is_empty() => {
                format!("give one of {}", values.join(", "))
            }
            _ => "give a value".to_owned(),
        }),
        _ => None,
    }
}

/// A value as in an error or on a command line.
fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::Boolean(is_on) => is_on.to_string(),
        Value::Datetime(time) => time.to_string(),
        Value::Array(values) => values.iter().map(shown).collect::<Vec<_>>().join(", "),
        Value::Table(_) => "{…}".to_owned(),
    }
}
