"""Internals of `trace`: layouts (channels along a dimension), one rule per operation, the trial on fewer channels."""
