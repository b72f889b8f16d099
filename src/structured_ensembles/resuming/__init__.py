"""Resuming of runs: the identity of a run, its folder, and the checkpoint of its search."""
