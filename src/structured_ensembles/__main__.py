"""`python -m structured_ensembles` is `sens`."""

import os
import sys

from structured_ensembles.cli.main import main

if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path and sys.path[0] == os.getcwd():
        del sys.path[0]  # -m puts it there: names that stand in files would be imported from the current folder
    raise SystemExit(main())
