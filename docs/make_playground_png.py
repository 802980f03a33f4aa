"""Makes docs/images/playground.png, a picture of the playground, from a server that runs.

    pilotfish serve &
    python docs/make_playground_png.py

Needs Playwright for Python and a Chromium on the PATH (or PILOTFISH_CHROMIUM). Text and speed are this machine's.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parent / "images" / "playground.png"
PROMPT = "Write a Python function that adds two numbers, with a docstring."
TIMEOUT_MS = 600_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    with sync_playwright() as playwright:
        path = os.environ.get("PILOTFISH_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1080}, color_scheme="light")
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(args.url)
        page.fill("#prompt", args.prompt)
        page.fill("#max-tokens", str(args.max_tokens))
        page.check("#compare")
        page.click("#send")
        page.wait_for_selector("#verdict:not([hidden]), #error:not([hidden])")
        for answer in page.locator(".answer").all():
            answer.evaluate("node => { node.scrollTop = 0; }")
        page.locator(".step:has(.draft)").nth(1).hover()
        PICTURE.parent.mkdir(exist_ok=True)
        page.screenshot(path=PICTURE, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
