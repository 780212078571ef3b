//! The command line.

pub(crate) mod bench;
mod file;
pub(crate) mod line;
pub(crate) mod variables;

use std::{num::NonZeroU32, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;
use tensorwire::{FabricKind, settings::Validation};

use crate::{console::Console, exit};

/// Moves tensors between processes.
#[derive(Debug, Parser)]
#[command(name = "tensorwire", version, max_term_width = 100, after_help = exit::help())]
pub(crate) struct Arguments {
    /// The subcommand.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Read safetensors files into memory and serve their tensors until Ctrl-C.
    Serve(Serve),
    /// Fetch tensors from a server, and write them to safetensors files.
    Pull(Pull),
    /// List the tensors that a worker has published.
    List(List),
    /// Show what a running worker does: its peers, rates, sets and memory, again each second until Ctrl-C.
    Top(Top),
    /// List the RDMA devices, their ports and addresses, and which one Tensorwire would use.
    Devices(Devices),
    /// Check which fabrics can be used here, RDMA above all, and if not, why and what to do.
    Doctor(Doctor),
    /// Measure how fast tensors are between two hosts, or two processes of this one.
    Bench(bench::Bench),
    /// Print the completions of this command for a shell.
    Completions(Completions),
    /// Print the manual page, or write it and those of the subcommands into a folder.
    Man(Man),
}

/// `tensorwire serve`.
#[derive(Debug, Args)]
#[command(after_help = exit::help())]
pub(crate) struct Serve {
    /// A safetensors file, a folder of them, or the index of a checkpoint in several files (`*.index.json`). Of a folder
    /// all `*.safetensors` files are served that are not hidden, of an index the files that it names.
    #[arg(value_name = "PATH")]
    pub(crate) path: PathBuf,
    /// Look at the files twice a second, and serve them again as a new version when they have changed: replaced by a
    /// rename, overwritten in place, added to the folder or removed. A version is served once all files are complete and
    /// have not changed between two looks; until then the one before stays. `pull --follow` gets each version.
    #[arg(long, conflicts_with = "mmap")]
    pub(crate) watch: bool,
    /// Address to listen at, for sessions and data; port 0 takes a free one. Anything beyond loopback needs --secret-file or --tls-cert.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0", value_parser = address)]
    pub(crate) bind: String,
    /// Separate address for data connections over TCP, for instance on a faster network. Without it they use the
    /// address of --bind.
    #[arg(long, value_name = "HOST:PORT", value_parser = address)]
    pub(crate) data_bind: Option<String>,
    /// Map the files instead of reading them, and send from the mapping. A file must belong to this user or to root, and
    /// only its owner may have the right to write it. A process that changes it in place waits until it is copied into
    /// memory. If the system does not support that, it is read as without this option. Not with --watch. Receivers over shared
    /// memory get copies, one for each receiver; over TCP nothing is copied.
    #[arg(long)]
    pub(crate) mmap: bool,
    #[command(flatten)]
    pub(crate) validate: Validate,
    #[command(flatten)]
    pub(crate) peering: Peering,
    #[command(flatten)]
    pub(crate) console: Console,
}

/// `tensorwire pull`.
#[derive(Debug, Args)]
#[command(after_help = exit::help())]
pub(crate) struct Pull {
    /// Address that the server printed, for instance 127.0.0.1:4242.
    #[arg(value_name = "HOST:PORT", value_parser = address)]
    pub(crate) address: String,
    /// File to write, or folder if the server serves a folder or an index; a missing folder is made. A file appears when
    /// it is complete, or not at all; those of a folder are renamed at the end, one after the other. A file gets the mode
    /// and, if that is allowed, the owner of a file that it replaces; a symbolic link is followed. A FIFO, a character
    /// device, or standard output (`-`) is written in order instead; all messages go to standard error then. Without this
    /// option tensors are fetched and dropped.
    #[arg(short, long, value_name = "PATH")]
    pub(crate) output: Option<PathBuf>,
    /// Keep the output current until Ctrl-C: write each version of a server with --watch, and print a line for it. Files
    /// that have not changed are not written again; files that the server does not have any more are removed, if this
    /// process wrote them. If the server is lost, it is asked again for as long as it takes.
    #[arg(long, requires = "output", conflicts_with_all = ["resume", "no_clobber", "tensor", "retry", "repeat", "verify", "stats"])]
    pub(crate) follow: bool,
    /// With --follow: if the server is restarted with older files, take them. Without this option the newer ones stay.
    #[arg(long)]
    pub(crate) accept_restart: bool,
    /// Keep what was written when the pull fails or is ended, in a hidden file beside the output. The next pull with this option and the
    /// same output continues it: what the output has of the server's tensors, by their checksums, is not fetched again.
    /// Without effect if the output is no file and no folder.
    #[arg(long, conflicts_with = "repeat")]
    pub(crate) resume: bool,
    /// Do not replace a file: if there is one at --output, fail before anything is fetched.
    #[arg(long)]
    pub(crate) no_clobber: bool,
    /// Fetch this tensor only. Can be repeated for several tensors.
    #[arg(long, value_name = "NAME")]
    pub(crate) tensor: Vec<String>,
    /// Memory for tensors that are under way or wait to be written, in bytes, with K, M or G for powers of 1024. A tensor
    /// that is larger is fetched alone, and takes up to a quarter more than its own size. Tensors that are read out of the
    /// server's memory, on one host, take none. With --follow: for a version and the one after it, and 64G unless it is
    /// given. [default: 256M]
    #[arg(long, value_name = "SIZE", value_parser = memory_bytes)]
    pub(crate) memory: Option<u64>,
    /// If the server is lost during the pull, try for this many seconds to reach it again, each time, and continue. If it
    /// then serves another file, the pull fails.
    #[arg(long, value_name = "SECONDS")]
    pub(crate) retry: Option<u32>,
    /// The transport. `auto` takes shared memory from this host; from another host RDMA if both have it, otherwise TCP.
    /// If a named one cannot be used, that is an error.
    #[arg(long, value_enum, default_value_t = Fabric::Auto)]
    pub(crate) fabric: Fabric,
    /// Fetch everything this many times, and report each round.
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) repeat: NonZeroU32,
    /// Compare each tensor with the checksum that the server publishes.
    #[arg(long)]
    pub(crate) verify: bool,
    /// Print the messages of each round by kind, the bytes and the transport.
    #[arg(long)]
    pub(crate) stats: bool,
    #[command(flatten)]
    pub(crate) validate: Validate,
    #[command(flatten)]
    pub(crate) peering: Peering,
    #[command(flatten)]
    pub(crate) console: Console,
}

