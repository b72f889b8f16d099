"""The command `sens`."""
