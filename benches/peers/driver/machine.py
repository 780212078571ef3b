"""The machine: its description, and the CPU time that other processes took."""

import os
import platform
from pathlib import Path

# Fields of the first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal.
USER, NICE, SYSTEM, STEAL = 0, 1, 2, 7


def cpus():
    return sorted(os.sched_getaffinity(0))


def description():
    """Lines for the head of the data."""
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), "unknown")
    return [
        f"machine: {model}, {len(cpus())} CPUs, Linux {platform.release()}",
        f"tcp congestion control: {setting('tcp_congestion_control')}; "
        f"an ordinary user may choose: {setting('tcp_allowed_congestion_control')}",
    ]


def setting(name):
    try:
        return Path("/proc/sys/net/ipv4", name).read_text(encoding="utf-8").strip()
    except OSError:
        return "unknown"


class CpuTime:
    """CPU times so far: of the machine, and of this process with the children that it has waited for."""

    def __init__(self):
        with open("/proc/stat", encoding="utf-8") as stat:
            ticks = [int(word) for word in stat.readline().split()[1:9]]
        second = os.sysconf("SC_CLK_TCK")
        self.total = sum(ticks) / second
        self.stolen = ticks[STEAL] / second
        # Interrupts are not counted for other processes: those of loopback belong to the rivals.
        self.used = (ticks[USER] + ticks[NICE] + ticks[SYSTEM]) / second
        self.own = sum(os.times()[:4])

    def since(self, earlier):
        """Shares of the time since then, in percent: stolen, and used by other processes."""
        total = max(self.total - earlier.total, 1e-9)
        foreign = (self.used - earlier.used) - (self.own - earlier.own)
        return 100 * (self.stolen - earlier.stolen) / total, max(0.0, 100 * foreign / total)
