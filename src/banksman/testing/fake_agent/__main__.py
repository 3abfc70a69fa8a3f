"""Entry of the fake agent: `python -m banksman.testing.fake_agent`, or by its path in an isolated interpreter.

`python -I -S __main__.py` starts in half the time: it has neither site-packages nor the script's folder on its path.
The one folder it needs is put there by hand, last. With `--replay FILE` it follows a recording instead of a script.
"""

import sys

sys.path.append(__file__.rsplit("/banksman/", 1)[0])

if any(word.partition("=")[0] == "--replay" for word in sys.argv[1:]):
    from banksman.testing.fake_agent.replay import main
else:
    from banksman.testing.fake_agent.claude_agent import main

main(sys.argv[1:])
