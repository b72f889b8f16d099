"""counted(): a number and its noun, in the singular or the plural."""


def counted(number: float, noun: str, plural: str = "") -> str:
    """Write a number with its noun, such as "1 epoch" or "1,438 samples".

    plural: by default the noun and an s, or es after s, x, sh and tch.
    """
    plural = plural or noun + ("es" if noun.endswith(("s", "x", "sh", "tch")) else "s")
    return f"{number:,} {noun if number == 1 else plural}"
