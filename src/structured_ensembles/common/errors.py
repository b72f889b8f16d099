"""Messages of errors, for sentences that quote them."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message that says anything, or its type if none does."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)
