//! The manual pages, and the completions of shells, made from the definition of the command line.

use std::{fs, path::Path};

use crate::{
    arguments::{Completions, Man, variables::command},
    failure::Failure,
    output::OutputError,
    print,
};

/// The program's name.
const NAME: &str = "tensorwire";

/// Prints the completions for a shell.
pub(crate) fn completions(arguments: &Completions) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command(), NAME, &mut script);
    print(&String::from_utf8_lossy(&script))
}

/// Prints the manual page of the command, or writes all pages into the folder.
pub(crate) fn man(arguments: &Man) -> Result<(), Failure> {
    let Some(folder) = &arguments.folder else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command().disable_help_subcommand(true))
            .render(&mut page)
            .map_err(Failure::Print)?;
        return print(&String::from_utf8_lossy(&page));
    };
    write(folder).map_err(|source| OutputError::Io { path: folder.clone(), source }.into())
}

fn write(folder: &Path) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    clap_mangen::generate_to(command(), folder)
}
