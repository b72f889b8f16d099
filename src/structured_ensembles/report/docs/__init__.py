"""`docs/results.md`, its figures and the README's tables, written from the recorded runs below `results/`."""

from structured_ensembles.report.docs.write import render_docs, write_docs

__all__ = ["render_docs", "write_docs"]
