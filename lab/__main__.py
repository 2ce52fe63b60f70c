"""`python -m lab`: the command line with the commands of the lab, without an installed script."""

import sys

from gateway.cli.main import main
from lab.commands import add_commands

sys.exit(main(plugins=[add_commands]))