impl Pull {
    /// Memory for tensors, in bytes.
    pub(crate) fn memory(&self) -> u64 {
        // A follower has a whole version, and the next one.
        self.memory.unwrap_or(if self.follow { 64 << 30 } else { 256 << 20 })
    }
}

/// `tensorwire list`.
#[derive(Debug, Args)]
#[command(after_help = exit::help())]
pub(crate) struct List {
    /// Address of the worker, for instance the one that `tensorwire serve` printed.
    #[arg(value_name = "HOST:PORT", value_parser = address)]
    pub(crate) address: String,
    #[command(flatten)]
    pub(crate) peering: Peering,
    #[command(flatten)]
    pub(crate) console: Console,
}

/// `tensorwire top`.
#[derive(Debug, Args)]
#[command(after_help = exit::help())]
pub(crate) struct Top {
    /// Address of the worker, for instance the one that `tensorwire serve` printed.
    #[arg(value_name = "HOST:PORT", value_parser = address)]
    pub(crate) address: String,
    /// Time between two views, from 0.1 on. Rates are those of this time.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub(crate) interval: Duration,
    /// Print one view, with the rates of one interval, and end.
    #[arg(long)]
    pub(crate) once: bool,
    #[command(flatten)]
    pub(crate) peering: Peering,
    #[command(flatten)]
    pub(crate) console: Console,
}

const DEVICES_STATUS: &str = "\
Exit status: 0 if a device can be opened, 1 if none can (the last line says why), otherwise as in the \
table of `tensorwire --help`. With --json the same is one object; its fields are in the book's page on devices and doctor.";

/// `tensorwire devices`.
#[derive(Debug, Args)]
#[command(after_help = DEVICES_STATUS)]
pub(crate) struct Devices {
    #[command(flatten)]
    pub(crate) console: Console,
}

const DOCTOR_STATUS: &str = "\
Each line is a finding: ok, warning (RDMA works all the same) or problem, with a remedy below. The proof is a write of \
1 MiB between two queue pairs of the device, and the same over shared memory and TCP. The last line is the verdict.

