"""What is wrong with a problem file."""


class DataError(ValueError):
    """A problem file that cannot be used; says which file, record and field."""
