"""What is done to a module: copying, resizing, initialisation, where it came from."""
