"""Run folders, experiments, and grids of experiments."""