Exit status: 0 if the fabrics that --require names can be used, or any without it; 1 if not; otherwise as in the \
table of `tensorwire --help`. With --json the same is one object; its fields, and all findings, are in the book's page on devices and doctor.";

const COMPLETIONS: &str = "\
Examples:
  tensorwire completions bash > ~/.local/share/bash-completion/completions/tensorwire
  tensorwire completions zsh > ~/.zfunc/_tensorwire            with fpath+=~/.zfunc before compinit in ~/.zshrc
  tensorwire completions fish > ~/.config/fish/completions/tensorwire.fish";

/// `tensorwire completions`.
#[derive(Debug, Args)]
#[command(after_help = COMPLETIONS)]
pub(crate) struct Completions {
    /// The shell.
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

const MAN: &str = "\
Examples:
  tensorwire man | man -l -
  tensorwire man ~/.local/share/man/man1";

/// `tensorwire man`.
#[derive(Debug, Args)]
#[command(after_help = MAN)]
pub(crate) struct Man {
    /// Folder for the pages tensorwire.1, tensorwire-pull.1 and so on. A missing one is made.
    #[arg(value_name = "DIR")]
    pub(crate) folder: Option<PathBuf>,
}

/// `tensorwire doctor`.
#[derive(Debug, Args)]
#[command(after_help = DOCTOR_STATUS)]
pub(crate) struct Doctor {
    /// Examine this device. Without it, the one that Tensorwire would use.
    #[arg(long, value_name = "NAME")]
    pub(crate) device: Option<String>,
    /// Bytes of memory that workers are going to register, with K, M or G for powers of 1024. The limit on locked memory
    /// is compared with it.
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = pool_bytes)]
    pub(crate) pool: u64,
    /// Exit with 1 unless this fabric can be used. Can be repeated, or have several between commas.
    #[arg(long, value_enum, value_name = "FABRIC", value_delimiter = ',')]
    pub(crate) require: Vec<FabricName>,
    #[command(flatten)]
    pub(crate) console: Console,
}

/// Whether received bytes are validated.
#[derive(Debug, Args)]
pub(crate) struct Validate {
    /// Validate each transfer end to end by this checksum. If the peer wants a stronger one, that is used.
    #[arg(long = "validate", value_enum, default_value_t = Checksum::Off, env = "TENSORWIRE_VALIDATE")]
    pub(crate) checksum: Checksum,
}

/// The checksums that the option accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Checksum {
    /// None.
    Off,
    /// CRC-32C.
    Crc32c,
    /// XXH3, of 64 bits.
    Xxh3,
}

impl Checksum {
    pub(crate) fn validation(self) -> Validation {
        match self {
            Self::Off => Validation::Off,
            Self::Crc32c => Validation::Crc32c,
            Self::Xxh3 => Validation::Xxh3,
        }
    }
}

/// Whether peers are trusted.
#[derive(Debug, Args)]
pub(crate) struct Trust {
    /// Whether peers that know the secret are trusted. With `hostile` each peer can write only memory of its own, which
    /// costs one copy of received tensors; shared memory is not used.
    #[arg(long = "trust", value_enum, default_value_t = Peers::Cluster, env = "TENSORWIRE_TRUST")]
    pub(crate) peers: Peers,
}

/// The levels of trust.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peers {
    /// Members of one cluster, which are trusted.
    Cluster,
    /// Peers that may write anything that they can.
    Hostile,
}

impl Peers {
    pub(crate) fn trust(self) -> tensorwire::settings::Trust {
        match self {
            Self::Cluster => tensorwire::settings::Trust::Cluster,
            Self::Hostile => tensorwire::settings::Trust::Hostile,
        }
    }
}

/// How a worker and its peer trust, watch and authenticate each other.
#[derive(Debug, Args)]
pub(crate) struct Peering {
    #[command(flatten)]
    pub(crate) trust: Trust,
    #[command(flatten)]
    pub(crate) liveness: Liveness,
    #[command(flatten)]
    pub(crate) secret: Secret,
    #[command(flatten)]
    pub(crate) tls: Tls,
}

/// When a silent peer counts as lost.
#[derive(Debug, Args)]
pub(crate) struct Liveness {
    /// How long a peer may be silent, answering no ping and moving no data, before it counts as lost.
    #[arg(long = "liveness", value_name = "SECONDS", default_value_t = 30, env = "TENSORWIRE_LIVENESS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) seconds: u32,
}

