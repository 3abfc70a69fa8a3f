"""Entry point of the fake agent, as `python -m banksman.testing.fake_agent` or by its path.

`python -I -S __main__.py` starts in half the time, because its path has neither site-packages nor
the folder of the script. This module therefore appends the one folder that it needs. With `--replay
FILE` the agent follows a recording instead of a script.
"""

import sys

sys.path.append(__file__.rsplit("/banksman/", 1)[0])

if any(word.partition("=")[0] == "--replay" for word in sys.argv[1:]):
    from banksman.testing.fake_agent.replay import main
else:
    from banksman.testing.fake_agent.claude_agent import main

main(sys.argv[1:])
