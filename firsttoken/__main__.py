"""`python -m firsttoken`: the commands, from the packages that were installed with this file.

Python puts the working directory first on the path of modules, and a folder `gateway` or `lab` there would be imported
in place of an installed one.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not sys.flags.safe_path and Path(sys.path[0]).resolve() != Path(__file__).resolve().parents[1]:
    del sys.path[0]

from gateway.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
