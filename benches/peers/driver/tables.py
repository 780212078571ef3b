"""The figures as data, and the tables made from them."""

import datetime

MARKS = ("<!-- bench-peers -->", "<!-- bench-peers: until here -->")
FIELDS = ["transport", "wait", "column", "bytes", "rival", "seconds", "low", "high", "rounds", "disturbed", "distance"]
WAITS = {"look": "looking", "sleep": "asleep"}
OURS = ("tensorwire", "limit")
ALL_REDUCE = " all-reduce"
# Ends the names of all-reduces and barriers only.
RANKS = " ranks"
WITH_COLLECTIVES = ("tensorwire", "Open MPI", "Gloo")

# All-reduces of few bytes, and barriers: their cost is that of their messages.
SHORT = ("8 B", "1 KiB", "64 KiB", "barrier")

# The rows of the README: transport, wait, column. One of each kind, including rows that other transports win.
IN_README = [
    ("shm", "look", "8 B pull"),
    ("shm", "look", "64 KiB pull"),
    ("shm", "look", "64 MiB pull"),
    ("shm", "sleep", "8 B half round trip"),
    ("shm", "look", "8 B all-reduce, 2 ranks"),
    ("shm", "look", "16 MiB all-reduce, 4 ranks"),
    ("tcp", "look", "8 B pull"),
    ("tcp", "look", "1 MiB pull"),
    ("tcp", "sleep", "16 MiB pull"),
    ("tcp", "sleep", "8 B all-reduce, 2 ranks"),
]

# The rows of the page that compares Tensorwire with others. No pulls over shared memory that sleep: a value in the catalogue wakes nobody.
IN_COMPARISON = [
    ("shm", "look", "8 B pull"),
    ("shm", "look", "64 KiB pull"),
    ("shm", "look", "64 MiB pull"),
    ("shm", "look", "8 B all-reduce, 2 ranks"),
    ("shm", "look", "16 MiB all-reduce, 4 ranks"),
    ("shm", "sleep", "8 B half round trip"),
    ("tcp", "look", "8 B pull"),
    ("tcp", "look", "64 KiB pull"),
    ("tcp", "look", "1 MiB pull"),
    ("tcp", "look", "64 MiB all-reduce, 2 ranks"),
    ("tcp", "sleep", "8 B half round trip"),
    ("tcp", "sleep", "64 KiB pull"),
    ("tcp", "sleep", "16 MiB pull"),
]
COMPARED = ("UCX", "UCX get", "Open MPI", "Gloo", "NIXL", "iceoryx2", "zenoh", "tonic")


def data(head, figures):
    """Tab-separated values below comments that describe the machine. Times are seconds an operation: median, least, most. The distance
    is the time that a line of memory takes between two CPUs; 0 if that is not known."""
    lines = [f"# {datetime.date.today()}"] + [f"# {line}" for line in head] + ["\t".join(FIELDS)]
    for figure in figures:
        bytes_ = 0 if figure.column.is_half else figure.column.bytes
        times = (figure.median, min(figure.seconds), max(figure.seconds))
        cells = [figure.transport, figure.wait, figure.column.name, bytes_, figure.rival, *(f"{time:.4g}" for time in times)]
        lines.append("\t".join(map(str, [*cells, len(figure.seconds), figure.disturbed, f"{figure.distance or 0:.3g}"])))
    return "\n".join(lines) + "\n"


def rows(text):
    lines = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    return [dict(zip(lines[0], line)) for line in lines[1:]]


def columns(text):
    """For each column, in order: transport, wait, name, and the row of each rival."""
    found = {}
    for row in rows(text):
        found.setdefault((row["transport"], row["wait"], row["column"]), {})[row["rival"]] = row
    return found


def shown(row):
    if row is None:
        return "–"
    seconds, bytes_ = float(row["seconds"]), int(row["bytes"])
    if bytes_ >= 1 << 20:
        return f"{bytes_ / seconds / 1e9:.1f} GB/s"
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def summary(text):
    """Tensorwire beside the best rival of each column that the README shows."""
    lines = ["| one host | Tensorwire | best of the others | Tensorwire's time over its |", "| --- | --- | --- | --- |"]
    measured = columns(text)
    for transport, wait, name in filter(measured.__contains__, IN_README):
        by_rival = measured[transport, wait, name]
        ours = by_rival.get("tensorwire")
        others = [row for rival, row in by_rival.items() if rival not in OURS]
        best = min(others, key=lambda row: float(row["seconds"]), default=None)
        named = f"{best['rival']} {shown(best)}" if best else "–"
        times = ratio(by_rival, best["rival"]) if best else "–"
        lines.append(f"| {transport}, {WAITS[wait]}: {name} | {shown(ours)} | {named} | {times} |")
    return "\n".join(lines)


