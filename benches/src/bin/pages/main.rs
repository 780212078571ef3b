//! Pages of an arena, in random order, between two processes of one host, and beside them, in turns, one fetch of a tensor of as many bytes.

#![allow(clippy::disallowed_methods)] // it measures real time on tokio's runtime

mod side;

use clap::Parser;
use tensorwire::FabricKind;
use tensorwire_benches::{Failure, process::Process};

use crate::side::{Times, measure, serve};

/// Environment variable of the child that serves: the fabric, and the arguments.
const PART: &str = "TENSORWIRE_BENCH_PAGES";

/// Measures reads and writes of pages at random places of two arenas, and fetches of one tensor of the same length into a buffer. Prints the
/// medians, and the bandwidth of pages as a part of that of the tensor.
#[derive(Debug, Clone, Parser)]
struct Arguments {
    /// Mebibytes of each arena.
    #[arg(long, default_value_t = 1024, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=65_536))]
    arena_mib: usize,
    /// Kibibytes of a page.
    #[arg(long, default_value_t = 64, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=65_536))]
    page_kib: usize,
    /// Mebibytes of each transfer, at most an arena.
    #[arg(long, default_value_t = 256, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=65_536))]
    transfer_mib: usize,
    /// Only this fabric: `shm` or `tcp`.
    #[arg(long)]
    only: Option<String>,
    /// Measurements of each row. The median is printed.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

impl Arguments {
    fn page_bytes(&self) -> usize {
        self.page_kib << 10
    }

    /// Pages of an arena.
    fn pages(&self) -> u32 {
        u32::try_from((self.arena_mib << 20) / self.page_bytes()).unwrap_or(u32::MAX).max(1)
    }

    /// Pages of a transfer.
    fn moved(&self) -> u32 {
        let pages = u32::try_from((self.transfer_mib << 20) / self.page_bytes()).unwrap_or(u32::MAX);
        pages.clamp(1, self.pages())
    }

    /// Bytes of a transfer.
    fn bytes(&self) -> usize {
        self.moved() as usize * self.page_bytes()
    }

    fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
        Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
    }
}

fn main() -> Result<(), Failure> {
    let arguments = Arguments::parse();
    if let Ok(name) = std::env::var(PART) {
        return Arguments::runtime()?.block_on(async { tokio::spawn(serve(arguments, kind(&name))).await? });
    }
    println!("| fabric | tensor | pages read | of the tensor | pages written | of the tensor |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for name in ["shm", "tcp"] {
        if arguments.only.as_deref().is_some_and(|only| only != name) {
            continue;
        }
        print_row(&arguments, name, Arguments::runtime()?.block_on(run(arguments.clone(), name))?);
    }
    Ok(())
}

fn kind(name: &str) -> FabricKind {
    if name == "tcp" { FabricKind::TCP } else { FabricKind::SHM }
}

async fn run(arguments: Arguments, name: &'static str) -> Result<Times, Failure> {
    let mut command = std::process::Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1)).env(PART, name);
    let server = Process::spawn(command, name)?;
    let address = server.hear()?;
    tokio::spawn(async move { measure(&arguments, kind(name), &address).await }).await?
}

fn print_row(arguments: &Arguments, name: &str, times: Times) {
    let [tensor, read, written] = [times.tensor, times.read, times.written].map(middle);
    let rate = |seconds: f64| format!("{:.2} GB/s", arguments.bytes() as f64 / seconds / 1e9);
    let (read_part, written_part) = (tensor / read, tensor / written);
    println!(
        "| {name} | {} | {} | {read_part:.2} | {} | {written_part:.2} |",
        rate(tensor),
        rate(read),
        rate(written)
    );
}

/// The median.
fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
