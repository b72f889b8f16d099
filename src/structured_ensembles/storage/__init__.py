"""Files that are written whole or not at all: containers, run files, fingerprints, locks."""