impl Liveness {
    pub(crate) fn limit(&self) -> Duration {
        Duration::from_secs(self.seconds.into())
    }
}

/// How the two peers authenticate each other.
#[derive(Debug, Args)]
pub(crate) struct Secret {
    /// File with the secret that both peers share. On loopback none is needed if both run as one user.
    #[arg(long, value_name = "PATH", env = "TENSORWIRE_SECRET_FILE")]
    pub(crate) secret_file: Option<PathBuf>,
}

/// How the two peers authenticate each other by certificates. A program that is built without TLS accepts these options
/// and then refuses to run, so that they are never ignored.
#[derive(Debug, Args)]
pub(crate) struct Tls {
    /// Certificate chain of this worker, as PEM: turns on mutual TLS. Its subjectAltName names the worker:
    /// URI:tensorwire:/job:serve/replica:0/task:0 of a server, URI:tensorwire:/job:pull/replica:0/task:* of a client.
    #[arg(long, value_name = "PATH", env = TLS_CERT, requires_all = ["tls_key", "tls_ca"])]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Its private key, as PEM.
    #[arg(long, value_name = "PATH", env = TLS_KEY, requires_all = ["tls_cert", "tls_ca"])]
    pub(crate) tls_key: Option<PathBuf>,
    /// Certificates of the trusted CAs, as PEM.
    #[arg(long, value_name = "PATH", env = TLS_CA, requires_all = ["tls_cert", "tls_key"])]
    pub(crate) tls_ca: Option<PathBuf>,
    /// What a peer's certificate must have besides a trusted CA's signature: the worker's name and, for a server, the
    /// dialled host; the worker's name alone; or nothing more.
    #[arg(long, value_enum, value_name = "NAMES", env = TLS_NAMES, requires = "tls_cert")]
    pub(crate) tls_names: Option<Names>,
}

/// The environment variables that set options.
pub(crate) const TLS_CERT: &str = "TENSORWIRE_TLS_CERT";
pub(crate) const TLS_KEY: &str = "TENSORWIRE_TLS_KEY";
pub(crate) const TLS_CA: &str = "TENSORWIRE_TLS_CA";
pub(crate) const TLS_NAMES: &str = "TENSORWIRE_TLS_NAMES";

/// What peers' certificates must prove.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Names {
    /// The worker, and the host that was dialled.
    Proven,
    /// The worker.
    AnyHost,
    /// A trusted CA's signature.
    AnyMember,
}

/// The fabrics, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FabricName {
    /// Shared memory.
    Shm,
    /// TCP.
    Tcp,
    /// RDMA.
    Verbs,
}

/// The fabrics that the option accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fabric {
    /// The fastest that both peers have.
    Auto,
    /// Shared memory.
    Shm,
    /// RDMA.
    Verbs,
    /// TCP.
    Tcp,
}

impl Fabric {
    /// The required fabric; none for `auto`.
    pub(crate) fn required(self) -> Option<FabricKind> {
        match self {
            Self::Auto => None,
            Self::Shm => Some(FabricKind::SHM),
            Self::Verbs => Some(FabricKind::VERBS),
            Self::Tcp => Some(FabricKind::TCP),
        }
    }
}

/// Checks the form of an address. Only its use shows whether the host exists.
fn address(text: &str) -> Result<String, String> {
    let example = "for instance 127.0.0.1:4242 or [::1]:4242";
    let checked = tensorwire::settings::host_and_port(text).map(|_| text.to_owned());
    checked.map_err(|problem| format!("an address has the form HOST:PORT, {example}: {problem}"))
}

/// A time between two views.
fn interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.1..=86_400.0).contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "give seconds from 0.1 to 86400, for instance 2 or 0.5".to_owned())
}

fn memory_bytes(text: &str) -> Result<u64, String> {
    crate::size::size(text, u64::MAX, "give a number of bytes, for instance 67108864, 256M or 4G")
}

