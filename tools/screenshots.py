"""Take the screenshots of docs/images: the demo's page, and the page of the recorded continual runs on MNIST.

sens demo && python tools/screenshots.py runs/demo/report.html      needs Chromium
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from structured_ensembles.continual.results import read_continual_run  # noqa: E402
from structured_ensembles.report.page import compose_page, group_runs, tabulate_runs  # noqa: E402
from structured_ensembles.report.web.page import write_page  # noqa: E402
from tests.support.chromium import Browser, find_chromium  # noqa: E402

LARGEST = 300_000  # bytes of a picture
# Name: which page, width and height of the window, dark, what is scrolled to.
SHOTS = {
    "report-desktop": ("demo", 1280, 1500, False, "h1"),
    "report-dark": ("demo", 1280, 1500, True, "section:nth-of-type(3)"),
    "report-phone": ("demo", 360, 1500, False, "[data-name=front-parameters]"),
    "report-continual": ("continual", 1280, 1500, False, "h1"),
}


def take_screenshots(demo: Path, images: Path) -> None:
    """Write every screenshot as a PNG. demo: the page of `sens demo`."""
    program = find_chromium()
    if program is None:
        raise SystemExit("there is no Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, Browser(program) as browser:
        runs = [read_continual_run(run) for run in sorted((ROOT / "results" / "split-mnist").iterdir())]
        composed = compose_page("Split-MNIST, task after task", [], tabulate_runs(group_runs(runs)), runs)
        pages = {"demo": demo, "continual": write_page(Path(folder) / "report.html", composed)}
        for name, (page, width, height, dark, start) in SHOTS.items():
            tab = browser.open(pages[page], width, height, dark)
            tab.evaluate(f"document.querySelector('{start}').scrollIntoView()")
            picture = Image.open(io.BytesIO(tab.screenshot())).convert("RGB")
            path = images / f"{name}.png"
            picture.save(path, optimize=True)
            tab.close()
            size = path.stat().st_size
            print(f"{path}: {size:,} bytes")
            if size > LARGEST:
                raise SystemExit(f"{path} must have at most {LARGEST:,} bytes, not {size:,}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("demo", type=Path, help="the page of sens demo")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    arguments = parser.parse_args()
    take_screenshots(arguments.demo, arguments.images)
