"""`python -m vectora_jail` is the command `vectora-jail`."""

import sys

from .cli import main

sys.exit(main())