fn pool_bytes(text: &str) -> Result<u64, String> {
    crate::size::size(text, u64::MAX, "give a number of bytes, for instance 67108864, 64M or 4G")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::{Arguments, Checksum, Command, Fabric, address, pool_bytes};

    #[test]
    fn definition_is_consistent() {
        super::variables::command().debug_assert();
    }

    #[test]
    fn help_fits_into_the_terminal() {
        let mut all = super::variables::command().term_width(80);
        all.build();
        let pages = all.get_subcommands().map(clap::Command::get_name).map(str::to_owned).collect::<Vec<_>>();
        for page in pages {
            let command = all.find_subcommand_mut(&page).unwrap();
            for help in [command.render_help(), command.render_long_help()] {
                let help = help.to_string();
                let wide = help.lines().find(|line| line.chars().count() > 80);
                assert_eq!(wide, None, "{page}");
            }
        }
    }

    #[test]
    fn pull_takes_one_tensor_name_with_each_option() {
        let line = ["tensorwire", "pull", "--tensor", "a", "127.0.0.1:1", "--tensor", "c", "--fabric", "tcp"];
        let Command::Pull(pull) = Arguments::parse_from(line).command else { panic!("not a pull") };
        assert_eq!(
            (pull.tensor, pull.address.as_str()),
            (vec!["a".to_owned(), "c".to_owned()], "127.0.0.1:1")
        );
        assert_eq!(pull.fabric, Fabric::Tcp);
        let two = ["tensorwire", "pull", "127.0.0.1:1", "--tensor", "a", "b"];
        assert!(Arguments::try_parse_from(two).is_err());
    }

    #[test]
    fn memory_is_small_unless_told_otherwise_and_has_units_of_1024() {
        for (line, expected) in [
            (vec!["tensorwire", "pull", "127.0.0.1:1"], 256 << 20),
            (vec!["tensorwire", "pull", "127.0.0.1:1", "--memory", "64K"], 64 << 10),
        ] {
            let Command::Pull(pull) = Arguments::parse_from(line).command else { panic!("not a pull") };
            assert_eq!(pull.memory(), expected);
        }
        for memory in ["0", "lots", "1.5G"] {
            assert!(
                Arguments::try_parse_from(["tensorwire", "pull", "127.0.0.1:1", "--memory", memory]).is_err()
            );
        }
    }

    #[test]
    fn checksums_have_the_names_of_the_library() {
        for checksum in <Checksum as clap::ValueEnum>::value_variants() {
            let line = ["tensorwire", "serve", "a", "--validate", checksum.validation().name()];
            let Command::Serve(serve) = Arguments::parse_from(line).command else { panic!("not a serve") };
            assert_eq!(serve.validate.checksum, *checksum);
        }
        let refused = Arguments::try_parse_from(["tensorwire", "serve", "a", "--validate", "md5"]);
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("md5") && text.contains("off, crc32c, xxh3"), "{text}");
    }

    #[test]
    fn peers_are_trusted_unless_told_otherwise() {
        for (line, expected) in [
            (vec!["tensorwire", "pull", "127.0.0.1:1"], tensorwire::settings::Trust::Cluster),
            (
                vec!["tensorwire", "pull", "127.0.0.1:1", "--trust", "hostile"],
                tensorwire::settings::Trust::Hostile,
            ),
        ] {
            let Command::Pull(pull) = Arguments::parse_from(line).command else { panic!("not a pull") };
            assert_eq!(pull.peering.trust.peers.trust(), expected);
        }
    }

    #[test]
    fn pools_have_units_of_1024_and_at_least_a_byte() {
        let read = ["1", "4K", "64m", "2G"].map(|text| pool_bytes(text).unwrap());
        assert_eq!(read, [1, 4096, 64 << 20, 2 << 30]);
        for text in ["", "0", "K", "-1", "1.5M", "1T", "99999999999999999999", "17179869184G"] {
            let error = pool_bytes(text).unwrap_err();
            assert!(error.contains("64M"), "{text}: {error}");
        }
    }

    #[test]
    fn repeat_of_zero_is_refused() {
        assert!(Arguments::try_parse_from(["tensorwire", "pull", "127.0.0.1:1", "--repeat", "0"]).is_err());
    }

    #[test]
    fn addresses_need_a_host_and_a_port() {
        for text in ["127.0.0.1:1", "127.0.0.1:0", "[::1]:1", "server.example:65535"] {
            assert_eq!(address(text).as_deref(), Ok(text));
        }
        for text in ["", "nowhere", ":1", "host:", "host:65536", "host:x", "::1:1", "a b:1"] {
            assert!(address(text).unwrap_err().contains("HOST:PORT"), "{text}");
        }
    }
}
