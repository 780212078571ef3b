"""The rivals: what each needs, and how one measurement of it runs."""

import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import machine

PYTHON = "/usr/bin/python3"
# A round of `tensorwire-bench` also measures two limits.
PHASES = 3
# A round of collectives measures no limit.
COLLECTIVE_PHASES = 2
# How much longer than the time that it measures a program may take.
SLACK_S = 60
# How long the distance of two CPUs is measured.
DISTANCE_MS = 10
# Adaptive waiting polls while operations follow each other, and is the default.
WAIT_OPTIONS = {"look": "adaptive", "sleep": "sleep"}


class Skipped(Exception):
    """Why a rival is not measured."""


class Failed(Exception):
    """Why a measurement failed."""


class Site:
    """Where programs are built, and where an ordinary user runs them."""

    def __init__(self, root, folder, install):
        self.root, self.folder, self.install = root, folder, install
        self.peers = root / "benches/peers"
        self.bin, self.home = folder / "bin", folder / "home"
        folder.chmod(0o755)
        self.bin.mkdir()
        self.home.mkdir()
        self.drop, self.crates, self.built, self.failed = [], [], set(), False
        if os.geteuid() == 0:
            shutil.chown(self.home, "nobody", "nogroup")
            self.drop = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--no-new-privs"]
        # zenoh locks its shared memory, and the usual limit is 8 MiB. Even root may not be allowed to raise the limit.
        with contextlib.suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def prepare(self, only):
        """The rivals that can be measured, and the names and reasons of the others."""
        wanted, skipped = [], []
        chosen = [rival for rival in ALL if not only or rival.name in only or isinstance(rival, (Tensorwire, Bound))]
        self.crates = [rival.name for rival in chosen if isinstance(rival, (Crate, Bound))]
        for rival in chosen:
            try:
                rival.prepare(self)
                wanted.append(rival)
            except Skipped as reason:
                skipped.append((rival.name, str(reason)))
        return wanted, skipped

    def need(self, make, *packages):
        """Calls `make`. If it raises Skipped because something is missing, installs these packages of Debian and calls it again."""
        try:
            make()
            return
        except Skipped as reason:
            if not (self.install and os.geteuid() == 0 and shutil.which("apt-get")):
                raise Skipped(f"{reason}; it needs the packages {' '.join(packages)} of Debian") from None
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(["apt-get", "update", "-q"], check=False, **quiet)
        command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *packages]
        subprocess.run(command, check=False, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, **quiet)
        make()

    def need_program(self, program, *packages):
        """A program. If it is missing, these packages of Debian are installed."""

        def look():
            if not shutil.which(program):
                raise Skipped(f"{program} is missing")

        self.need(look, *packages)

    def build(self, *command, cwd=None):
        """Runs a compiler; its first error is the reason if it fails."""
        try:
            ran = subprocess.run(command, capture_output=True, text=True, cwd=cwd or self.peers, check=False)
        except FileNotFoundError:
            raise Skipped(f"{command[0]} is missing") from None
        if ran.returncode != 0:
            raise Skipped(f"{shlex.join(map(str, command))}: {first_error(ran.stderr)}")

    def build_crates(self, name):
        """Builds the program of the rivals that are crates: once with all that are wanted, and alone where that fails, so that one
        that can't be built takes no other with it."""
        if name in self.built:
            return
        together = [name] if self.failed else self.crates
        try:
            self.build("cargo", "build", "--locked", "--release", "--no-default-features", "--features", ",".join(together))
        except Skipped:
            if self.failed:
                raise
            self.failed = True
            self.build_crates(name)
            return
        target = Path(os.environ.get("CARGO_TARGET_DIR", self.peers / "target"))
        for built in together:
            self.program(target / "release/tensorwire-peers", f"peers-{built}")
        self.built.update(together)

    def program(self, built, name):
        shutil.copy(built, self.bin / name)
        (self.bin / name).chmod(0o755)

    def command(self, words, cpu=None):
        """The command line with which the ordinary user runs `words` on one CPU, or wherever the scheduler puts it."""
        pinned = [] if cpu is None else ["taskset", "-c", str(cpu)]
        return [*self.drop, *pinned, *map(str, words)]

    def environment(self, extra):
        return {"PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin", "HOME": str(self.home), "TMPDIR": str(self.home), **extra}

    def run(self, command, extra=None, limit=SLACK_S):
        """Runs a program to its end; returns its output."""
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=self.home, env=self.environment(extra or {}), check=False)
        except subprocess.TimeoutExpired:
            raise Failed(f"it did not end within {limit} s") from None
        if ran.returncode != 0:
            raise Failed(first_error(ran.stderr) or f"code {ran.returncode}")
        return ran.stdout

    def run_ranks(self, words, ranks, cpus):
        """Runs a program once for each rank, with the rank and their number after its words; returns the output of rank 0."""
        commands = [self.command([*words, rank, ranks], cpus[rank % len(cpus)] if cpus else None) for rank in range(ranks)]
        others = [
            subprocess.Popen(command, cwd=self.home, env=self.environment({}), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for command in commands[1:]
        ]
        try:
            return self.run(commands[0])
        finally:
            for other in others:
                other.kill()
                other.wait()

    def distance(self):
        """Seconds that a line of memory takes between two CPUs; None if that could not be measured."""
        if "bound" not in self.built:
            return None
        try:
            return seconds_in(self.run(self.command(["peers-bound", "distance", DISTANCE_MS])))
        except Failed as failure:
            print(f"the distance of the CPUs is not known: {failure}", file=sys.stderr)
            return None

    def server(self, command, extra=None):
        return Server(command, self.home, self.environment(extra or {}))


class Server:
    """A program that prints `ready ADDRESS`, and ends when its input does."""

    def __init__(self, command, folder, environment):
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, cwd=folder, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)

    def __enter__(self):
        for line in self.process.stdout:
            if line.startswith("ready "):
                return line.split(maxsplit=1)[1].strip()
        self.stop()
        raise Failed(f"its server did not start: {self.error}")

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        self.process.stdin.close()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        with self.errors:
            self.errors.seek(0)
            self.error = first_error(self.errors.read())


