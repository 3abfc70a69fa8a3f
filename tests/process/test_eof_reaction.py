"""Proof that no process can have noticed the end of a stdin, with real process trees."""

from __future__ import annotations

import sys

import pytest
from tests.process.helpers import alive, run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

# Starts a leader that runs WORDS[0] and sleeps, and WORDS[1] younger processes. Prints `is_impossible()`.
# Root can read every stdin, so the program gives up its rights where a stdin is hidden.
PROGRAM = """
import ctypes
from banksman.process.eof_reaction import EofReaction
def pause():
    signal.alarm(120)
    while True:
        signal.pause()
def start(code):
    pid = os.fork()
    if pid == 0:
        exec(code)
        pause()
    return pid
def is_asleep(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "S"
if os.geteuid() == 0 and "prctl" in WORDS[0]:
    os.setgid(65534), os.setuid(65534)
stdin, write = os.pipe()
up, say_up = os.pipe()
leader = start(WORDS[0])
os.close(stdin), os.close(say_up)
others = [start("os.close(write)") for _ in range(int(WORDS[1]))]
started = [leader, *others]
os.read(up, 1) == b"" or started.append(int(os.read(up, 20)))
try:
    wait_until(lambda: is_asleep(leader), "the sleep of the leader")
    reaction = EofReaction(leader, write)
    os.close(write)
    print(reaction.is_impossible())
finally:
    for pid in started:
        os.kill(pid, signal.SIGKILL)
"""
LEADER = "os.close(write); os.dup2(stdin, 0); os.close(stdin); "
ALONE = LEADER + "os.close(say_up)"
# Its child has the same stdin, and /proc shows that to root alone.
HIDDEN = LEADER + (
    "child = start('ctypes.CDLL(None).prctl(4, 0)'); "
    "os.write(say_up, b'+' + str(child).encode()); os.close(say_up); os.close(0)"
)


@pytest.mark.parametrize(
    ("leader", "others", "impossible"),
    [
        pytest.param(ALONE, 0, True, id="alone"),
        pytest.param(ALONE, 210, True, id="many-younger-processes"),
        pytest.param(HIDDEN, 0, False, id="hidden-stdin-of-descendant"),
    ],
)
def test_reaction_is_impossible_only_without_possible_reader(
    marker: str, leader: str, others: int, impossible: bool
) -> None:
    done = run_program(PROGRAM, marker, leader, others)
    assert (done.stdout, done.returncode) == (f"{impossible}\n", 0), done.stderr
    assert alive(marker) == []
