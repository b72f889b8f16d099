"""Checks of a network and its data against each other before any work: copies, ids, normalisation, outputs."""
