//! Reads the command line, with the values of settings that it does not have from the environment and the configuration file.
//!
//! The order is: option, environment variable, configuration file, default. A value from a later one that excludes an option of an
//! earlier one is left out, because the user cannot take it back there.

use std::{collections::HashSet, ffi::OsString, path::PathBuf};

use clap::{
    Arg, ArgMatches, Command, CommandFactory, Error, FromArgMatches,
    builder::{BoolishValueParser, TypedValueParser},
    error::{ContextKind, ContextValue},
    parser::ValueSource,
};

use super::{
    Arguments,
    file::ConfigFile,
    variables::{CONFIG, is_flag, is_setting, variable, with_variables},
};

/// Reads `line`, whose first word is the program's name.
///
/// # Errors
/// What is wrong with it, with a variable or with the configuration file; or the help or the version that it asks for.
/// [`Error::exit`] prints them.
pub(crate) fn read(line: &[OsString]) -> Result<Arguments, Error> {
    let Some(written) = Written::of(line) else {
        let matches = with_variables(&|_| true).try_get_matches_from(line)?;
        return Arguments::from_arg_matches(&matches);
    };
    let file = match written.has_file {
        true => ConfigFile::read(written.file.as_deref())?,
        false => None,
    };
    // The subcommand is the first word after the program's name.
    let (before, after) = line.split_at(line.len().min(2));
    let words =
        file.iter().flat_map(|file| file.words(&written.subcommand, |option| written.is_open(option)));
    let line: Vec<OsString> =
        before.iter().cloned().chain(words.map(OsString::from)).chain(after.iter().cloned()).collect();
    let matches = with_variables(&|option| written.is_read(option)).try_get_matches_from(line);
    Arguments::from_arg_matches(&matches.map_err(|error| written.explained(error, file.as_ref()))?)
}

/// What is written on the command line, and which settings it leaves to the environment and the configuration file.
#[derive(Debug)]
struct Written {
    subcommand: Command,
    /// Options and arguments on the command line.
    given: HashSet<String>,
    /// Settings that have a variable, whether it is read or not.
    set: HashSet<String>,
    /// The settings whose variables are read: not those that exclude an option that is given. A flag without a value cannot be turned
    /// off, so a variable that turns one off is not read.
    read: HashSet<String>,
    has_file: bool,
    file: Option<PathBuf>,
}

impl Written {
    /// `None` without a subcommand, or if help is asked for. Other errors of `line` are found later.
    fn of(line: &[OsString]) -> Option<Self> {
        let matches = with_variables(&|_| false).ignore_errors(true).try_get_matches_from(line).ok()?;
        let (name, matches) = matches.subcommand()?;
        // With the variables that several subcommands share.
        let subcommand = Arguments::command().find_subcommand(name)?.clone();
        let given = given(matches);
        let ids = |is_one: &dyn Fn(&Arg) -> bool| -> HashSet<String> {
            let settings = subcommand.get_arguments().filter(|option| is_setting(option));
            settings.filter(|option| is_one(option)).map(|option| option.get_id().to_string()).collect()
        };
        let set = ids(&|option| std::env::var_os(variable(name, option)).is_some());
        let read = ids(&|option| {
            set.contains(option.get_id().as_str())
                && !is_off(name, option)
                && !excludes(&subcommand, option, &given)
        });
        let has_file = subcommand.get_arguments().any(is_setting);
        let file = matches.try_get_one::<PathBuf>(CONFIG).ok().flatten().cloned();
        Some(Self { given, set, read, has_file, file, subcommand })
    }

    fn is_read(&self, option: &Arg) -> bool {
        // A variable that is not set is shown in the help.
        let id = option.get_id().as_str();
        self.read.contains(id) || !self.set.contains(id)
    }

    /// Whether the configuration file may set the option.
    fn is_open(&self, option: &Arg) -> bool {
        let id = option.get_id().as_str();
        let before: HashSet<String> = self.given.union(&self.read).cloned().collect();
        !self.set.contains(id) && !before.contains(id) && !excludes(&self.subcommand, option, &before)
    }

    /// `error`, with the variables and the keys that have the values of the options in it.
    fn explained(&self, mut error: Error, file: Option<&ConfigFile>) -> Error {
        let (name, text) = (self.subcommand.get_name(), error.to_string());
        let is_named =
            |option: &&Arg| option.get_long().is_some_and(|long| text.contains(&format!("'--{long}")));
        let settings = self.subcommand.get_arguments().filter(|option| is_setting(option));
        let named: Vec<&Arg> = settings.filter(is_named).collect();
        let read = named.iter().filter(|option| self.read.contains(option.get_id().as_str()));
        let variables: Vec<String> = read
            .filter(|option| !self.given.contains(option.get_id().as_str()))
            .map(|option| variable(name, option))
            .collect();
        let mut tips = Vec::new();
        if !variables.is_empty() {
            tips.push(format!("the environment sets {}: change or unset it", variables.join(" and ")));
        }
        if let Some(file) = file {
            let is_from_file = |option: &&Arg| {
                let is_this = |other: &Arg| other.get_id() == option.get_id();
                !file.words(&self.subcommand, |other| is_this(other) && self.is_open(other)).is_empty()
            };
            let keys: Vec<&str> =
                named.iter().copied().filter(is_from_file).filter_map(Arg::get_long).collect();
            tips.extend((!keys.is_empty()).then(|| file.tip(name, &keys)));
        }
        if !tips.is_empty() {
            let tips = tips.into_iter().map(Into::into).collect();
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
        }
        error
    }
}

/// The options and arguments of a subcommand that are on the command line.
fn given(matches: &ArgMatches) -> HashSet<String> {
    let ids = matches.ids().map(clap::Id::as_str);
    let is_given = |id: &&str| matches.value_source(id) == Some(ValueSource::CommandLine);
    ids.filter(is_given).map(str::to_owned).collect()
}

/// Whether `option` cannot be used with one of those `given`.
fn excludes(subcommand: &Command, option: &Arg, given: &HashSet<String>) -> bool {
    let conflicts = |one: &Arg, is_other: &dyn Fn(&Arg) -> bool| {
        subcommand.get_arg_conflicts_with(one).into_iter().any(is_other)
    };
    let is_given = |other: &Arg| given.contains(other.get_id().as_str());
    let mut others = subcommand.get_arguments().filter(|other| is_given(other));
    !is_given(option)
        && (conflicts(option, &is_given)
            || others.any(|other| conflicts(other, &|one| one.get_id() == option.get_id())))
}

/// Whether the variable of this flag turns it off.
fn is_off(subcommand: &str, option: &Arg) -> bool {
    let value =
        std::env::var_os(variable(subcommand, option)).filter(|_| is_setting(option) && is_flag(option));
    let read =
        value.and_then(|value| BoolishValueParser::new().parse_ref(&Command::new(""), None, &value).ok());
    read == Some(false)
}
