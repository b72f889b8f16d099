"""`pytest tests/attack --rounds N` attacks N times as much; the option exists where this folder is named."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rounds", type=int, default=1, help="how often the attack strikes every kind of file and run")
