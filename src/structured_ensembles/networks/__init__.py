"""Operations on a module: copying, resizing, initialisation, and the record of how it was made."""
