"""run_guarded(): a sentence for every failure that can be expected, an apology with the traceback for the rest."""

from __future__ import annotations

import dis
import errno
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import jinja2
import torch
import yaml
from safetensors import SafetensorError

from structured_ensembles.cli.printing import printable_lines
from structured_ensembles.common.version import VERSION

REFUSED, UNEXPECTED, STOPPED, PIPE_CLOSED = 2, 70, 130, 141  # exit codes; 70 is EX_SOFTWARE of sysexits.h
RESUMED = ("train", "continual", "reproduce")  # commands that go on where they were stopped
PACKAGE = Path(__file__).parents[1]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RAISE = dis.opmap["RAISE_VARARGS"]  # what the statement `raise` is compiled to


def run_guarded(command: Callable[[], int], words: Sequence[str]) -> int:
    """Run a command and return its exit code; any failure is explained on stderr.

    words: the command line, for the report of an unexpected failure.
    """
    try:
        code = command()
        sys.stdout.flush()  # a full disk behind it is noticed here, not when Python exits
        return code
    except KeyboardInterrupt:
        return _refuse(f"stopped{_goes_on(words)}", STOPPED)
    except Exception as error:
        if _stdout_is_lost() and isinstance(error, BrokenPipeError):
            return PIPE_CLOSED  # such as `sens models | head -1`: nobody is there to be told
        sentence = sentence_of(error)
        if sentence is None:
            return _apologise(error, words)
        return _refuse(sentence + (_goes_on(words) if _is_full(error) else ""), REFUSED)


def sentence_of(error: Exception) -> str | None:
    """Explain a failure that can be expected in a sentence; None if it cannot be."""
    if _is_full(error):
        return f"the disk is full, or a limit is reached: {_plain(error)}; free some space"
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return f"there is not enough memory: {error or 'for what was asked'}"
    if isinstance(error, OSError):
        return _plain(error)
    if isinstance(error, SafetensorError | yaml.YAMLError | json.JSONDecodeError | UnicodeError):
        return f"a file is damaged, or is not what it should be: {error}"
    if isinstance(error, jinja2.TemplateError):
        return f"a page cannot be made of what the run folders hold: {error}"
    ours = isinstance(error, ValueError | TypeError | RuntimeError | FloatingPointError) and _is_raised_by_us(error)
    return str(error) if ours else None


def _is_raised_by_us(error: Exception) -> bool:
    """Tell a `raise` statement of this package, whose message is a sentence, from an accident with the same type."""
    step = error.__traceback__
    while isinstance(step, TracebackType) and step.tb_next is not None:
        step = step.tb_next
    if step is None:
        return False
    code = step.tb_frame.f_code
    return PACKAGE in Path(code.co_filename).parents and code.co_code[step.tb_lasti] == RAISE


def _is_full(error: Exception) -> bool:
    if isinstance(error, SafetensorError):  # written in Rust: the number is in its text only
        return any(f"(os error {number})" in str(error) for number in FULL)
    return isinstance(error, OSError) and error.errno in FULL


def _plain(error: Exception) -> str:
    """Write an OSError without its number: the file, then what is the matter with it."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error) or type(error).__name__
    files = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return ": ".join([" → ".join(files), error.strerror] if files else [error.strerror])


def _goes_on(words: Sequence[str]) -> str:
    return "; the same command goes on from here" if words and words[0] in RESUMED else ""


def _refuse(sentence: str, code: int) -> int:
    print(f"sens: {printable_lines(sentence)}", file=sys.stderr)
    return code


def _apologise(error: Exception, words: Sequence[str]) -> int:
    """Say that this is not the user's fault, where to report it, and where the traceback is."""
    told = "".join(traceback.format_exception(error))
    versions = f"structured-ensembles {VERSION}, torch {torch.__version__}"
    machine = f"Python {platform.python_version()}, {platform.platform()}"
    text = f"{shlex.join(['sens', *words])}\n{versions}, {machine}\n\n{told}"
    first = f"{type(error).__name__}: {error}"
    print(f"sens: sorry, this should not have happened: {printable_lines(first)}", file=sys.stderr)
    try:
        with tempfile.NamedTemporaryFile("w", prefix="sens-", suffix=".txt", delete=False, encoding="utf-8") as file:
            file.write(text)
        where = f"with the file {file.name}, which has the traceback"
    except OSError:
        print(text, file=sys.stderr)
        where = "with the lines above"
    print(f"sens: unless your own code is the cause, please report it to {_tracker()}, {where}", file=sys.stderr)
    return UNEXPECTED


def _tracker() -> str:
    """Return where mistakes are reported, as the installed package has it."""
    with suppress(importlib.metadata.PackageNotFoundError):
        for own in importlib.metadata.metadata("structured-ensembles").get_all("Project-URL") or ():
            name, _, address = own.partition(", ")
            if name.lower() in ("issues", "tracker", "bug tracker"):
                return address
    return "the issue tracker of structured-ensembles"


def _stdout_is_lost() -> bool:
    """Tell whether stdout cannot be written any more; if so, drop its buffer, or Python would complain at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):  # one that is no file, such as a notebook's
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, sys.stdout.fileno())
            os.close(nothing)
        return True
    return False
