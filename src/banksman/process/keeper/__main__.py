"""Entry point of the zygote: `python -I -S __main__.py SOCKET_FD HOST_PID PLAN`.

An isolated interpreter has neither the folder of the script nor site-packages on its path. That
keeps it small, and independent of the host's environment variables. The only folder that it needs
is appended here. `process/zygote_client.py` in the host starts it. PLAN is a fault plan of a test,
usually empty.
"""

import sys

sys.path.append(__file__.rsplit("/banksman/", 1)[0])

from banksman.process.keeper.zygote import main

main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
