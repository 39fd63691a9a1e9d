"""A real browser for tests: Chromium without a window, driven by playwright. Tests skip, with the reason, where it is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextmanager
def open_browser() -> Iterator[Any]:
    """A browser that reaches nothing but this machine. `RECALS_EXP_CHROMIUM` names the program where it has another name."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'recals-exp[browser]'")
    program = os.environ.get("RECALS_EXP_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"needs a Chromium: none of {', '.join(NAMES)} is installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
