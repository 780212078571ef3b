//! The settings among the options, and the environment variable of each.

use clap::{
    Arg, ArgAction, Command, CommandFactory,
    builder::{BoolishValueParser, ValueParser},
};

use super::Arguments;

/// The option that names the configuration file.
pub(crate) const CONFIG: &str = "config";

/// Whether the environment and the configuration file may set the option. They set how a subcommand works, not what it is about: not its
/// positional arguments, and not an option that may be given without a value, such as `bench --serve`.
pub(crate) fn is_setting(option: &Arg) -> bool {
    let is_mode = option.get_num_args().is_some_and(|count| count.min_values() == 0 && count.takes_values());
    let sets = matches!(option.get_action(), ArgAction::Set | ArgAction::Append | ArgAction::SetTrue);
    let is_file = option.get_id() == CONFIG;
    option.get_long().is_some() && sets && !is_mode && !is_file && !option.is_hide_set()
}

/// Whether the option is given without a value.
pub(crate) fn is_flag(option: &Arg) -> bool {
    matches!(option.get_action(), ArgAction::SetTrue)
}

/// The environment variable of a setting. Options that several subcommands share name theirs; the others' have the subcommand in the name.
pub(crate) fn variable(subcommand: &str, option: &Arg) -> String {
    let shared = option.get_env().map(|name| name.to_string_lossy().into_owned());
    let own = || format!("tensorwire_{subcommand}_{}", option.get_long().unwrap_or_default());
    shared.unwrap_or_else(|| own().replace('-', "_").to_uppercase())
}

/// The whole command line, with the variable of every setting.
pub(crate) fn command() -> Command {
    with_variables(&|_| true)
}

/// The same, where only the settings for which `is_read` holds are taken from their variables. Each subcommand with settings has the option
/// that names the configuration file.
pub(crate) fn with_variables(is_read: &dyn Fn(&Arg) -> bool) -> Command {
    Arguments::command().mut_subcommands(|subcommand| {
        let name = subcommand.get_name().to_owned();
        let has_settings = subcommand.get_arguments().any(is_setting);
        let subcommand = subcommand.mut_args(|option| match is_setting(&option) {
            true if is_read(&option) => {
                let variable = variable(&name, &option);
                with_variable(option, variable)
            }
            _ => option.env(None),
        });
        if has_settings { subcommand.arg(config()) } else { subcommand }
    })
}

fn with_variable(option: Arg, variable: String) -> Arg {
    let option = option.env(variable);
    if is_flag(&option) { option.value_parser(BoolishValueParser::new()) } else { option }
}

/// The option that names the configuration file.
fn config() -> Arg {
    let help = "File with values for options that neither the command line nor the environment has: TOML, with a \
                section for each subcommand. Without this option $XDG_CONFIG_HOME/tensorwire/config.toml, if it is there";
    let option = Arg::new(CONFIG).long(CONFIG).value_name("FILE").env("TENSORWIRE_CONFIG").help(help);
    option.value_parser(ValueParser::path_buf())
}

/// The variables of a subcommand's settings.
pub(crate) fn variables(subcommand: &str) -> Vec<String> {
    let command = Arguments::command();
    let settings = command.find_subcommand(subcommand).into_iter().flat_map(Command::get_arguments);
    settings.filter(|option| is_setting(option)).map(|option| variable(subcommand, option)).collect()
}

#[cfg(test)]
mod tests {
    use super::{command, is_setting};

    #[test]
    fn every_setting_shows_a_variable_of_its_name() {
        for subcommand in command().get_subcommands() {
            for option in subcommand.get_arguments().filter(|option| is_setting(option)) {
                let long = option.get_long().unwrap().replace('-', "_").to_uppercase();
                let own = format!("TENSORWIRE_{}_{long}", subcommand.get_name().to_uppercase());
                let shown = option.get_env().unwrap().to_str().unwrap();
                assert!(shown == own || shown == format!("TENSORWIRE_{long}"), "{shown}");
            }
        }
    }

    #[test]
    fn what_a_subcommand_is_about_has_no_variable() {
        let command = command();
        let about = |subcommand: &str, id: &str| {
            let subcommand = command.find_subcommand(subcommand).unwrap();
            subcommand.get_arguments().find(|option| option.get_id() == id).unwrap().get_env().is_none()
        };
        assert!(about("pull", "address") && about("serve", "path") && about("bench", "serve"));
        assert!(!about("pull", "memory") && !about("bench", "json"));
    }
}
