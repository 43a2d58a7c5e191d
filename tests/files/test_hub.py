"""GGUF files of the hub, from a server that speaks its API: choosing, downloading, resuming, checking."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, file_download

from paceline.errors import CorruptModel, ModelNotFound, UnsupportedModel
from paceline.files import hub as hub_files
from paceline.files.gguf_names import choose_model, complete_models, parts_of, quantization_of
from paceline.files.hub import _is_safe, hub_model
from paceline.files.locate import resolve
from paceline.files.names import ALIASES, hub_name, short_name
from tests.support.hub_server import COMMIT, Hub, hub_server

GGUF = b"GGUF" + bytes(range(256)) * 4096


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    files = {f"Model-{kind}.gguf": GGUF + kind.encode() for kind in ("Q4_K_M", "Q8_0", "BF16")}
    split = {f"big/Big-Q4_K_M-{i:05}-of-00002.gguf": GGUF + b"%d" % i for i in (1, 2)}
    repositories = {
        "owner/many": {".gitattributes": b"*", "mmproj-F16.gguf": GGUF, **files},
        "owner/split": split,
        "owner/text": {".gitattributes": b"*"},
        "owner/both": {"config.json": b"{}", "model.safetensors": b"12345678", **files},
        ALIASES["qwen3:0.6b"]: files,
    }
    with hub_server(repositories) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.address)
        template = running.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "client"))
        monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
        before_second_try(monkeypatch, lambda _: None)
        yield running


def before_second_try(monkeypatch: pytest.MonkeyPatch, do: Callable[[float], None]) -> None:
    """Have the hub's client do this where it would sleep."""
    monkeypatch.setattr(file_download, "time", SimpleNamespace(**{**vars(time), "sleep": do}))


