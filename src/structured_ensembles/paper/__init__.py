"""The paper's tables: the published numbers, and the studies and layout that put our figures beside them."""

from structured_ensembles.paper.layout import markdown_table
from structured_ensembles.paper.published import Cell, Table, published, table_names

__all__ = ["Cell", "Table", "markdown_table", "published", "table_names"]
