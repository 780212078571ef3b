//! A checkpoint to move, and the command as processes.

mod process;

use std::{
    collections::HashMap,
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::mpsc,
    thread,
};

use safetensors::{Dtype, tensor::TensorView};

pub(crate) use self::process::{Process, command_max, finish, text};

/// Names the RDMA device of a process.
pub(crate) const RDMA_DEVICE: &str = "TENSORWIRE_RDMA_DEVICE";

const DTYPES: [Dtype; 12] = [
    Dtype::F32,
    Dtype::BF16,
    Dtype::F16,
    Dtype::I64,
    Dtype::U8,
    Dtype::BOOL,
    Dtype::F64,
    Dtype::I8,
    Dtype::U16,
    Dtype::C64,
    Dtype::F8_E4M3,
    // The wire has no name for this one.
    Dtype::F8_E8M0,
];

/// Bytes that look random and are the same in every run.
pub(crate) fn fill(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// Name, type and shape of 220 tensors: scalars, empties, odd shapes, many dimensions, names of up to 300 bytes.
fn specs() -> Vec<(String, Dtype, Vec<usize>)> {
    let mut specs = Vec::new();
    for index in 0..200usize {
        let shape = match index % 8 {
            0 => vec![],
            1 => vec![0],
            2 => vec![3, 0, 7],
            3 => vec![1 + index * 17],
            4 => vec![index + 1, 13],
            5 => vec![2, 3, 1, 5, 1, 1, 2],
            6 => vec![4096 + index],
            _ => vec![257, index + 1],
        };
        specs.push((format!("layer.{index}/weight"), DTYPES[index % DTYPES.len()], shape));
    }
    specs.push(("größe.权重.🚀".to_owned(), Dtype::F32, vec![5]));
    specs.push(("x".repeat(300), Dtype::I64, vec![3]));
    specs.push(("权".repeat(100), Dtype::BF16, vec![2, 2]));
    specs.push((" with \"quotes\", \\ and spaces".to_owned(), Dtype::U8, vec![9]));
    for power in 0..14 {
        specs.push((format!("size.{power}"), Dtype::U8, vec![(1usize << power) * 1024 - 1]));
    }
    specs.push(("large.16".to_owned(), Dtype::F32, vec![4 << 20]));
    specs.push(("large.64".to_owned(), Dtype::BF16, vec![32, 1 << 20]));
    specs
}

/// Writes the checkpoint into `directory`.
pub(crate) fn checkpoint(directory: &Path) -> PathBuf {
    let specs = specs();
    assert!(specs.len() >= 200);
    let data: Vec<Vec<u8>> = specs
        .iter()
        .enumerate()
        .map(|(index, (_, dtype, shape))| {
            let mut bytes = fill(shape.iter().product::<usize>() * dtype.bitsize() / 8, index as u64);
            if *dtype == Dtype::BOOL {
                bytes.iter_mut().for_each(|byte| *byte &= 1);
            }
            bytes
        })
        .collect();
    let views = specs.iter().zip(&data).map(|((name, dtype, shape), bytes)| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let path = directory.join("checkpoint.safetensors");
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize_to_file(views, Some(metadata), &path).unwrap();
    path
}

/// A checkpoint of one small tensor called `w`.
pub(crate) fn small_checkpoint(directory: &Path) -> PathBuf {
    let path = directory.join("small.safetensors");
    let view = TensorView::new(Dtype::U8, vec![4], &[1, 2, 3, 4]).unwrap();
    safetensors::serialize_to_file([("w".to_owned(), view)], None, &path).unwrap();
    path
}

/// The command with `arguments`, without a secret from the environment.
pub(crate) fn tensorwire(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensorwire"));
    command.args(arguments).env_remove("TENSORWIRE_SECRET_FILE").env_remove("RUST_LOG");
    // The command must not read the configuration file of the user who runs the tests.
    command.env_remove("TENSORWIRE_CONFIG").env("XDG_CONFIG_HOME", "/nonexistent");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs tensorwire until it exits; kills it, and fails, when it takes too long.
pub(crate) fn run(arguments: &[&str]) -> Output {
    finish(tensorwire(arguments), command_max())
}

/// Runs a command that must succeed, and returns its output.
pub(crate) fn succeed(arguments: &[&str]) -> String {
    succeed_as(tensorwire(arguments))
}

/// Runs `command`, which must succeed, and returns its output.
pub(crate) fn succeed_as(command: Command) -> String {
    let shown = format!("{command:?}");
    let output = finish(command, command_max());
    assert!(output.status.success(), "{shown}: {}", text(&output));
    text(&output)
}

/// Runs a command that must fail, and returns its output.
pub(crate) fn fail(arguments: &[&str]) -> String {
    failed(arguments, &run(arguments))
}

/// The output of a command with `arguments`, which must have failed with one of the codes that are documented.
pub(crate) fn failed(arguments: &[&str], output: &Output) -> String {
    assert!(matches!(output.status.code(), Some(1..=7)), "{arguments:?}: {output:?}");
    text(output)
}

/// Runs a command that must fail with `code`, and returns its output.
pub(crate) fn fail_with(code: i32, arguments: &[&str]) -> String {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", text(&output));
    text(&output)
}

impl Process {
    /// The first line that starts with `prefix`, without the prefix. Fails if the process ends or hangs before.
    pub(crate) fn line_after(&mut self, prefix: &'static str) -> String {
        self.lines().after(prefix)
    }

    /// The lines that the process prints. They are read, so that it is not held up, whether they are taken or not.
    pub(crate) fn lines(&mut self) -> Lines {
        let stdout = self.0.stdout.take().unwrap();
        let (found, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = found.send(line);
            }
        });
        Lines(lines)
    }
}

/// The lines of a process.
#[derive(Debug)]
pub(crate) struct Lines(mpsc::Receiver<String>);

impl Lines {
    /// The next line that starts with `prefix`, without the prefix. Fails if the process ends or hangs before.
    pub(crate) fn after(&self, prefix: &str) -> String {
        loop {
            let line = self.0.recv_timeout(command_max());
            let line = line.unwrap_or_else(|error| panic!("no line `{prefix}`: {error}"));
            if let Some(rest) = line.strip_prefix(prefix) {
                return rest.to_owned();
            }
        }
    }
}

/// A serving process.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) process: Process,
    pub(crate) address: String,
}

