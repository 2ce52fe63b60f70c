"""`python -m gateway.cli`: the command line without an installed script."""

import sys

from gateway.cli.main import main

sys.exit(main())