def leftovers(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").glob("**/*") if path.is_file())


def test_a_repository_of_ggufs(hub: Hub, tmp_path: Path) -> None:
    path = resolve("owner/many", quiet=True)
    assert path == tmp_path / "cache/models/owner/many/Model-Q4_K_M.gguf"
    assert path.read_bytes() == GGUF + b"Q4_K_M"
    assert leftovers(tmp_path) == ["Model-Q4_K_M.gguf"]
    assert resolve("owner/many:q8_0", quiet=True).name == "Model-Q8_0.gguf"
    assert resolve("owner/many:Model-BF16", quiet=True).name == "Model-BF16.gguf"
    with pytest.raises(ModelNotFound, match=r"owner/many has no Q2_K. Available: BF16, Q4_K_M, Q8_0"):
        resolve("owner/many:Q2_K", quiet=True)


def test_downloaded_models_cause_no_requests(hub: Hub) -> None:
    first = resolve("qwen3:0.6b", quiet=True)
    seen = len(hub.requests)
    assert resolve("qwen3:0.6b", quiet=True) == first
    assert len(hub.requests) == seen
    assert hub_model(ALIASES["qwen3:0.6b"], newest=True, quiet=True) == first
    assert len(hub.requests) > seen
    assert len(hub.downloads()) == 1


def test_a_file_of_the_right_size_with_another_content_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    path = resolve("owner/many", quiet=True)
    path.write_bytes(bytes(path.stat().st_size))
    assert hub_model("owner/many", "Q4_K_M", newest=True, quiet=True) == path
    assert path.read_bytes() == GGUF + b"Q4_K_M"
    assert len(hub.downloads()) == 2
    assert leftovers(tmp_path) == [path.name]


def test_safetensors_go_before_ggufs_unless_one_is_named(hub: Hub) -> None:
    folder = resolve("owner/both", quiet=True)
    assert (folder / "model.safetensors").exists()
    assert resolve("owner/both:Q8_0", quiet=True).name == "Model-Q8_0.gguf"
    assert resolve("owner/both", quiet=True).name == "Model-Q8_0.gguf", "it has been downloaded since"


def test_a_split_file_comes_whole(hub: Hub, tmp_path: Path) -> None:
    assert resolve("owner/split", quiet=True).name == "Big-Q4_K_M-00001-of-00002.gguf"
    assert leftovers(tmp_path) == ["Big-Q4_K_M-00001-of-00002.gguf", "Big-Q4_K_M-00002-of-00002.gguf"]
    (tmp_path / "cache/models/owner/split/big/Big-Q4_K_M-00002-of-00002.gguf").unlink()
    seen = len(hub.downloads())
    resolve("owner/split", quiet=True)
    assert len(hub.downloads()) == seen + 1, "a part was missing"


def test_an_interrupted_download_goes_on(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    hub.cut = 300_000
    before_second_try(monkeypatch, killed)
    with pytest.raises(Killed):
        resolve("owner/many", quiet=True)
    begun = list((tmp_path / "cache").glob("**/*.incomplete"))
    assert [path.stat().st_size for path in begun] == [300_000]
    assert resolve("owner/many", quiet=True).read_bytes() == GGUF + b"Q4_K_M"
    assert hub.downloads() == [None, "bytes=300000-"]
    assert leftovers(tmp_path) == ["Model-Q4_K_M.gguf"]


def test_a_connection_that_breaks_is_taken_up_again(hub: Hub) -> None:
    hub.cut = 300_000
    assert resolve("owner/many", quiet=True).read_bytes() == GGUF + b"Q4_K_M"
    assert hub.downloads() == [None, "bytes=300000-"]


def test_a_wrong_hash_leaves_nothing(hub: Hub, tmp_path: Path) -> None:
    hub.damaged = True
    with pytest.raises(CorruptModel, match=r"SHA-256 of Model-Q4_K_M.gguf"):
        resolve("owner/many", quiet=True)
    assert [name for name in leftovers(tmp_path) if not name.endswith(".lock")] == []
    hub.damaged = False
    assert resolve("owner/many", quiet=True).read_bytes() == GGUF + b"Q4_K_M"


def test_a_full_disk(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_files, "_MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(ModelNotFound, match=r"no room for the 0.0 GB of Model-Q4_K_M.gguf"):
        resolve("owner/many", quiet=True)


def test_models_that_the_hub_lacks_are_named(hub: Hub) -> None:
    with pytest.raises(UnsupportedModel, match="owner/text contains neither safetensors nor GGUF files"):
        resolve("owner/text", quiet=True)
    with pytest.raises(ModelNotFound, match="the hub model owner/none does not exist"):
        resolve("owner/none:Q4_0", quiet=True)
    with pytest.raises(ModelNotFound, match="no revision 'v9'"):
        resolve("owner/many:Q8_0", quiet=True, revision="v9")


def test_a_revision_has_a_folder_of_its_own(hub: Hub, tmp_path: Path) -> None:
    path = resolve("owner/many:Q8_0", quiet=True, revision=COMMIT)
    assert path.parent == tmp_path / f"cache/models/owner/many@{COMMIT}"
    assert resolve("owner/many:Q8_0", quiet=True).parent.name == "many"


def test_files_of_the_hubs_own_client_are_found(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "client/models--owner--many"
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(COMMIT)
    file = folder / "snapshots" / COMMIT / "Model-Q4_K_M.gguf"
    file.write_bytes(GGUF)
    assert resolve("owner/many", quiet=True) == file
    assert hub.requests == []


@pytest.mark.parametrize("name", ["../x.gguf", "/etc/x.gguf", "a/../../x.gguf", "a\\..\\x.gguf", "C:x.gguf", ""])
def test_a_listing_cannot_name_files_elsewhere(name: str) -> None:
    assert not _is_safe(name)
    assert _is_safe("a/b.gguf")


def test_names_of_quantisations() -> None:
    names = {
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf": "Q4_K_M",
        "gpt-oss-20b-mxfp4.gguf": "MXFP4",
        "Model-UD-Q4_K_XL.gguf": "UD-Q4_K_XL",
        "SmolLM3-IQ4_NL.gguf": "IQ4_NL",
        "model.Q4_1.gguf": "Q4_1",
        "Q8_0/Big-Q8_0-00001-of-00003.gguf": "Q8_0",
        "BF16/Big-00001-of-00003.gguf": "BF16",
        "SmolLM2-135M-Instruct-Q3_K_XL.gguf": "Q3_K_XL",
        "ggml-model-f16.gguf": "F16",
        "model.gguf": None,
        "qwen3-q.gguf": None,
    }
    assert {name: quantization_of(name) for name in names} == names


def test_the_preferred_file_is_chosen() -> None:
    parts = [f"m-Q4_K_M-{i:05}-of-00002.gguf" for i in (1, 2)]
    assert choose_model([*parts, "m-Q4_K_M.gguf"], None, "x") == ["m-Q4_K_M.gguf"], "one file before two parts"
    assert choose_model([parts[0], "m-Q8_0.gguf"], None, "x") == ["m-Q8_0.gguf"], "a part is missing"
    assert choose_model(["m-Q2_K.gguf", "m-Q5_K_M.gguf", "m-F16.gguf"], None, "x") == ["m-Q5_K_M.gguf"]
    assert choose_model(["odd.gguf"], None, "x") == ["odd.gguf"]
    assert complete_models(["mmproj-model-f16.gguf", "imatrix.gguf", "a.txt"]) == []
    with pytest.raises(ModelNotFound, match=r"x has no GGUF file. It contains no GGUF model"):
        choose_model(["a.txt"], None, "x")
    with pytest.raises(ModelNotFound, match="at most 1024"):
        parts_of("m-00001-of-99999.gguf")


def test_short_names() -> None:
    assert hub_name("qwen3:0.6b") == (ALIASES["qwen3:0.6b"], None)
    assert hub_name("qwen3:0.6b:Q8_0") == (ALIASES["qwen3:0.6b"], "Q8_0")
    assert hub_name("owner/name:Q8_0") == ("owner/name", "Q8_0")
    assert hub_name("owner/name") == ("owner/name", None)
    assert [hub_name(name) for name in ("qwen3", "a:b", "a/b.gguf", "a/b/c", "a/b:c/d", "ollama:a:b")] == [None] * 6
    assert short_name(ALIASES["qwen3:0.6b"], "Q8_0") == "qwen3:0.6b:Q8_0"
    with pytest.raises(ModelNotFound, match=r"Use qwen3:0.6b or qwen3:1.7b or"):
        resolve("qwen3:99b")
