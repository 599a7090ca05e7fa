"""The one exception for mistakes that a user can mend: its text names what was found and what to do next."""


class UserError(ValueError):
    """Bad input: the message names the file, key or flag, the value found, the legal ones and the remedy."""
