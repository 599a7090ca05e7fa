"""Exceptions for mistakes that a user can mend: their text names what was found and what to do next."""


class UserError(ValueError):
    """Bad input: the message names the file, key or flag, the value found, the legal ones and the remedy."""


class AccessDenied(UserError, PermissionError):
    """Storage refused the credentials, or has none."""


class Unreachable(UserError, OSError):
    """Storage kept failing through all retries."""
