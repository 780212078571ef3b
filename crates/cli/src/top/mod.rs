//! `tensorwire top`: what a running worker does, again and again.

mod json;
mod text;
mod view;

use std::io::IsTerminal;

use tensorwire::{Worker, fabric::Runtime};
use tokio::sync::oneshot;

use self::view::{View, Watch};
use crate::{
    arguments::Top,
    failure::Failure,
    has_colours,
    link::runtime,
    print_to_reader,
    signals::{AtSignal, at_signal},
};

/// Clears the screen, and goes to its beginning.
const CLEAR: &str = "\x1b[H\x1b[2J\x1b[3J";

/// Prints views of the worker at the address until a signal, until the reader is gone, or one only.
pub(crate) async fn top(arguments: &Top) -> Result<(), Failure> {
    let worker = arguments.peering.apply(Worker::client())?.start().await?;
    let shown = show(arguments, &worker).await;
    worker.shutdown().await;
    shown
}

async fn show(arguments: &Top, worker: &Worker) -> Result<(), Failure> {
    let peer = {
        let _shown = arguments.console.phase("connecting");
        worker.peer_at(&arguments.address).await?
    };
    let (wake, mut woken) = oneshot::channel();
    if !arguments.once {
        at_signal(AtSignal::Wake(wake)).map_err(Failure::Runtime)?;
    }
    let (runtime, screen, mut watch) = (runtime()?, Screen::of_stdout(), Watch::default());
    let mut is_first = true;
    loop {
        let view = watch.view(peer.report().await?);
        // A single view has rates, for which two reports are needed.
        let is_shown = !(arguments.once && is_first);
        if is_shown && (!print_to_reader(&screen.page(arguments, &view)?)? || arguments.once) {
            return Ok(());
        }
        is_first = false;
        let pause = runtime.sleep(arguments.interval);
        if arguments.once {
            pause.await;
        } else {
            tokio::select! {
                _ = &mut woken => return Ok(()),
                () = pause => {}
            }
        }
    }
}

/// What standard output is.
#[derive(Debug, Clone, Copy)]
struct Screen {
    /// A view replaces the one before.
    is_terminal: bool,
    has_colours: bool,
}

impl Screen {
    fn of_stdout() -> Self {
        let is_dumb = std::env::var_os("TERM").is_none_or(|terminal| terminal == "dumb");
        let is_terminal = std::io::stdout().is_terminal() && !is_dumb;
        Self { is_terminal, has_colours: has_colours(is_terminal, std::env::var_os("NO_COLOR")) }
    }

    /// The view, as it is printed.
    fn page(self, arguments: &Top, view: &View) -> Result<String, Failure> {
        if arguments.console.json {
            return json::line(view);
        }
        let text = text::text(view);
        // Lines that are wider would wrap, and push the first ones out of the screen.
        Ok(match rustix::termios::tcgetwinsize(std::io::stdout()) {
            Ok(size) if self.is_terminal && !arguments.once => {
                CLEAR.to_owned() + &text::cut(&text, size.ws_col.into(), size.ws_row.into(), self.has_colours)
            }
            _ if arguments.once => text,
            _ => text + "\n",
        })
    }
}
