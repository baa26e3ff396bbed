"""Chromium or Chrome driven by Playwright, if installed."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def missing() -> str:
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "needs Playwright: pip install '.[test]'"
    if not any(map(shutil.which, NAMES)):
        return "needs Chromium: apt-get install chromium"
    return ""


@contextmanager
def browser() -> Iterator[Any]:
    """Start a headless browser and close it at the end, with the event loop of Playwright."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, NAMES)))
    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=program)
        try:
            yield started
        finally:
            started.close()
