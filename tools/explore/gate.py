"""Who may ask the server: a token, its own addresses as Host, and for changes its own pages as Origin.

Without the Host check a web site could point its own name at this address and read along; without the Origin check
another site's page could send changes with the cookie of somebody who is allowed to.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from dataclasses import dataclass, field
from email.message import Message
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from lacuna.basics.errors import UserError

LOOPBACK = "127.0.0.1"
HEADER = "X-Lacuna"  # of changes: forms cannot send it


@dataclass(frozen=True)
class Gate:
    host: str
    port: int
    public_url: str | None = None
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    @property
    def hosts(self) -> set[str]:
        """What browsers may send as Host."""
        names = {LOOPBACK, "localhost"} if self.host == LOOPBACK else {_bracketed(self.host)}
        own = {f"{name}:{self.port}" for name in names} | (names if self.port == 80 else set())
        return own | ({urlsplit(self.public_url).netloc.lower()} if self.public_url else set())

    @property
    def origins(self) -> set[str]:
        own = {f"http://{name}" for name in self.hosts}
        if self.public_url:
            parts = urlsplit(self.public_url)
            public = f"{parts.scheme}://{parts.netloc.lower()}"
            return (own - {f"http://{parts.netloc.lower()}"}) | {public}
        return own

    @property
    def address(self) -> str:
        """To open in a browser."""
        base = self.public_url.rstrip("/") if self.public_url else f"http://{_bracketed(self.host)}:{self.port}"
        return f"{base}/?token={self.token}"

    @property
    def encrypted(self) -> bool:
        """Nobody on the network can read along."""
        return is_loopback(self.host) and (self.public_url is None or self.public_url.startswith("https:"))

    @property
    def cookie(self) -> str:
        """Its name: cookies do not know ports."""
        return f"lacuna-{self.port}"

    def set_cookie(self) -> str:
        secure = "; Secure" if self.public_url and self.public_url.startswith("https:") else ""
        return f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Lax{secure}"

    def knows_host(self, headers: Message) -> bool:
        return (headers.get("Host") or "").lower() in self.hosts

    def is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())

    def has_token(self, headers: Message) -> bool:
        try:
            kept = SimpleCookie(headers.get("Cookie") or "").get(self.cookie)
        except CookieError:
            return False
        return kept is not None and self.is_token(kept.value)

    def may_change(self, headers: Message) -> bool:
        """A page of this server sent it, or a program that is no browser."""
        origin = headers.get("Origin")
        return (headers.get(HEADER) == "1" and (origin is None or origin.lower() in self.origins)
                and headers.get("Sec-Fetch-Site") in (None, "same-origin"))


def check_addresses(host: str, public_url: str | None) -> None:
    if public_url is not None:
        parts = urlsplit(public_url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise UserError(f"--public-url {public_url}: give the address that people open, such as "
                            "https://labels.example.org/.")
    if host in ("0.0.0.0", "::", "*", "") and public_url is None:
        raise UserError(f"--host {host}: requests are checked against the address that they are sent to, so name one "
                        "of this machine's addresses, or give the one that people open with --public-url.")


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host.lower()
