"""Helpers that every room may use: argument checks, tables, progress, devices, processes, inputs."""
