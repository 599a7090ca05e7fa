"""Small text files that a flag names: read whole, refused by the name of the flag."""

from __future__ import annotations

from lacuna.basics import storage
from lacuna.basics.errors import UserError


def flag_lines(flag: str, url: str, give: str = "") -> list[str]:
    return flag_text(flag, url, give).splitlines()


def flag_text(flag: str, url: str, give: str = "") -> str:
    """`give`: what to give instead of a file that is not there."""
    try:
        return storage.read_bytes(url).decode()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise UserError(" ".join([f"{flag} {url}: no such file.", give]).rstrip()) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{flag} {url}: not UTF-8 text ({error}).") from None
