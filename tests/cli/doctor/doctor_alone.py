"""`banksman doctor` as on a machine without other users: `python doctor_alone.py PID,PID… WORDS…`.

The doctor looks at every keeper of its user, and other tests on this machine kill hosts of the same user all the time.
Here it sees only the keepers of the named hosts, and is otherwise unchanged.
"""

from __future__ import annotations

import sys

from banksman.cli import main
from banksman.cli.doctor import leftovers

_ours = {int(pid) for pid in sys.argv[1].split(",") if pid}
_all = leftovers.living_keepers
leftovers.living_keepers = lambda: (each for each in _all() if each[1] in _ours)
sys.exit(main(["doctor", *sys.argv[2:]]))
