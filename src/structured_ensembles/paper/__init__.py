"""The paper's tables: what was published, and how to lay our figures beside it."""

from structured_ensembles.paper.layout import html_table, markdown_table
from structured_ensembles.paper.published import Cell, Table, published, table_names

__all__ = ["Cell", "Table", "html_table", "markdown_table", "published", "table_names"]
