"""`python -m banksman`: the same as the `banksman` command."""

import sys

from banksman.cli import main

sys.exit(main())
