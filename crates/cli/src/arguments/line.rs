//! Reads the command line, with the values of settings that it does not have from the environment.
//!
//! The order is: option, environment variable, configuration file, default. A value from a later one that excludes an option of an
//! earlier one is left out, because the user cannot take it back on the command line.

use std::{collections::HashSet, ffi::OsString};

use clap::{
    Arg, ArgMatches, Command, CommandFactory, Error, FromArgMatches,
    builder::{BoolishValueParser, TypedValueParser},
    error::{ContextKind, ContextValue},
    parser::ValueSource,
};

use super::{
    Arguments,
    variables::{is_flag, is_setting, variable, with_variables},
};

/// Reads `line`, whose first word is the program's name.
///
/// # Errors
/// What is wrong with it, or the help or the version that it asks for: [`Error::exit`] prints them.
pub(crate) fn read(line: &[OsString]) -> Result<Arguments, Error> {
    let written = Written::of(line);
    let is_read = |option: &Arg| written.is_read(option);
    let matches =
        with_variables(&is_read).try_get_matches_from(line).map_err(|error| written.explained(error))?;
    Arguments::from_arg_matches(&matches)
}

/// What is written on the command line, and which options it leaves to others.
#[derive(Debug, Default)]
struct Written {
    subcommand: String,
    /// The options on the command line.
    given: HashSet<String>,
    /// Those that exclude one of them.
    excluded: HashSet<String>,
    /// Flags whose variable turns them off.
    off: HashSet<String>,
}

impl Written {
    /// Errors of `line` are found later.
    fn of(line: &[OsString]) -> Self {
        let mut command = with_variables(&|_| false).ignore_errors(true);
        let Ok(matches) = command.try_get_matches_from_mut(line) else { return Self::default() };
        let Some((name, matches)) = matches.subcommand() else { return Self::default() };
        let Some(subcommand) = command.find_subcommand(name) else { return Self::default() };
        let given = given(matches);
        let excluded = subcommand
            .get_arguments()
            .filter(|option| excludes(subcommand, option, &given))
            .map(|option| option.get_id().to_string())
            .collect();
        let off = Arguments::command();
        let settings = off.find_subcommand(name).into_iter().flat_map(Command::get_arguments);
        let off = settings.filter(|option| is_off(name, option)).map(|option| option.get_id().to_string());
        Self { subcommand: name.to_owned(), given, excluded, off: off.collect() }
    }

    /// Whether the option is read from its variable. Without a value it cannot be turned off, so such a variable is not read.
    fn is_read(&self, option: &Arg) -> bool {
        let id = option.get_id().as_str();
        !self.excluded.contains(id) && !self.off.contains(id)
    }

    /// `error`, with the variables that have the values of the options in it.
    fn explained(&self, mut error: Error) -> Error {
        let text = error.to_string();
        let command = Arguments::command();
        let settings = command.find_subcommand(&self.subcommand).into_iter().flat_map(Command::get_arguments);
        let read = settings.filter(|option| {
            let is_named = option.get_long().is_some_and(|long| text.contains(&format!("'--{long}")));
            is_setting(option)
                && is_named
                && self.is_read(option)
                && !self.given.contains(option.get_id().as_str())
        });
        let variables = read.map(|option| variable(&self.subcommand, option));
        let set: Vec<String> = variables.filter(|name| std::env::var_os(name).is_some()).collect();
        if !set.is_empty() {
            let tip = format!("the environment sets {}: change or unset it", set.join(" and "));
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
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
        subcommand.get_arg_conflicts_with(one).into_iter().any(|other| is_other(other))
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