def first_error(text):
    """The first line that names an error, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = (line for line in lines if re.search(r"\berror\b|cannot find|undefined reference|not found", line, re.IGNORECASE))
    return next(errors, lines[-1] if lines else "")


def seconds_of(output, task):
    """Seconds per operation; half of it if the column is half a round trip."""
    return seconds_in(output) / (2 if task.column.is_half else 1)


def seconds_in(output):
    """Seconds per operation, from the line `OPERATIONS SECONDS`."""
    for line in reversed(output.splitlines()):
        words = line.split()
        if len(words) == 2:
            return float(words[1]) / int(words[0])
    raise Failed("it printed no figure")


class Rival:
    """One rival. `ways` are the pairs of transport and wait that it supports."""

    name = ""
    ways = ()
    # The ways of all-reduce.
    collective_ways = ()

    def can(self, task):
        return (task.transport, task.wait) in (self.collective_ways if task.column.ranks else self.ways)

    def prepare(self, site):
        """Prepares the rival, or raises Skipped."""
        raise NotImplementedError

    def measure(self, task, site):
        """Seconds per operation, by the name of the row."""
        raise NotImplementedError

    def pair(self, site, server, client, task, extra=None):
        """Runs a server and a client, each on its CPU."""
        first, second = task.cpus or (None, None)
        with site.server(site.command(server, second), extra) as address:
            output = site.run(site.command([*client, address], first), extra, SLACK_S + task.milliseconds / 100)
        return {self.name: seconds_of(output, task)}


class Tensorwire(Rival):
    """The subject, and the limit that `tensorwire-bench` measures in turns with it."""

    name = "tensorwire"
    ways = [(transport, wait) for transport in ("shm", "tcp") for wait in ("look", "sleep")]
    collective_ways = ways

    def prepare(self, site):
        site.build("cargo", "build", "--locked", "--release", "-p", "tensorwire-benches", "--bin", "tensorwire-bench", cwd=site.root)
        target = Path(os.environ.get("CARGO_TARGET_DIR", site.root / "target"))
        site.program(target / "release/tensorwire-bench", "tensorwire-bench")

    def measure(self, task, site):
        ranks = task.column.ranks
        words = ["tensorwire-bench", "--json", "--fabric", task.transport, "--op", self.operation(task.column)]
        words += [] if task.column.is_barrier else ["--size", task.bytes]
        words += ["--wait", WAIT_OPTIONS[task.wait], "--cpus", "two" if task.cpus else "free"]
        words += ["--rounds", 1, "--round-ms", (COLLECTIVE_PHASES if ranks else PHASES) * task.milliseconds]
        words += ["--ranks", ranks] if ranks else []
        line = json.loads(site.run(site.command(words), None, 2 * SLACK_S))
        ours = {"tensorwire": line["mean_ns"] / 1e9}
        return ours if ranks else {**ours, "limit": line["limit_mean_ns"] / 1e9}

    @staticmethod
    def operation(column):
        if column.ranks:
            return "barrier" if column.is_barrier else "all-reduce"
        return "pingpong" if column.is_half else "pull"


class Bound(Rival):
    """The limit that memory sets for an all-reduce: one process, in which a thread for each rank reads all inputs of its part once, and writes
    it into all results once."""

    name = "bound"
    collective_ways = [("shm", "look"), ("shm", "sleep")]
    # Below this size its threads mostly wait for each other, and memory is not what limits an all-reduce.
    bytes_min = 1 << 20

    def prepare(self, site):
        site.build_crates(self.name)

    def can(self, task):
        return super().can(task) and task.bytes >= self.bytes_min

    def measure(self, task, site):
        words = ["peers-bound", self.name, task.column.ranks, task.bytes, task.milliseconds]
        return {"limit": seconds_of(site.run(site.command(words)), task)}


class Crate(Rival):
    """A crate of the Rust registry, in the program of this folder."""

    def __init__(self, name, ways):
        self.name, self.ways = name, ways

    def prepare(self, site):
        site.build_crates(self.name)

    def measure(self, task, site):
        words = [f"peers-{self.name}", self.name, task.transport, task.wait, task.bytes, task.milliseconds]
        return self.pair(site, words, words, task)


class Ucx(Rival):
    """Tagged messages of UCX."""

    name = "UCX"
    ways = Tensorwire.ways
    transports = {"shm": "posix,sysv,cma,self", "tcp": "tcp,self"}

    def prepare(self, site):
        build = ("gcc", "-O2", "-o", site.bin / "ucx", "native/ucx.c", "-lucp", "-lucs")
        site.need(lambda: site.build(*build), "libucx-dev", "ucx-utils", "gcc", "libc6-dev")

    def measure(self, task, site):
        words = ["ucx", task.wait, task.bytes, task.milliseconds]
        return self.pair(site, words, words, task, {"UCX_TLS": self.transports[task.transport]})


class UcxOneSided(Rival):
    """A write or a read of the peer's memory by UCX, without a message; measured by its own program, which polls."""

    ways = [("shm", "look")]

    def __init__(self, name, test, measures_half):
        self.name, self.test, self.measures_half = name, test, measures_half

    def prepare(self, site):
        site.need_program("ucx_perftest", "ucx-utils")

    def can(self, task):
        return super().can(task) and task.column.is_half == self.measures_half

    def measure(self, task, site):
        # It prints hundredths of a microsecond, which would be 0 for a few quick operations.
        per_operation = max(self.run(task, site, 20), 1e-8)
        count = max(4, int(task.milliseconds / 1e3 / per_operation))
        return {self.name: self.run(task, site, count)}

    def run(self, task, site, count):
        port = free_port()
        first, second = task.cpus or (None, None)
        extra = {"UCX_TLS": Ucx.transports["shm"]}
        server = subprocess.Popen(
            site.command(["ucx_perftest", "-p", port], second), env=site.environment(extra), cwd=site.home,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for_listener(port, server)
            words = ["ucx_perftest", "127.0.0.1", "-p", port, "-t", self.test, "-s", task.bytes, "-n", count, "-w", max(4, min(count, 1000)), "-f", "-v"]
            output = site.run(site.command(words, first), extra)
        finally:
            server.terminate()
            server.wait()
        return average_of_ucx(output)


def average_of_ucx(output):
    """The overall time in the table that `ucx_perftest -f -v` prints, in seconds."""
    lines = [line.split(",") for line in output.splitlines() if "," in line]
    for names, values in zip(lines, lines[1:]):
        if "overall_lat" in names:
            return float(values[names.index("overall_lat")]) / 1e6
    raise Failed("ucx_perftest printed no figure")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_listener(port, process):
    """Waits until a process listens, without connecting: the program would take the first connection as its client."""
    wanted, limit = f":{port:04X}", time.monotonic() + 10
    while time.monotonic() < limit and process.poll() is None:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in Path(table).read_text(encoding="utf-8").splitlines()[1:]:
                fields = line.split()
                if fields[1].endswith(wanted) and fields[3] == "0A":
                    return
        time.sleep(0.005)
    raise Failed("its server does not listen")


class OpenMpi(Rival):
    """Messages and collectives of Open MPI, which always polls. It yields its CPU between two looks if other rivals sleep, and
    if there are more ranks than CPUs."""

    name = "Open MPI"
    ways = [("shm", "look"), ("tcp", "look")]
    collective_ways = Tensorwire.ways
    transports = {"shm": "self,vader", "tcp": "self,tcp"}

    def prepare(self, site):
        site.need_program("mpirun", "openmpi-bin")
        for program in ("mpi", "mpi_reduce"):
            build = ("mpicc", "-O2", "-o", site.bin / program, f"native/{program}.c")
            site.need(lambda build=build: site.build(*build), "libopenmpi-dev", "gcc", "libc6-dev")

    def measure(self, task, site):
        ranks = task.column.ranks or 2
        words = ["mpi_reduce" if task.column.ranks else "mpi", task.bytes, task.milliseconds]
        yields = task.wait == "sleep" or ranks > len(machine.cpus())
        command = ["mpirun", "--bind-to", "none", "--oversubscribe", "--mca", "pml", "ob1", "--mca", "btl", self.transports[task.transport]]
        command += ["--mca", "btl_tcp_if_include", "lo", "--mca", "mpi_yield_when_idle", int(yields)]
        for rank in range(ranks):
            pinned = ["taskset", "-c", task.cpus[rank % len(task.cpus)]] if task.cpus else []
            command += [*([":"] if rank else []), "-np", "1", *pinned, *words]
        return {self.name: seconds_of(site.run(site.command(command)), task)}


class Gloo(Rival):
    """Buffers of a pair of Gloo, and the best of its all-reduces and barriers."""

    name = "Gloo"
    ways = [("tcp", "look"), ("tcp", "sleep")]
    collective_ways = ways
    all_reduces = ("ring", "chunked", "halving", "bcube")
    barriers = ("barrier-all", "barrier-one")

    def prepare(self, site):
        for program in ("gloo", "gloo_reduce"):
            build = ("g++", "-O2", "-o", site.bin / program, f"native/{program}.cc", "-lgloo", "-lpthread")
            site.need(lambda build=build: site.build(*build), "libgloo-dev", "g++")

    def measure(self, task, site):
        if task.column.ranks:
            algorithms = self.barriers if task.column.is_barrier else self.all_reduces
            return {self.name: min(self.collective(task, site, algorithm) for algorithm in algorithms)}
        words = ["gloo", task.wait, task.bytes, task.milliseconds]
        first, second = task.cpus or (None, None)
        with meeting(site) as folder, site.server(site.command([*words, folder, "server"], second)):
            output = site.run(site.command([*words, folder, "client"], first))
        return {self.name: seconds_of(output, task)}

    def collective(self, task, site, algorithm):
        # Polling pairs block in a send: two that both send more than the sockets hold would wait for each other.
        wait = task.wait if task.cpus else "sleep"
        with meeting(site) as folder:
            words = ["gloo_reduce", wait, task.bytes, task.milliseconds, folder, algorithm]
            return seconds_of(site.run_ranks(words, task.column.ranks, task.cpus), task)


@contextlib.contextmanager
def meeting(site):
    """A folder in which processes find each other."""
    folder = site.home / f"gloo-{time.monotonic_ns()}"
    folder.mkdir()
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Nixl(Rival):
    """Reads of the peer's memory by NIXL, without a message."""

    name = "NIXL"
    ways = [("shm", "look"), ("tcp", "look")]
    # The set-up always uses TCP.
    transports = {"shm": "all", "tcp": "tcp,self"}

    def prepare(self, site):
        site.need_program(PYTHON, "python3")
        packages = site.folder / "nixl"
        if not site.install:
            raise Skipped("it is installed for each run, and --no-install forbids that")
        # Without its dependencies, which are only for GPUs.
        site.build(PYTHON, "-m", "venv", "--without-pip", packages)
        version = subprocess.run([PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True, check=True).stdout.strip()
        self.path = packages / f"lib/python{version}/site-packages"
        site.build("python3", "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:", "--python-version", version, "--target", self.path, "nixl-cu12", "numpy")
        site.program(site.peers / "native/nixl_read.py", "nixl_read.py")
        try:
            site.run(site.command([PYTHON, "-c", "import nixl_cu12._api"]), {"PYTHONPATH": str(self.path)})
        except Failed as reason:
            raise Skipped(f"NIXL can't be loaded: {reason}") from None

    def can(self, task):
        return super().can(task) and not task.column.is_half

    def measure(self, task, site):
        words = [PYTHON, site.bin / "nixl_read.py", task.bytes, task.milliseconds]
        extra = {"PYTHONPATH": str(self.path), "UCX_TLS": self.transports[task.transport], "NIXL_LOG_LEVEL": "ERROR"}
        return self.pair(site, words, words, task, extra)


ALL = [
    Tensorwire(),
    Bound(),
    Ucx(),
    UcxOneSided("UCX put", "ucp_put_lat", True),
    UcxOneSided("UCX get", "ucp_get", False),
    OpenMpi(),
    Gloo(),
    Nixl(),
    Crate("iceoryx2", [("shm", "look"), ("shm", "sleep")]),
    Crate("zenoh", [("shm", "sleep"), ("tcp", "sleep")]),
    Crate("tonic", [("tcp", "sleep")]),
    Crate("tarpc", [("tcp", "sleep")]),
    Crate("quinn", [("tcp", "sleep")]),
]
NAMES = [rival.name for rival in ALL]
