"""Tests of the driver, without compilers and without measuring: `scripts/bench-peers --self-test`."""

import stat
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from . import rivals, rounds, tables

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "docs/data/peers.tsv"

MISSING_HEADER = """native/mpi.c:6:10: fatal error: mpi.h: No such file or directory
    6 | #include <mpi.h>
      |          ^~~~~~~
compilation terminated.
"""
MISSING_LIBRARY = """/usr/bin/ld: cannot find -lucp: No such file or directory
collect2: error: ld returned 1 exit status
"""


def script(folder, name, text):
    path = Path(folder) / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Needs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.site = rivals.Site.__new__(rivals.Site)
        self.site.install, self.site.peers = True, self.folder

    def test_the_reason_is_the_first_error(self):
        self.assertIn("fatal error: mpi.h", rivals.first_error(MISSING_HEADER))
        self.assertIn("cannot find -lucp", rivals.first_error(MISSING_LIBRARY))
        self.assertEqual(rivals.first_error("one\n\ntwo\n"), "two")
        self.assertEqual(rivals.first_error(""), "")

    def test_a_compiler_without_its_headers_is_what_is_missing(self):
        compiler = script(self.folder, "mpicc", f"echo '{MISSING_HEADER}' >&2; test -e {self.folder}/mpi.h")
        build = lambda: self.site.build(compiler)
        self.site.install = False
        with self.assertRaisesRegex(rivals.Skipped, r"fatal error: mpi\.h.*it needs the packages libopenmpi-dev of Debian"):
            self.site.need(build, "libopenmpi-dev")
        self.site.install = True
        with (
            mock.patch.object(rivals.os, "geteuid", return_value=0),
            mock.patch.object(rivals.shutil, "which", return_value="/usr/bin/apt-get"),
            mock.patch.object(rivals.subprocess, "run", side_effect=self.installed(rivals.subprocess.run)) as ran,
        ):
            self.site.need(build, "libopenmpi-dev")
        self.assertTrue(any("libopenmpi-dev" in call.args[0] for call in ran.call_args_list))

    def installed(self, run):
        def instead(command, **options):
            if command[0] != "apt-get":
                return run(command, **options)
            (self.folder / "mpi.h").touch()
            return None

        return instead

    def test_a_compiler_that_is_missing_is_named(self):
        with self.assertRaisesRegex(rivals.Skipped, "no-such-compiler is missing"):
            self.site.build("no-such-compiler")

    def test_a_server_that_does_not_start_gives_its_reason(self):
        server = script(self.folder, "server", "echo 'Error: OS error 11' >&2; exit 1")
        with self.assertRaisesRegex(rivals.Failed, "did not start: Error: OS error 11"):
            with rivals.Server([server], self.folder, {}):
                pass


def short_barrier(wait, ours, its):
    """Data of one barrier over shared memory."""
    figures = [
        rounds.Figure("shm", wait, rounds.Column("barrier, 4 ranks", 0, ranks=4), rival, [seconds], 0)
        for rival, seconds in (("tensorwire", ours), ("Open MPI", its))
    ]
    return tables.data([], figures)


class Tables(unittest.TestCase):
    def test_a_barrier_stands_among_the_collectives_with_a_star_where_it_misses_its_goal(self):
        barrier = "shm, barrier, 4 ranks"
        self.assertIn(f"| {barrier} | 2 µs | 1 µs | – |", tables.whole(short_barrier("look", 2e-6, 1e-6)))
        self.assertIn(f"| {barrier} | 2.1 µs | 1 µs* | – |", tables.whole(short_barrier("look", 2.1e-6, 1e-6)))
        self.assertIn("| 21 µs | 1 µs | – |", tables.whole(short_barrier("sleep", 21e-6, 1e-6)))

    def test_the_readme_shows_ten_rows_and_each_is_measured(self):
        rows = tables.summary(DATA.read_text(encoding="utf-8")).splitlines()[2:]
        self.assertEqual(len(rows), len(tables.IN_README))
        self.assertEqual(len(rows), 10)

    def test_each_page_has_the_table_of_the_committed_figures(self):
        text = DATA.read_text(encoding="utf-8")
        for file, table in tables.PLACES.items():
            with self.subTest(file):
                self.assertIn(table(text), (ROOT / file).read_text(encoding="utf-8"))

    def test_every_row_and_rival_of_the_comparison_is_measured(self):
        rows = tables.ratios(DATA.read_text(encoding="utf-8")).splitlines()[4:]
        self.assertEqual(len(rows), len(tables.IN_COMPARISON))
        for rival, column in zip(tables.COMPARED, zip(*(row.split(" | ")[1:] for row in rows))):
            self.assertTrue(any(cell.strip(" |") != "–" for cell in column), rival)
