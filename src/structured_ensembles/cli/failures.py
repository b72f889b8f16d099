"""run_guarded(): one sentence for expected failures, an apology and a traceback file for unexpected ones."""

from __future__ import annotations

import dis
import errno
import importlib.metadata
import json
import os
import platform
import select
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
RESUMED = ("train", "continual", "reproduce")  # commands that resume where they were stopped
PACKAGE = Path(__file__).parents[1]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RAISE = dis.opmap["RAISE_VARARGS"]  # the opcode of a `raise` statement


def run_guarded(command: Callable[[], int], words: Sequence[str]) -> int:
    """Run a command and return its exit code; explain any failure on stderr.

    words: the command line, for the report of an unexpected failure.
    """
    try:
        code = command()
        sys.stdout.flush()  # raises here if its disk is full, not when Python exits
        return code
    except KeyboardInterrupt:
        return _refuse(f"stopped{_resume_hint(words)}", STOPPED)
    except Exception as error:
        if _stdout_is_lost() and isinstance(error, BrokenPipeError):
            return PIPE_CLOSED  # such as `sens models | head -1`: nobody reads stdout
        sentence = explain(error)
        if sentence is None:
            return _apologise(error, words)
        return _refuse(sentence + (_resume_hint(words) if _is_full(error) else ""), REFUSED)


def explain(error: Exception) -> str | None:
    """Explain an expected failure in a sentence; return None for an unexpected one."""
    if _is_full(error):
        return f"the disk is full, or a limit is reached: {_format_os_error(error)}; free some space"
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return f"there is not enough memory: {error or 'for what was asked'}"
    if isinstance(error, OSError):
        return _format_os_error(error)
    if isinstance(error, SafetensorError | yaml.YAMLError | json.JSONDecodeError | UnicodeError):
        return f"a file is damaged, or of another format: {error}"
    if isinstance(error, jinja2.TemplateError):
        return f"no page can be written from these run folders: {error}"
    is_ours = isinstance(error, ValueError | TypeError | RuntimeError | FloatingPointError) and _is_raised_by_us(error)
    return str(error) if is_ours else None


def _is_raised_by_us(error: Exception) -> bool:
    """Tell whether a `raise` statement of this package raised the error, so that its message is a sentence."""
    frame = error.__traceback__
    while isinstance(frame, TracebackType) and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return False
    code = frame.tb_frame.f_code
    return PACKAGE in Path(code.co_filename).parents and code.co_code[frame.tb_lasti] == RAISE


def _is_full(error: Exception) -> bool:
    """Tell whether an error means that a disk is full or a limit is reached."""
    if isinstance(error, SafetensorError):  # written in Rust: the number is in its text only
        return any(f"(os error {number})" in str(error) for number in FULL)
    return isinstance(error, OSError) and error.errno in FULL


def _format_os_error(error: Exception) -> str:
    """Write an OSError without its number: the file, then the reason."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error) or type(error).__name__
    files = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return ": ".join([" → ".join(files), error.strerror] if files else [error.strerror])


def _resume_hint(words: Sequence[str]) -> str:
    """Return a hint that the command resumes, for those that do."""
    return "; the same command resumes from here" if words and words[0] in RESUMED else ""


def _refuse(sentence: str, code: int) -> int:
    """Print a sentence on stderr and return the exit code."""
    print(f"sens: {printable_lines(sentence)}", file=sys.stderr)
    return code


def _apologise(error: Exception, words: Sequence[str]) -> int:
    """Print an apology for an unexpected failure, where to report it, and where the traceback is."""
    formatted = "".join(traceback.format_exception(error))
    versions = f"structured-ensembles {VERSION}, torch {torch.__version__}"
    platform_text = f"Python {platform.python_version()}, {platform.platform()}"
    text = f"{shlex.join(['sens', *words])}\n{versions}, {platform_text}\n\n{formatted}"
    summary = f"{type(error).__name__}: {error}"
    print(f"sens: sorry, this should not have happened: {printable_lines(summary)}", file=sys.stderr)
    try:
        with tempfile.NamedTemporaryFile("w", prefix="sens-", suffix=".txt", delete=False, encoding="utf-8") as file:
            file.write(text)
        where = f"with the file {file.name}, which has the traceback"
    except OSError:
        print(text, file=sys.stderr)
        where = "with the lines above"
    print(f"sens: unless your own code is the cause, please report it to {_find_tracker()}, {where}", file=sys.stderr)
    return UNEXPECTED


def _find_tracker() -> str:
    """Return the address for bug reports from the installed package's metadata."""
    with suppress(importlib.metadata.PackageNotFoundError):
        for entry in importlib.metadata.metadata("structured-ensembles").get_all("Project-URL") or ():
            name, _, address = entry.partition(", ")
            if name.lower() in ("issues", "tracker", "bug tracker"):
                return address
    return "the issue tracker of structured-ensembles"


def _stdout_is_lost() -> bool:
    """Tell whether stdout is closed; if so, drop its buffer, or Python would fail at exit."""
    lost = _has_no_reader()
    try:
        sys.stdout.flush()
    except OSError:
        lost = True
    if lost:
        with suppress(OSError, ValueError):  # stdout of a notebook is not a file
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
    return lost


def _has_no_reader() -> bool:
    """Tell whether stdout is a pipe that nobody reads any more: a long text that failed leaves nothing to flush."""
    with suppress(OSError, ValueError, AttributeError):  # stdout of a notebook is not a file; Windows has no poll
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False
