"""Entry of the zygote: `python -I -S __main__.py SOCKET_FD HOST_PID PLAN`.

An isolated interpreter has neither the script's folder nor site-packages on its path, which is what keeps it small and
out of reach of whatever the host's environment says. The one folder it needs is put there by hand, last.
"""

import sys

sys.path.append(__file__.rsplit("/banksman/", 1)[0])

from banksman.process.keeper.zygote import main

main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