impl Server {
    /// Starts `tensorwire serve` and waits for its address.
    pub(crate) fn start(file: &Path, more: &[&str]) -> Self {
        Self::start_on(None, file, more)
    }

    /// The same, with an RDMA device.
    pub(crate) fn start_on(device: Option<&str>, file: &Path, more: &[&str]) -> Self {
        let mut command = tensorwire(&["serve", file.to_str().unwrap()]);
        // Not read, so it must not fill a pipe.
        command.args(more).stderr(Stdio::inherit());
        command.envs(device.map(|name| (RDMA_DEVICE, name)));
        let mut process = Process(command.spawn().unwrap());
        let address = process.line_after("address ");
        Self { process, address }
    }
}

/// The bytes of a safetensors file with tensors of these names and bytes.
pub(crate) fn file_of<'a>(tensors: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Vec<u8> {
    let views = tensors.into_iter().map(|(name, bytes)| {
        (name.to_owned(), TensorView::new(Dtype::U8, vec![bytes.len()], bytes).unwrap())
    });
    safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap()
}

/// Writes `bytes` beside `path`, and renames them to it.
pub(crate) fn replace(path: &Path, bytes: &[u8]) {
    let beside = path.with_extension("new");
    fs::write(&beside, bytes).unwrap();
    fs::rename(&beside, path).unwrap();
}

/// The names in a directory.
pub(crate) fn names_in(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
