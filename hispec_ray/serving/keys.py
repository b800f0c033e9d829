"""The API keys that a server accepts."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path


class Keys:
    """Remembers only hashes of the keys, and compares in a time that says nothing about them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def has(self, authorization: str) -> bool:
        """Whether the header of a request, `Bearer KEY`, has one of the keys."""
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        found = False
        for digest in self._digests:  # all of them, always
            found |= hmac.compare_digest(digest, given)
        return found and scheme.lower() == "bearer"


def read_keys(file: str | None, variable: str | None) -> Keys | None:
    """Return the keys in a file, one a line, and in an environment variable, separated by commas; None where neither is named.

    Raises ValueError where a named one has no key in it.
    """
    found: list[str] = []
    if file is not None:
        try:
            text = Path(file).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"server.api_keys_file is {file!r}: it cannot be read: {error}") from error
        lines = [line.strip() for line in text.splitlines()]
        found += [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ValueError(f"server.api_keys_file is {file!r}: it has no keys; it must have one on each line")
    if variable is not None:
        more = [key.strip() for key in os.environ.get(variable, "").split(",") if key.strip()]
        if not more:
            raise ValueError(f"server.api_keys_variable is {variable!r}: this environment variable has no keys; separate them by commas")
        found += more
    return Keys(found) if found else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
