"""find_pretrained(), push(): folders and repositories of a hub, through huggingface_hub (the extra `hub`).

Tokens and the address of the hub are huggingface_hub's business: `hf auth login`, HF_TOKEN, HF_ENDPOINT.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from structured_ensembles.common.checks import check_flags
from structured_ensembles.common.errors import first_line
from structured_ensembles.common.version import VERSION
from structured_ensembles.hub.card import LIBRARY
from structured_ensembles.hub.folder import CONFIG, FILE, check_config, find_file
from structured_ensembles.storage.container import ArtifactError

REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)  # owner/name, as a hub has it


def find_pretrained(source: str | Path, revision: str | None = None) -> Path:
    """Return the ensemble's file of a folder, or of a repository, which is downloaded into huggingface_hub's cache.

    source: a Path is a folder. A text is a folder if there is one of that name, else a repository if it reads
        "owner/name"; "./owner/name" is never a repository.
    revision: a branch, tag or commit of the repository; not for folders.
    """
    if not isinstance(source, str | Path):
        raise TypeError(f"folder_or_repo must be a folder, or a repository such as 'owner/name', not {source!r:.60}")
    folder = Path(source)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision must be left out for a folder, and {folder} is one, not {revision!r}")
        return find_file(folder)
    if folder.exists():
        raise ArtifactError(f"{folder} is a file, not a folder: Ensemble.load reads a single file")
    if isinstance(source, Path) or not REPO.fullmatch(source):
        raise ArtifactError(f"there is no folder {source}, and a repository would read 'owner/name'")
    return _download(source, revision)


def push(
    repo: str, write: Callable[[Path], object], private: bool = False, message: str | None = None, **options: Any
) -> str:
    """Upload a folder to a repository, which is created if missing; return the address of the commit.

    write: writes the folder's files. options: further ones of `HfApi.upload_folder`, such as revision, create_pr.
    """
    if not isinstance(repo, str) or not REPO.fullmatch(repo):
        raise ValueError(f"repo must read 'owner/name', not {repo!r:.100}")
    check_flags(private=private)
    hub = _import_hub("push_to_hub")
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        try:
            api = hub.HfApi(library_name=LIBRARY, library_version=VERSION)
            api.create_repo(repo, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo, folder_path=folder, commit_message=message or "Add an ensemble", **options
            )
        except Exception as error:  # the client's own, its HTTP library's, the system's
            raise RuntimeError(f"{repo} could not be written: {first_line(error)}") from error
    return str(getattr(commit, "commit_url", commit))


def _download(repo: str, revision: str | None) -> Path:
    """Download the files of an ensemble; return the path of the safetensors file in the cache."""
    hub = _import_hub("from_pretrained of a repository")
    options = {"revision": revision, "library_name": LIBRARY, "library_version": VERSION}
    try:
        try:
            check_config(Path(hub.hf_hub_download(repo, CONFIG, **options)))
        except hub.errors.EntryNotFoundError as error:
            if isinstance(error, hub.errors.LocalEntryNotFoundError):  # no network, and not in the cache
                raise
        return Path(hub.hf_hub_download(repo, FILE, **options))
    except ArtifactError:
        raise
    except Exception as error:  # the client's own, its HTTP library's, the system's
        raise ArtifactError(
            f"there is no folder {repo}, and the repository of that name cannot be read: {first_line(error)}"
        ) from error


def _import_hub(caller: str) -> Any:
    """Import huggingface_hub; raise an ImportError that says how to install it."""
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise ImportError(f"{caller} needs the extra hub: pip install 'structured-ensembles[hub]' ({error})") from error
    return huggingface_hub
