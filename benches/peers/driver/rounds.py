"""Rounds: every rival of a column once, in turns; repeated if the machine was busy with other work."""

import statistics
import sys
from dataclasses import dataclass

from . import machine
from .rivals import Failed

KIB, MIB = 1 << 10, 1 << 20
# From this size on processes are not pinned: a second core may help to copy.
FREE_BYTES = 16 * MIB


@dataclass(frozen=True)
class Column:
    name: str
    bytes: int
    is_half: bool = False
    # Ranks of an all-reduce of 32-bit floats, or of a barrier if there are no bytes; 0 is a transfer between two processes.
    ranks: int = 0

    @property
    def is_barrier(self):
        return self.bytes == 0


COLUMNS = [
    Column("8 B half round trip", 8, True),
    Column("8 B pull", 8),
    Column("64 KiB pull", 64 * KIB),
    Column("1 MiB pull", MIB),
    Column("16 MiB pull", 16 * MIB),
    Column("64 MiB pull", 64 * MIB),
    Column("8 B all-reduce, 2 ranks", 8, ranks=2),
    *(
        Column(f"{name}, {ranks} ranks", bytes_, ranks=ranks)
        for name, bytes_ in (("8 B all-reduce", 8), ("1 KiB all-reduce", KIB), ("64 KiB all-reduce", 64 * KIB), ("barrier", 0))
        for ranks in (4, 8)
    ),
    *(
        Column(f"{mebibytes} MiB all-reduce, {ranks} ranks", mebibytes * MIB, ranks=ranks)
        for mebibytes in (1, 16, 64)
        for ranks in (2, 4)
    ),
]
COLUMN_NAMES = [column.name for column in COLUMNS]
WAYS = [(transport, wait) for transport in ("shm", "tcp") for wait in ("look", "sleep")]


@dataclass(frozen=True)
class Task:
    """One measurement of one rival."""

    transport: str
    wait: str
    column: Column
    milliseconds: int
    cpus: tuple

    @property
    def bytes(self):
        return self.column.bytes


@dataclass
class Figure:
    """The figures of a rival in a column: seconds per operation, in each round that counts."""

    transport: str
    wait: str
    column: Column
    rival: str
    seconds: list
    disturbed: int
    # Seconds that a line of memory took between two CPUs, in these rounds; None if that was not measured.
    distance: float | None = None

    @property
    def median(self):
        return statistics.median(self.seconds)


def measure_all(rivals, site, options):
    """All figures, with a line on standard error for each, and lines about rivals that failed."""
    figures, failures = [], []
    for transport, wait in WAYS:
        if not all(word in (transport, wait) for word in options.way):
            continue
        for column in COLUMNS:
            if options.column and not any(word in column.name for word in options.column):
                continue
            pair = machine.cpus()[:2]
            cpus = tuple(pair) if column.bytes < FREE_BYTES and len(pair) == 2 else ()
            task = Task(transport, wait, column, options.round_ms, cpus)
            able = [rival for rival in rivals if rival.can(task)]
            figures += measure_column(task, able, site, options, failures)
    return figures, failures


def measure_column(task, rivals, site, options, failures):
    measured, undisturbed = [], 0
    rivals = list(rivals)
    while undisturbed < options.rounds and len(measured) < 2 * options.rounds and rivals:
        rivals.append(rivals.pop(0))
        share, figures, distance = one_round(task, rivals, site, options, failures)
        measured.append((share, figures, distance))
        undisturbed += share <= 1
    measured.sort(key=lambda one: one[0])
    counted = measured[: options.rounds]
    disturbed = sum(share > 1 for share, _, _ in counted)
    names = sorted({name for _, figures, _ in counted for name in figures})
    distances = [distance for _, _, distance in counted if distance]
    distance = statistics.median(distances) if distances else None
    results = []
    for name in names:
        seconds = [figures[name] for _, figures, _ in counted if name in figures]
        results.append(Figure(task.transport, task.wait, task.column, name, seconds, disturbed, distance))
        print(f"{task.transport} {task.wait} {task.column.name}: {name}: {results[-1].median * 1e6:.3f} µs", file=sys.stderr)
    if disturbed:
        print(f"{task.transport} {task.wait} {task.column.name}: {disturbed} rounds on a busy machine count", file=sys.stderr)
    return results


def one_round(task, rivals, site, options, failures):
    """The disturbance as a share of the bounds; the seconds per operation of each rival; and the distance of the CPUs from
    each other. A rival that fails is taken out of the column."""
    before, figures, distances = machine.CpuTime(), {}, [site.distance()]
    for rival in list(rivals):
        try:
            figures.update(rival.measure(task, site))
        except Failed as failure:
            failures.append(f"failed: {task.transport} {task.wait} {task.column.name}: {rival.name}: {failure}")
            print(failures[-1], file=sys.stderr)
            rivals.remove(rival)
        distances.append(site.distance())
    steal, foreign = machine.CpuTime().since(before)
    known = [distance for distance in distances if distance]
    moved = max(known) / min(known) if known else 0
    share = max(steal / options.steal_max, foreign / options.foreign_max, moved / options.moved_max)
    return share, figures, statistics.median(known) if known else None