def ratios(text):
    """Below the date, Tensorwire's time divided by that of each rival, in the rows of the comparison."""
    measured = columns(text)
    date = text.splitlines()[0].removeprefix("# ")
    lines = [f"Measured on {date}:", "", f"| one host | {' | '.join(COMPARED)} |", "| --- " * (len(COMPARED) + 1) + "|"]
    for transport, wait, name in filter(measured.__contains__, IN_COMPARISON):
        cells = [ratio(measured[transport, wait, name], rival) for rival in COMPARED]
        lines.append(f"| {transport}, {WAITS[wait]}: {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ratio(by_rival, rival):
    ours, its = by_rival.get("tensorwire"), by_rival.get(rival)
    return f"{float(ours['seconds']) / float(its['seconds']):.2f}" if ours and its else "–"


def whole(text):
    """Every rival: a table of pulls for each transport and way to wait, and one of collectives, below the description of the machine."""
    head = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    measured = columns(text)
    by_way = {}
    for (transport, wait, name), by_rival in measured.items():
        if not name.endswith(RANKS):
            by_way.setdefault((transport, wait), {})[name] = by_rival
    parts = ["\n".join(f"- {line}" for line in head)]
    for (transport, wait), by_column in by_way.items():
        names = sorted({rival for by_rival in by_column.values() for rival in by_rival}, key=lambda name: (name not in OURS, name))
        lines = [f"| {transport}, {WAITS[wait]} | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|"]
        lines += [f"| {column} | {' | '.join(shown(by_rival.get(name)) for name in names)} |" for column, by_rival in by_column.items()]
        parts.append("\n".join(lines))
    return "\n\n".join(filter(None, [*parts, collectives(measured)]))


def goals_of(transport, wait, name):
    """The goals: the minimum ratio of each rival's time of a collective to Tensorwire's."""
    if name == "8 B all-reduce, 2 ranks":
        return {"Open MPI": 1 / 1.2} if wait == "look" else {}
    if name.startswith(SHORT):
        return {"Open MPI": 0.5 if transport == "shm" else 1.0} if wait == "look" else {}
    if transport == "shm":
        return {"Open MPI": 2.0 if name.endswith("2 ranks") else 1.5}
    return {"Gloo": 1.2, "Open MPI": 1.0}


def collectives(measured):
    """Collectives of both ways to wait, with a star at the rivals against which the goal is missed."""
    names = dict.fromkeys((transport, name) for transport, _, name in measured if name.endswith(RANKS))
    cells = [f"{WAITS[wait]}: {rival}" for wait in WAITS for rival in WITH_COLLECTIVES]
    lines = [f"| collective | {' | '.join(cells)} |", "| --- " * (len(cells) + 1) + "|"]
    for transport, name in names:
        cells = [starred(measured, (transport, wait, name), rival) for wait in WAITS for rival in WITH_COLLECTIVES]
        lines.append(f"| {transport}, {name.replace(ALL_REDUCE, '')} | {' | '.join(cells)} |")
    return "\n".join(lines) if names else ""


def starred(measured, column, rival):
    by_rival = measured.get(column, {})
    ours, its, goal = by_rival.get("tensorwire"), by_rival.get(rival), goals_of(*column).get(rival)
    missed = ours and its and goal and float(its["seconds"]) / float(ours["seconds"]) < goal
    return shown(its) + ("*" if missed else "")


def put(file, table, begin=MARKS[0], close=MARKS[1]):
    """Replaces the text between the two marks of `file`."""
    text = file.read_text(encoding="utf-8")
    before, mark, rest = text.partition(begin)
    _, end, after = rest.partition(close)
    if not mark or not end:
        raise SystemExit(f"{file}: no lines {begin} and {close}")
    file.write_text(f"{before}{begin}\n\n{table}\n\n{close}{after}", encoding="utf-8")


# Which table each file has.
PLACES = {"README.md": summary, "docs/src/benchmarks.md": whole, "docs/src/comparison.md": ratios}
