"""`python -m kvfast`."""

import sys

from kvfast.tools.cli import main

sys.exit(main())
