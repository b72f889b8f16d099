"""The colours that all figures share."""

import matplotlib as mpl

BLUE, ORANGE, GREY, PALE = "#0b5cad", "#d95f02", "#6b7280", "#e8edf3"
SHADES = mpl.colors.LinearSegmentedColormap.from_list("blues", [PALE, BLUE])
