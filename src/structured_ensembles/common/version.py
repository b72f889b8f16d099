"""The version of this package, for the files and messages that record it."""

VERSION = "0.1.0"
