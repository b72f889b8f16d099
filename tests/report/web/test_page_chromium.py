"""Pages in a headless Chromium: no error or request, nothing cut, tables and charts that answer, legible themes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import structured_ensembles as se
from structured_ensembles.continual.results import is_continual, read_continual_run
from structured_ensembles.report.page import compose_page, group_runs, tabulate_runs
from structured_ensembles.report.web.charts import chart_coverage, chart_kept, chart_learning, chart_reliability
from structured_ensembles.report.web.page import Page, Section, render_page, sample_section, write_page
from structured_ensembles.report.web.sample_details import measure_details
from structured_ensembles.report.web.tables import plain_table
from structured_ensembles.runs.finished import read_run
from structured_ensembles.selection import Subnet
from tests.support.chromium import Browser, Tab, find_chromium
from tests.support.paths import ROOT

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")  # of rows
WIDTHS = (360, 768, 1400)
EVIL = "<script>window.harmed = 1</script>"
CLASSES = (
    EVIL,
    '"><img src=x onerror="window.harmed = 1">',
    "a class with a very long name that has to be broken somewhere",
)

CHECKS = (ROOT / "tests" / "support" / "page_checks.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM) as started:
        yield started


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of recorded runs of both kinds: CIFAR-10 with ResNet20, and MNIST task after task."""
    folders = sorted((ROOT / "results" / "cifar10-resnet20").iterdir()) + sorted(
        (ROOT / "results" / "split-mnist").iterdir()
    )
    runs = [(read_continual_run if is_continual(folder) else read_run)(folder) for folder in folders]
    page = compose_page("Recorded runs", [], tabulate_runs(group_runs(runs)), runs)
    return write_page(tmp_path_factory.mktemp("recorded") / "report.html", page)


