"""Files that are written completely or not at all: containers, run files, fingerprints, locks."""
