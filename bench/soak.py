"""Soak test of a server: check that no cost grows with the history.

20 sessions take one turn per second each. Readers connect and disconnect, every ask has an
idempotency key, and retention removes old events. The server is a real `banksman serve` on SQLite
with the fake agent. A sample is taken every `SAMPLE_SECONDS`.

The verdict compares the last window with the first window after the warm-up. A window is two
minutes, or a third of the run after the warm-up if that is shorter. The ratio of the two must not
exceed `RATIO_MAX`:

    accept p50, accept p99,         median of the samples of each window
    outcome p50, lookup p50
    CPU per turn                    CPU time of the server in the window, divided by its turns
    RSS, open files, store size     highest sample of each window: a plateau, due to retention

A control runs beside the load: a fixed loop in a separate process. Its wall time and CPU time show
the speed of the machine. If the control gets slower, the ratio of each latency is divided by the
ratio of its wall time, and the ratio of the CPU per turn by the ratio of its CPU time. The table
shows both ratios.

Exit code 1: a ratio is too high, or a request failed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from banksman.testing import fake_agent
from bench.plot import Chart, sparkline, write_svg
from bench.serving import Server, served
from bench.soak_load import Load, ask, read

SESSIONS, READERS, FRAMES = 20, 10, 30
KEEP_BYTES, KEEP_SECONDS = 128 << 10, 120
SAMPLE_SECONDS = 10.0
WINDOW_SECONDS = 120.0
RATIO_MAX = 1.3
FLAT = "no cost grows"
_CONTROL = (
    "import time; a, b = time.perf_counter(), time.process_time(); sum(range(2_000_000)); "
    "print(time.perf_counter() - a, time.process_time() - b)"
)


class Sample(NamedTuple):
    """Seconds, bytes and counts at one moment, or since the previous sample."""

    at: float
    turns: int
    accept_p50: float
    accept_p99: float
    outcome_p50: float
    lookup_p50: float
    cpu: float
    rss: int
    files: int
    store: int
    control_wall: float
    control_cpu: float


class Number(NamedTuple):
    """A judged number.

    `scale` and `unit`: how it is displayed. `is_time`: a slower machine makes it larger. `within`:
    reduces the samples of a window to one value.
    """

    name: str
    unit: str
    scale: float
    of: Callable[[Sample], float]
    is_time: bool
    within: Callable[[Sequence[Sample]], float]


def _median(of: Callable[[Sample], float]) -> Callable[[Sequence[Sample]], float]:
    return lambda window: statistics.median(of(sample) for sample in window)


def _highest(of: Callable[[Sample], float]) -> Callable[[Sequence[Sample]], float]:
    return lambda window: max(of(sample) for sample in window)


def _timed(name: str, of: Callable[[Sample], float]) -> Number:
    return Number(name, "ms", 1000, of, True, _median(of))


def _sized(name: str, unit: str, scale: float, of: Callable[[Sample], float]) -> Number:
    return Number(name, unit, scale, of, False, _highest(of))


NUMBERS = (
    _timed("accept p50", lambda s: s.accept_p50),
    _timed("accept p99", lambda s: s.accept_p99),
    _timed("outcome p50", lambda s: s.outcome_p50),
    _timed("lookup p50", lambda s: s.lookup_p50),
    Number(
        *("CPU per turn", "ms", 1000, lambda s: s.cpu / max(1, s.turns), True),
        lambda window: sum(s.cpu for s in window) / max(1, sum(s.turns for s in window)),
    ),
    _sized("RSS", "MiB", 1 / (1 << 20), lambda s: s.rss),
    _sized("open files", "fds", 1, lambda s: s.files),
    _sized("store size", "MiB", 1 / (1 << 20), lambda s: s.store),
)
CONTROLS = (
    _timed("control wall", lambda s: s.control_wall),
    _timed("control CPU", lambda s: s.control_cpu),
)


class Sampler:
    """Takes samples of a server under a load."""

    def __init__(self, server: Server, load: Load, store: Path) -> None:
        self._server, self._load, self._store = server, load, store
        self._began = time.monotonic()
        self._cpu = server.cpu_seconds()
        self._turns = 0

    def take(self) -> Sample:
        taken, turns, cpu = self._load.take(), self._load.turns, self._server.cpu_seconds()
        pid = self._server.process.pid
        wall, own = map(
            float, subprocess.check_output([sys.executable, "-I", "-S", "-c", _CONTROL]).split()
        )
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        sample = Sample(
            at=time.monotonic() - self._began,
            turns=turns - self._turns,
            accept_p50=_quantile(taken.get("accept", ()), 0.5),
            accept_p99=_quantile(taken.get("accept", ()), 0.99),
            outcome_p50=_quantile(taken.get("outcome", ()), 0.5),
            lookup_p50=_quantile(taken.get("lookup", ()), 0.5),
            cpu=cpu - self._cpu,
            rss=int(status.partition("VmRSS:")[2].split()[0]) * 1024,
            files=len(os.listdir(f"/proc/{pid}/fd")),
            store=sum(
                file.stat().st_size for file in self._store.parent.glob(f"{self._store.name}*")
            ),
            control_wall=wall,
            control_cpu=own,
        )
        self._turns, self._cpu = turns, cpu
        return sample


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1) + 0.5)] if values else 0.0


def soak(seconds: float) -> tuple[list[Sample], Load]:
    with served(keep_bytes=KEEP_BYTES, keep_seconds=KEEP_SECONDS) as server:
        store = Path(server.request("GET", "/v1/server")["store"].removeprefix("sqlite:"))
        body = {"command": fake_agent.command()}
        sessions: list[str] = [
            server.request("POST", "/v1/sessions", body)["id"] for _ in range(SESSIONS)
        ]
        load = Load(server, f"@@stream {FRAMES} 0")
        threads = [
            *(
                threading.Thread(target=load.run, args=(ask, id, n / SESSIONS))
                for n, id in enumerate(sessions)
            ),
            *(threading.Thread(target=load.run, args=(read, sessions, n)) for n in range(READERS)),
        ]
        sampler = Sampler(server, load, store)
        for thread in threads:
            thread.start()
        samples: list[Sample] = []
        began = time.monotonic()
        try:
            while time.monotonic() < began + seconds and not load.errors:
                due = began + (len(samples) + 1) * SAMPLE_SECONDS
                time.sleep(max(0.0, due - time.monotonic()))
                samples.append(sampler.take())
                _tell(samples[-1])
        finally:
            load.is_over.set()
            for thread in threads:
                thread.join()
        return samples, load


def _tell(sample: Sample) -> None:
    if not round(sample.at / SAMPLE_SECONDS) % 6:
        shown = "  ".join(
            f"{number.name} {number.of(sample) * number.scale:.4g}"
            for number in (*NUMBERS, *CONTROLS)
        )
        print(f"{sample.at / 60:5.1f} min  {shown}", flush=True)


def judge(samples: Sequence[Sample], warm_up: float) -> str:
    """Print the table and return the verdict. `FLAT`: every ratio is within its bound."""
    warm = [sample for sample in samples if sample.at > warm_up]
    window = min(WINDOW_SECONDS, (warm[-1].at - warm_up) / 3)
    first = [sample for sample in warm if sample.at <= warm_up + window + 1]
    last = [sample for sample in warm if sample.at > warm[-1].at - window + 1]
    print(
        f"\nwarm-up {warm_up:.0f} s; "
        f"the first {window:.0f} s after it against the last {window:.0f} s"
    )
    print(f"{'':14} {'first':>10} {'last':>10} {'ratio':>7} {'by control':>11}")
    slower: list[float] = []
    for control in CONTROLS:
        ratio = control.within(last) / control.within(first)
        slower.append(max(1.0, ratio))
        print(
            _row(control, first, last, ratio) + f" {'':>11}  machine      {_line(control, samples)}"
        )
    wall, own = slower
    if wall > RATIO_MAX:
        print(
            f"the machine was {wall:.1f} times slower at the end: "
            "run the test again without other load"
        )
    found: set[str] = set()
    for number in NUMBERS:
        ratio = number.within(last) / (number.within(first) or 1e-9)
        by = (own if number.name == "CPU per turn" else wall) if number.is_time else 1.0
        judged = ratio / by
        # On a machine that gets much slower, queues grow more than in proportion to the control.
        unmet = "unclear" if number.is_time and wall > RATIO_MAX else "GROWS"
        verdict = "ok" if judged <= RATIO_MAX else unmet
        found.add(verdict)
        print(
            f"{_row(number, first, last, ratio)} {judged:11.2f}  {verdict:11}  "
            f"{_line(number, samples)}"
        )
    if "GROWS" in found:
        return "a cost grows with the history"
    return "unclear: the machine got slower" if "unclear" in found else FLAT


def _row(number: Number, first: Sequence[Sample], last: Sequence[Sample], ratio: float) -> str:
    values = (number.within(window) * number.scale for window in (first, last))
    return f"{number.name:14} " + " ".join(f"{value:10.4g}" for value in values) + f" {ratio:7.2f}"


def _line(number: Number, samples: Sequence[Sample]) -> str:
    return f"{sparkline([number.of(sample) for sample in samples])} {number.unit}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Soak a server and check that no cost grows with its history."
    )
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument(
        "--svg", type=Path, default=Path("build/soak.svg"), help="output file for the plots"
    )
    options = parser.parse_args()
    seconds = options.minutes * 60
    # Retention has removed its first events by then, and the file has reached its size. A short run
    # gets a third of its time.
    warm_up = min(180.0, seconds / 3)
    samples, load = soak(seconds)
    for error in load.errors[:5]:
        print(f"request failed: {error}")
    if load.errors:
        return 1
    verdict = judge(samples, warm_up)
    charts = [
        Chart(
            f"{n.name}, {n.unit}",
            "minutes",
            {n.name: [(s.at / 60, n.of(s) * n.scale) for s in samples]},
            shaded=warm_up / 60,
        )
        for n in (*NUMBERS, *CONTROLS)
    ]
    title = f"{SESSIONS} sessions, 1 turn/s each, {READERS} readers, {options.minutes:g} minutes"
    write_svg(options.svg, title, charts)
    print(f"\n{load.turns} turns, {load.missed} asks skipped as too late; plots: {options.svg}")
    print(f"verdict: {verdict}")
    return 0 if verdict == FLAT else 1


if __name__ == "__main__":
    sys.exit(main())
