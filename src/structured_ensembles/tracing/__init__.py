"""How `trace` works inside: layouts (what a dimension holds), rules (what operations do to it), the trial (proof)."""
