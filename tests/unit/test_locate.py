from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.errors import ModelFileError, ModelNotFoundError
from outrider.models import catalogue
from outrider.models.locate import Located, is_present, locate

HEADER = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """In an empty folder, so that no stray name answers, and with nothing pulled."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def folder(name: str = "model", *files: str) -> Path:
    path = Path(name)
    path.mkdir()
    for file in files:
        (path / file).write_bytes(HEADER if file.endswith(".gguf") else b"{}")
    return path


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("toy", {}),
        ("toy:", {}),
        ("toy:vocab=5", {"vocab": "5"}),
        ("toy: vocab = 5 ,seed=2", {"vocab": "5", "seed": "2"}),
    ],
)
def test_toy(target, options):
    assert locate(target) == Located("toy", target, options=options)


def test_catalogue_name_is_pulled(monkeypatch):
    asked = []

    def pull(name: str) -> Path:
        asked.append(name)
        return Path("fetched.gguf")

    monkeypatch.setattr(catalogue, "pull", pull)
    # A folder of the same name must not take the place of the pinned file.
    folder("smollm2-135m", "config.json", "model.safetensors")
    assert locate("smollm2-135m") == Located("gguf", "smollm2-135m", path=Path("fetched.gguf"))
    assert asked == ["smollm2-135m"]


def test_is_present_only_says_no_to_an_entry_not_pulled():
    assert not is_present("smollm2-135m")
    assert is_present("toy")
    path = catalogue.path_of(catalogue.CATALOGUE["smollm2-135m"])
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(catalogue.CATALOGUE["smollm2-135m"].size_bytes)
    assert is_present("smollm2-135m")


class TestFile:
    def test_gguf(self):
        Path("some.model.gguf").write_bytes(HEADER)
        assert locate("some.model.gguf") == Located(
            "gguf", "some.model", path=Path("some.model.gguf")
        )

    def test_a_file_of_the_catalogue_is_known_wherever_it_lies(self, monkeypatch):
        data = HEADER + b"weights"
        entry = replace(
            catalogue.CATALOGUE["smollm2-135m"],
            name="known",
            sha256=hashlib.sha256(data).hexdigest(),
            size_bytes=len(data),
        )
        monkeypatch.setattr(catalogue, "CATALOGUE", {"known": entry})
        Path("folder").mkdir()
        for place in (Path("any.gguf"), Path("folder/x.gguf")):
            place.write_bytes(data)
        assert locate("any.gguf") == Located("gguf", "known", path=Path("any.gguf"))
        assert locate("folder").name == "known"
        Path("any.gguf").write_bytes(HEADER + b"weighty")
        assert locate("any.gguf").name == "any"

    def test_magic_decides_and_not_the_suffix(self):
        Path("weights").write_bytes(HEADER)
        assert locate("weights").kind == "gguf"

    def test_home_is_expanded(self, monkeypatch):
        monkeypatch.setenv("HOME", str(Path.cwd()))
        Path("m.gguf").write_bytes(HEADER)
        assert locate("~/m.gguf").path == Path.cwd() / "m.gguf"

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (b"", "is empty"),
            (b"PK\x03\x04" + bytes(30), r"begins with b'PK\\x03\\x04'"),
            (HEADER[:4], "cut off after 4 bytes"),
            (HEADER[:-1], "cut off after 23 bytes"),
        ],
        ids=["empty", "another kind", "magic only", "cut header"],
    )
    def test_broken(self, data, reason):
        Path("m.gguf").write_bytes(data)
        with pytest.raises(ModelFileError, match=reason) as caught:
            locate("m.gguf")
        assert "'m.gguf'" in str(caught.value)

    def test_single_safetensors_file_points_to_its_folder(self):
        Path("model.safetensors").write_bytes(b"12345678{}")
        with pytest.raises(ModelFileError, match="folder of a transformers model"):
            locate("model.safetensors")


class TestFolder:
    def test_transformers(self):
        path = folder("model", "config.json", "model.safetensors")
        assert locate("model") == Located("folder", "model", path=path)

    def test_name_of_a_relative_folder(self, monkeypatch):
        monkeypatch.chdir(folder("model", "config.json", "model.safetensors"))
        assert locate(".").name == "model"

    def test_one_gguf(self):
        path = folder("model", "only.gguf", "readme.md")
        assert locate("model") == Located("gguf", "only", path=path / "only.gguf")

    @pytest.mark.parametrize("files", [[], ["a.gguf", "b.gguf"], ["model.safetensors"]], ids=str)
    def test_without_config(self, files):
        folder("model", *files)
        count = sum(f.endswith("gguf") for f in files)
        with pytest.raises(ModelFileError, match=f"no config.json and holds {count} .gguf"):
            locate("model")

    def test_without_weights(self):
        folder("model", "config.json")
        with pytest.raises(ModelFileError, match="no weights"):
            locate("model")

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
    def test_pickles_are_refused(self, name):
        folder("model", "config.json", name)
        with pytest.raises(ModelFileError, match=f"only pickled weights .{name}") as caught:
            locate("model")
        assert "can run code" in caught.value.hint
        assert "save_pretrained" in caught.value.hint


class TestNothingThere:
    @pytest.mark.parametrize(
        "target", ["./llama.gguf", "llama.gguf", "./model", "/no/where", "~/m", "m.safetensors"]
    )
    def test_path_is_named_and_never_taken_for_a_repository(self, target, monkeypatch):
        monkeypatch.setenv("HOME", str(Path.cwd()))
        with pytest.raises(ModelNotFoundError, match="no file or folder") as caught:
            locate(target)
        assert f"'{target}'" in str(caught.value)

    def test_near_file_is_offered(self):
        folder("models", "llama-1b.gguf", "zebra.txt")
        with pytest.raises(ModelNotFoundError, match=r"Did you mean 'models/llama-1b\.gguf'\?"):
            locate("./models/lama-1b.gguf")

    def test_missing_parent_is_named(self):
        with pytest.raises(ModelNotFoundError, match="folder 'modles' does not exist either"):
            locate("./modles/llama.gguf")

    def test_near_catalogue_name_is_offered_with_all_forms(self):
        with pytest.raises(ModelNotFoundError, match="Did you mean 'smollm2-135m'") as caught:
            locate("smolm2-135m")
        for form in ("catalogue name", ".gguf", "folder", "owner/name", "toy"):
            assert form in str(caught.value)

    def test_empty_is_not_the_working_directory(self):
        Path("config.json").write_text(json.dumps({}))
        Path("model.safetensors").write_bytes(b"")
        with pytest.raises(ModelNotFoundError):
            locate("")

    @pytest.mark.parametrize("target", ["word " * 100, "~no-such-user/m"], ids=["a prompt", "home"])
    def test_what_the_system_refuses(self, target):
        with pytest.raises(ModelNotFoundError, match="cannot be opened"):
            locate(target)


class TestHub:
    def test_owner_and_name(self):
        assert locate("Some-Org/model_1.5B") == Located(
            "hub", "model_1.5B", repo="Some-Org/model_1.5B"
        )

    def test_folder_of_that_name_comes_first(self):
        Path("org").mkdir()
        folder("org/model", "config.json", "model.safetensors")
        assert locate("org/model").kind == "folder"

    @pytest.mark.parametrize("target", ["a/b/c", "https://host/org/name", "org/", "a b/c"])
    def test_anything_else_is_no_repository(self, target):
        with pytest.raises(ModelNotFoundError):
            locate(target)
