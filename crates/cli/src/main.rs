//! The `tensorwire` command: serves the tensors of safetensors files, pulls and follows them, lists them, shows what a worker does, measures
//! the speed, lists RDMA devices, and checks whether they can be used. It also prints its manual pages and the completions of shells.
#![forbid(unsafe_code)]

mod arguments;
mod bench;
mod budget;
mod checkpoint;
mod console;
mod devices;
mod doctor;
mod exit;
mod failure;
mod follow;
mod header;
mod index;
mod layout;
mod link;
mod list;
mod loading;
mod machine;
mod manual;
mod mapped_file;
mod output;
mod peering;
mod plan;
mod progress;
mod pull;
mod reachable_address;
mod resume;
mod round;
mod separate_thread;
mod serve;
mod signals;
mod sink;
mod size;
mod source;
mod table;
mod tls;
mod top;
mod watch;

use std::{
    ffi::OsString,
    io::{IsTerminal, Write},
    process::ExitCode,
};

use tensorwire_protocol::text::escaped;
use tracing_subscriber::EnvFilter;

use crate::{
    arguments::{Arguments, Command},
    failure::Failure,
    signals::{AtSignal, at_signal},
};

/// The log filter unless `RUST_LOG` is set. The HTTP/2 library warns of unexpected frames as often as peers send them, so its
/// warnings are off.
const LOG_FILTER: &str = "warn,h2=error";

fn main() -> ExitCode {
    // clap exits with code 2 for a wrong command line.
    let line: Vec<OsString> = std::env::args_os().collect();
    let arguments =
        arguments::line::read(&line).unwrap_or_else(|error| arguments::bench::with_new_home(error).exit());
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(LOG_FILTER));
    let colours = has_colours(std::io::stderr().is_terminal(), std::env::var_os("NO_COLOR"));
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr).init();
    match run(&arguments) {
        Ok(code) => code,
        Err(failure) => {
            // The error may quote a file's name or a server's text, so it is escaped to stay on one line.
            eprintln!("tensorwire: {}", escaped(&failure.to_string()));
            failure.exit().into()
        }
    }
}

/// Whether lines of the log are coloured: on a terminal, unless `NO_COLOR` is set.
fn has_colours(is_terminal: bool, no_color: Option<OsString>) -> bool {
    is_terminal && no_color.is_none_or(|value| value.is_empty())
}

fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    if std::process::id() == 1 {
        at_signal(AtSignal::End).map_err(Failure::Runtime)?;
    }
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::Runtime)?;
    runtime.block_on(async {
        match &arguments.command {
            Command::Devices(arguments) => return devices::devices(arguments),
            Command::Doctor(arguments) => return doctor::doctor(arguments).await,
            Command::Serve(serve) => serve::serve(serve).await?,
            Command::Pull(pull) => pull::pull(pull).await?,
            Command::List(list) => list::list(list).await?,
            Command::Top(arguments) => top::top(arguments).await?,
            Command::Bench(arguments) => bench::bench(arguments).await?,
            Command::Completions(arguments) => manual::completions(arguments)?,
            Command::Man(arguments) => manual::man(arguments)?,
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// Writes to standard output. A reader that closes its pipe is no failure.
fn print(text: &str) -> Result<(), Failure> {
    print_to_reader(text).map(drop)
}

/// As [`print`]. Returns whether the reader is still there.
fn print_to_reader(text: &str) -> Result<bool, Failure> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::Print(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::has_colours;

    #[test]
    fn colours_are_for_terminals_and_no_color_turns_them_off() {
        assert!(has_colours(true, None) && has_colours(true, Some("".into())));
        assert!(!has_colours(true, Some("1".into())) && !has_colours(false, None));
    }
}
