"""`python -m structured_ensembles` is `sens`."""

from structured_ensembles.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