def evil_page() -> Page:
    """Make a page with samples of an untrained ensemble, names that are code, and a table of twelve columns."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (160, 3, 8, 8), generator=generator, dtype=torch.uint8)
    labels = torch.arange(160) % 3
    test = (images[120:], labels[120:])
    data = se.Data.from_arrays(images[:120], labels[:120], test=test, validation=0.5, classes=CLASSES)
    torch.manual_seed(0)
    networks = [torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3)) for _ in range(3)]
    ensemble = se.Ensemble(networks, classes=CLASSES)
    ensemble.calibrate(data)
    ensemble.conformal(data)
    details = measure_details(ensemble, data)
    subnets = [Subnet(((EVIL, 40, tuple(range(member, 40, 2))), ("features.3", 600, (0, 1, 5)))) for member in (0, 1)]
    history = [
        {"epoch": epoch, "member": member, "loss": 2.0 / (epoch + member + 1), "validation_accuracy": 0.01 * epoch}
        for epoch in range(70)
        for member in range(2)
    ]
    names = {EVIL: details, "deep": details}
    header = ["name", *(f"a column of figures {number}" for number in range(12))]
    rows: list[list[Any]] = [
        [f"{name} {EVIL}", *(1000.5 * row * column for column in range(12))] for row, name in enumerate(NAMES)
    ]
    rows[3][1] = None
    samples = sample_section(details, EVIL)
    assert samples is not None
    charts = [
        chart_reliability(names),
        chart_coverage(names),
        *chart_kept(subnets, EVIL),
        chart_learning(history, EVIL),
    ]
    known = [chart for chart in charts if chart is not None]
    assert len(known) == 4
    return Page(EVIL, [EVIL], [EVIL], [Section(EVIL, [EVIL], [plain_table(EVIL, header, rows)], known), samples])


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("evil") / "report.html", evil_page())


@pytest.fixture(params=["recorded", "evil"])
def tab(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Tab]:
    opened = browser.open(request.getfixturevalue(request.param))
    opened.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    opened.evaluate(CHECKS)
    yield opened
    opened.close()


def test_pages_load_without_errors_and_request_nothing(tab: Tab) -> None:
    assert tab.problems() == []
    assert len(tab.requests()) == 1
    assert tab.requests()[0].startswith("file:///")
    lead = tab.evaluate("document.querySelector('.lead').textContent")
    assert "\\" not in lead  # spaces that keep a unit at its number are no control characters


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_or_collides_at_any_width(tab: Tab, width: int) -> None:
    tab.resize(width)
    assert tab.evaluate("checks.overflow()") == []
    assert tab.evaluate("checks.collisions()") == []


def test_pages_print_light_and_whole_on_a4(tab: Tab) -> None:
    tab.resize(718)  # pixels between the margins of A4
    tab.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = false; })")
    tab.print_preview()
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not tab.evaluate("[...document.querySelectorAll('.tools')].some((one) => one.checkVisibility())")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.evaluate("[...document.querySelectorAll('details')].every((one) => one.open)")
    assert tab.evaluate("checks.overflow()") == []


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_is_legible_in_both_themes(tab: Tab, dark: bool) -> None:
    tab.prefer_dark(dark)
    least = 3 if dark else 2  # Okabe and Ito's orange and sky blue are bright on white
    judged, low = tab.evaluate(f"checks.contrasts({least})")
    assert judged > 100
    assert low == []
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(18, 23, 29)" if dark else "rgb(255, 255, 255)")


def column(tab: Tab, number: int) -> list[Any]:
    """Return the sort values of the rows of the first table that are shown."""
    rows = "[...document.querySelector('table.data').tBodies[0].rows].filter((row) => row.checkVisibility())"
    return tab.evaluate(f"{rows}.map((row) => row.cells[{number}].dataset.value)")


def test_tables_sort_by_a_click_and_filter_by_words(browser: Browser, evil: Path) -> None:
    tab = browser.open(evil)
    click = "document.querySelector('table.data').tHead.rows[0].cells[1].firstElementChild.click()"
    tab.evaluate("const body = document.querySelector('table.data').tBodies[0]; body.prepend(body.rows[4])")
    tab.evaluate(click)
    assert column(tab, 0)[-1].startswith("delta")  # its value is missing
    tab.evaluate(click.replace("cells[1]", "cells[3]"))
    values = [float(value) for value in column(tab, 3)]
    assert values == [2001.0 * row for row in range(6)]  # as numbers: "10,005" would come before "2,001"
    tab.evaluate(click.replace("cells[1]", "cells[3]"))
    assert [float(value) for value in column(tab, 3)] == values[::-1]
    assert tab.evaluate("document.querySelector('table.data').tHead.rows[0].cells[3].ariaSort") == "descending"
    tab.evaluate("document.querySelector('input[type=search]').focus()")
    tab.send("Input.insertText", text="EPSI script")
    assert [name.split()[0] for name in column(tab, 0)] == ["epsilon"]
    assert tab.evaluate("document.querySelector('[role=status]').textContent") == "1 of 6 rows"
    tab.close()


def test_cards_of_a_phone_sort_by_a_list_and_name_every_value(browser: Browser, evil: Path) -> None:
    tab = browser.open(evil, 360)
    assert not tab.evaluate("document.querySelector('table.data thead').checkVisibility()")
    select = "document.querySelector('.order select')"
    assert tab.evaluate(f"{select}.checkVisibility()")
    tab.evaluate(f"{select}.value = '2 1'; {select}.dispatchEvent(new Event('change'))")
    assert column(tab, 2)[0] == "5002.5"
    label = "getComputedStyle(document.querySelector('table.data td'), '::before').content"
    assert tab.evaluate(label) == '"a column of figures 0"'
    tab.resize(1400)
    assert not tab.evaluate(f"{select}.checkVisibility()")
    tab.close()


def test_charts_tell_values_to_mouse_and_keyboard(browser: Browser, recorded: Path) -> None:
    tab = browser.open(recorded)
    plot = "document.querySelector('[data-name=front-parameters] svg.plot')"
    tab.evaluate(f"{plot}.scrollIntoView()")
    tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
    mark = f"[...{plot}.querySelectorAll('.mark')].find((one) => one.dataset.tip.startsWith('deep, N=3'))"
    box = tab.evaluate(f"(() => {{ const box = {mark}.getBoundingClientRect(); return [box.x, box.y]; }})()")
    tab.move_to(box[0] - 4, box[1] - 4)  # near is enough, as for a finger
    shown = "document.querySelector('#tip').hidden ? '' : document.querySelector('#tip').textContent"
    assert tab.evaluate(shown).startswith("deep, N=3\naccuracy 9")
    assert "networks" in tab.evaluate(shown)
    tab.move_to(5, 5)
    assert tab.evaluate(shown) == ""
    tab.evaluate(f"{plot}.focus()")
    tab.press("ArrowRight")
    first = tab.evaluate(shown)
    tab.press("ArrowRight")
    assert "N=" in first
    assert tab.evaluate(shown) not in ("", first)
    tab.close()


def test_class_names_that_are_code_are_shown_and_do_nothing(browser: Browser, evil: Path, tmp_path: Path) -> None:
    tab = browser.open(evil)
    assert tab.evaluate("window.harmed") is None
    assert tab.evaluate("document.scripts.length") == 1
    assert tab.evaluate("document.querySelector('.sample').textContent.includes('<script>window.harmed = 1</script>')")
    assert tab.evaluate("document.querySelector('h1').textContent") == EVIL
    tab.close()
    # Even unescaped, a script that is not ours is refused by the page's policy.
    path = tmp_path / "forged.html"
    path.write_text(render_page(evil_page()).replace("</main>", f"{EVIL}</main>"), encoding="utf-8")
    tab = browser.open(path)
    assert tab.evaluate("window.harmed") is None
    assert any("Content Security Policy" in problem for problem in tab.problems())
    tab.close()
