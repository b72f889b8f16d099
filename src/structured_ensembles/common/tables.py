"""Plain-text tables, and text that is safe to print on a terminal."""

from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a table with aligned columns, numeric ones to the right."""
    table = [tuple(header), *map(tuple, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    numeric = [bool(rows) and all(_is_number(row[column]) for row in rows) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    widths_shown = [*widths[:-1], min(widths[-1], max(len(header[-1]), 12))]  # the last column may hold sentences
    return "\n".join([line(header), "  ".join("─" * width for width in widths_shown), *map(line, rows)])


def escape_control_characters(text: str) -> str:
    """Write out control characters: a name from a file must not move the cursor, colour the terminal or add lines."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _is_number(cell: str) -> bool:
    """Tell whether a cell holds a number, a fraction such as 3/6, or the dash of a missing number."""
    try:
        for number in cell.replace(",", "").replace("%", "").replace(" ", "").split("/"):
            float(number.replace("–", "0"))
    except ValueError:
        return False
    return True
