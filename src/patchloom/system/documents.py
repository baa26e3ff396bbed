"""Numbers, JSON and XML in files of strangers: plain values, or a `ValueError` with the reason."""

from __future__ import annotations

import json
import math
import re
from datetime import date
from typing import Any
from xml.etree import ElementTree

_MOST_DIGITS = 18  # digits of a whole number: each such number fits into 64 bits
_LONG_NUMBER = re.compile(rb"\d{%d}" % (_MOST_DIGITS + 1))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # of a letter beyond 16 bits, or alone
_ENCODING = re.compile(r"<\?xml[^>]*?\bencoding\s*=\s*[\"']([^\"']*)[\"']")
_UNICODE = ("utf-8", "utf8", "utf-16", "utf16", "us-ascii", "ascii")


def is_whole(text: str) -> bool:
    """Return whether a text is a whole number of digits alone, of a size that ``int`` can read and 64 bits can hold."""
    return text.isdecimal() and len(text) <= _MOST_DIGITS


def parse_number(text: str) -> float:
    """Parse a finite number."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text.strip()[:40]!r} is no number") from None
    if not math.isfinite(number):
        raise ValueError(f"{text.strip()[:40]!r} is no finite number")
    return number


def parse_json(content: bytes) -> Any:
    """Parse plain values from JSON: whole numbers have up to 18 digits, and texts can be written as UTF-8."""
    # a function for each number takes longer
    found = json.loads(content, parse_int=_small if _LONG_NUMBER.search(content) else None)
    if _SURROGATE.search(content):
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it has half of a letter (a lone surrogate): write its texts as UTF-8") from None
    return found


def _small(digits: str) -> int:
    if (count := len(digits.lstrip("-"))) > _MOST_DIGITS:
        raise ValueError(f"it has a number of {count:,} digits")
    return int(digits)


def parse_xml(content: bytes) -> ElementTree.Element:
    """Parse an XML document in UTF-8, or in UTF-16 with its mark; without a document type, whose entities can be huge.

    Encodings by other names are refused: Python's would be run, and some of them only look like text.
    """
    text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    if (named := _ENCODING.match(text)) and named[1].lower() not in _UNICODE:
        raise ValueError(f"it is in the encoding {named[1][:40]}: save it as UTF-8")
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError("it declares a document type, which is not read: take the DOCTYPE out")
    return ElementTree.fromstring(text)


def check_plain(value: Any) -> None:
    """Raise for a value that JSON does not have, such as a date; YAML makes some of plain words."""
    if isinstance(value, dict):
        for key, one in value.items():
            check_plain(key)
            check_plain(one)
    elif isinstance(value, list):
        for one in value:
            check_plain(one)
    elif not isinstance(value, str | int | float | bool | None):
        what = "a date" if isinstance(value, date) else type(value).__name__
        raise ValueError(f"{str(value)[:40]} is {what}, and no plain value")
