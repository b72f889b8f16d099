"""Repositories are told apart from folders; downloads and uploads go through huggingface_hub, here without network."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import structured_ensembles as se

huggingface_hub = pytest.importorskip("huggingface_hub")
errors = pytest.importorskip("huggingface_hub.errors")


def make_ensemble() -> se.Ensemble:
    torch.manual_seed(0)
    ensemble = se.Ensemble([se.zoo.mlp(4, num_classes=2) for _ in range(2)], classes=("no", "yes")).eval()
    ensemble.input_shape = (4,)
    return ensemble


class FakeHub:
    """A hub in a folder: the parts of HfApi and hf_hub_download that are used, with the real ones' arguments."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.created: list[tuple[str, bool]] = []
        self.messages: list[str] = []

    def create_repo(self, repo_id: str, *, private: bool | None = None, exist_ok: bool = False) -> None:
        assert exist_ok
        self.created.append((repo_id, bool(private)))

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str | None = None) -> Any:
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True)
        self.messages.append(str(commit_message))
        return SimpleNamespace(commit_url=f"https://hub.example/{repo_id}/commit/1")

    def download(self, repo_id: str, filename: str, *, revision: str | None = None, **_: Any) -> str:
        if not (self.root / repo_id).is_dir():
            raise errors.LocalEntryNotFoundError("no such repository\nand more lines")
        path = self.root / repo_id / filename
        if not path.exists():
            raise errors.EntryNotFoundError(f"{filename} is not there")
        return str(path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """Put a hub in a folder in the place of huggingface_hub's."""
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: fake)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.download)
    monkeypatch.chdir(tmp_path)
    return fake


def test_what_is_pushed_can_be_loaded_by_the_repositorys_name(hub: FakeHub) -> None:
    ensemble = make_ensemble()
    address = ensemble.push_to_hub("me/yes-or-no", private=True, figures={"cls/accuracy": 0.5}, dataset="coins")
    assert address == "https://hub.example/me/yes-or-no/commit/1"
    assert (hub.created, hub.messages) == ([("me/yes-or-no", True)], ["Add an ensemble"])
    card = (hub.root / "me" / "yes-or-no" / "README.md").read_text()
    assert 'from_pretrained("me/yes-or-no")' in card
    assert "# yes-or-no\n" in card
    assert "measured them on coins" in card
    loaded = se.Ensemble.from_pretrained("me/yes-or-no")
    inputs = torch.rand(3, 4)
    assert torch.equal(loaded.predict_proba(inputs), ensemble.predict_proba(inputs))


def test_a_folder_comes_before_a_repository_of_the_same_name(hub: FakeHub, tmp_path: Path) -> None:
    make_ensemble().push_to_hub("me/both")
    one = se.Ensemble([se.zoo.mlp(4, num_classes=2)])
    one.save_pretrained("me/both")  # tests run in tmp_path
    assert len(se.Ensemble.from_pretrained("me/both")) == 1
    shutil.rmtree(tmp_path / "me")
    assert len(se.Ensemble.from_pretrained("me/both")) == 2


@pytest.mark.parametrize(
    "name", ["./me/both", "me", "me/both/deeper", "/me/both", "~/both", "me both/x", Path("me/both")]
)
def test_what_cannot_be_a_repository_is_a_missing_folder(hub: FakeHub, name: str | Path) -> None:
    make_ensemble().push_to_hub("me/both")
    with pytest.raises(se.ArtifactError, match=r"there is no folder .* a repository would read 'owner/name'"):
        se.Ensemble.from_pretrained(name)


def test_missing_and_foreign_repositories_get_a_sentence(hub: FakeHub) -> None:
    with pytest.raises(
        se.ArtifactError, match=r"there is no folder me/none, and the repository .* no such repository$"
    ):
        se.Ensemble.from_pretrained("me/none")
    (hub.root / "google" / "bert").mkdir(parents=True)
    with pytest.raises(se.ArtifactError, match=r"cannot be read: ensemble\.safetensors is not there"):
        se.Ensemble.from_pretrained("google/bert")
    (hub.root / "google" / "bert" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(se.ArtifactError, match=r"another library \('bert'\)"):
        se.Ensemble.from_pretrained("google/bert")


def test_files_folders_revisions_and_odd_arguments_get_a_sentence(hub: FakeHub, tmp_path: Path) -> None:
    make_ensemble().save(tmp_path / "one.safetensors")
    make_ensemble().save_pretrained(tmp_path / "folder")
    with pytest.raises(se.ArtifactError, match=r"is a file, not a folder: Ensemble\.load reads"):
        se.Ensemble.from_pretrained(tmp_path / "one.safetensors")
    with pytest.raises(ValueError, match="revision must be left out for a folder"):
        se.Ensemble.from_pretrained(tmp_path / "folder", revision="main")
    with pytest.raises(TypeError, match="folder_or_repo must be a folder, or a repository"):
        se.Ensemble.from_pretrained(3)
    with pytest.raises(ValueError, match="repo must read 'owner/name', not 'name'"):
        make_ensemble().push_to_hub("name")


@pytest.mark.parametrize("error", [errors.LocalTokenNotFoundError, ConnectionError])
def test_a_refused_upload_gets_a_sentence(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error("Token is required, but none was found.\nLog in.")

    monkeypatch.setattr(hub, "create_repo", refuse)
    with pytest.raises(RuntimeError, match=r"^me/x could not be written: Token is required, but none was found\.$"):
        make_ensemble().push_to_hub("me/x")


def test_without_the_extra_folders_work_and_repositories_say_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    make_ensemble().save_pretrained(tmp_path / "folder")
    assert len(se.Ensemble.from_pretrained(str(tmp_path / "folder"))) == 2
    for use in (lambda: make_ensemble().push_to_hub("me/x"), lambda: se.Ensemble.from_pretrained("me/x")):
        with pytest.raises(ImportError, match=r"pip install 'structured-ensembles\[hub\]'"):
            use()


def test_the_real_hub_takes_the_arguments_that_we_give() -> None:
    import inspect

    options = {"revision": None, "library_name": "x", "library_version": "1"}
    inspect.signature(huggingface_hub.hf_hub_download).bind("me/x", "file", **options)
    api = huggingface_hub.HfApi(library_name="x", library_version="1")
    inspect.signature(api.create_repo).bind("me/x", private=True, exist_ok=True)
    inspect.signature(api.upload_folder).bind(repo_id="me/x", folder_path=".", commit_message="m")
