"""The Space: its page clicked through in Chromium against a Hub on the loopback device, and what
can be said of it without Gradio.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from browser import SECONDS, Tab, browser
from checkpoints import run, wait_until, weight, write_checkpoint, write_llama, write_single
from fakehub import TOKEN
from fakehub_uploads import UploadHub
from hostile import NAMES, name_of
from paths import ROOT

import fp4convert
from fp4convert.engines.files import known_engines

SPACE = ROOT / "deploy" / "space"
SOURCE = (SPACE / "app.py").read_text(encoding="utf-8")
PYTHON = Path(os.environ.get("SPACE_PYTHON", ROOT / ".venv-space" / "bin" / "python"))
PICTURES = os.environ.get("SPACE_PICTURES")  # a folder where the page as it ends is kept
CARD = b"---\nlicense: mit\n---\n# Theirs\n<script>alert(8)</script> <img src=x onerror=alert(9)>\n"
NO_REPOSITORIES = (
    *("m", "/etc", "/etc/ssl", "../m", "./m", "~/m"),
    *("a/..", "a/../b", "a/b/c", "a/b\n"),
)
ALERT = "window.alert = text => { window.alerted = String(text) }"


@pytest.fixture(scope="module")
def app() -> ModuleType:
    spec = importlib.util.spec_from_file_location("space_app", SPACE / "app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Without Gradio


def test_it_is_short_and_uses_public_names_alone():
    assert len(SOURCE.splitlines()) <= 150
    tree = list(ast.walk(ast.parse(SOURCE)))
    imported = [name.name for node in tree if isinstance(node, ast.Import) for name in node.names]
    imported += [str(node.module) for node in tree if isinstance(node, ast.ImportFrom)]
    assert [name for name in imported if name.startswith("fp4convert")] == ["fp4convert"]
    used = {
        node.attr
        for node in tree
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "fp4convert"
    }
    assert {"preview_quantize", "quantize", "inspect"} <= used <= set(fp4convert.__all__)


def test_it_offers_every_engine(app):
    assert [engine.key for engine in known_engines()] == app.FOR


def test_its_head_and_its_requirements_agree():
    _, head, _ = (SPACE / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    told = yaml.safe_load(head)
    pinned = dict(
        line.split("==") for line in (SPACE / "requirements.txt").read_text().splitlines()
    )
    assert pinned == {"gradio": told["sdk_version"]}  # fp4convert is on no index yet
    assert (told["sdk"], told["app_file"]) == ("gradio", "app.py")
    assert len(told["short_description"]) <= 60  # the Hub refuses more


@pytest.mark.parametrize("name", NO_REPOSITORIES)
@pytest.mark.parametrize("end", ["source", "target"])
def test_what_is_no_repository_is_refused(app, name, end):
    """A folder's name would be read from the Space's own disk, and pushed."""
    names = {"source": "org/m", "target": "me/q", end: name}.values()
    with pytest.raises(fp4convert.InputError, match="expected ORG/NAME") as caught:
        app.read_fields("Plan", TOKEN, *names, "vllm", "", "", False)
    assert caught.value.next_step
    assert TOKEN not in json.dumps(caught.value.as_json())


def test_the_disk_is_bounded_by_what_is_free(app, monkeypatch):
    """When a run begins: what an earlier one left is gone by then."""

    def disk(free: float) -> float:
        monkeypatch.setattr(app.shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
        words = app.read_fields("Start", TOKEN, "org/m", "me/q", "vllm", "", "", True)
        return app.plan(app.Run(), **words)["disk"]

    size = {"source_bytes": 1, "output_bytes": 1, "peak_disk_bytes": 1, "bits_per_weight": 4.5}
    found = {**size, "format": "nvfp4", "dialect": "d", "warnings": [], "patterns": []}
    monkeypatch.setattr(app.fp4convert, "preview_quantize", lambda **words: found)
    assert (disk(100e9), disk(10e9)) == (40.0, 9.0)


def test_a_target_takes_a_token_and_a_start_both(app, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    words = app.read_fields("Plan", "", "org/m", "", "", "nvfp4", "", False)
    assert (words["format"], words["engine"], words["token"]) == ("nvfp4", None, None)
    assert "push_to_hub" not in words
    for button, token, target in (("Plan", "", "me/q"), ("Start", "", "me/q"), ("Start", "t", "")):
        with pytest.raises(fp4convert.InputError, match="Target or token is empty"):
            app.read_fields(button, token, "org/m", target, "", "nvfp4", "", False)


def test_a_run_that_was_stopped_while_it_waited_changes_nothing(app, monkeypatch):
    """Neither what another run has left nor the target."""
    other = Path(app.PLACE.name, "runs", "other")
    other.mkdir(parents=True)
    monkeypatch.setattr(app, "plan", lambda run, **words: pytest.fail("it planned"))
    run = app.Run()
    run.is_stopped.set()
    run.carry_out("Start", TOKEN, "org/m", "me/q", "vllm", "", "", False)
    assert run.lines[-1].startswith("Nothing is committed")
    assert run.lines[0].endswith("others wait.")
    assert other.is_dir()
    other.rmdir()


def test_a_card_that_cannot_be_read_leaves_the_commit_told(app, monkeypatch, capsys):
    def fail(*_: object, **__: object) -> None:
        raise OSError("503 Service Unavailable")

    done = SimpleNamespace(pushed="https://hub/me/q/commit/abc", digest="d1")
    monkeypatch.setattr(app, "plan", lambda run, **words: words)
    monkeypatch.setattr(app.fp4convert, "quantize", lambda **words: done)
    monkeypatch.setattr(app.fp4convert, "inspect", lambda *_, **words: {"findings": []})
    monkeypatch.setattr(app, "hf_hub_download", fail)
    run = app.Run()
    run.carry_out("Start", TOKEN, "org/m", "me/q", "vllm", "", "", False)
    assert run.made["digest"] == "d1"
    assert "me/q/commit/abc" in run.made["link"]
    assert run.lines[-1].startswith("Committed; not all can be shown.\nNext: ")
    assert "503" in capsys.readouterr().out


def test_a_run_that_shall_stop_ends_the_conversion(app, tmp_path):
    stopped = app.Run()
    stopped.is_stopped.set()
    source, out = write_llama(tmp_path / "m"), tmp_path / "q"
    with pytest.raises(fp4convert.OutputError, match="Nothing is committed"):
        fp4convert.quantize(source, format="nvfp4", output=out, phases=stopped)
    assert not list(out.rglob("*.safetensors"))


@pytest.mark.parametrize("typed", [f" {TOKEN} ", ""])
def test_a_traceback_has_no_token(typed, app, capsys, monkeypatch):
    """Neither one that is typed nor the Space's own."""
    monkeypatch.setenv("HF_TOKEN", TOKEN if not typed else "")

    def fail(**words: object) -> None:
        raise RuntimeError(f"Authorization: Bearer {words['token']}")

    monkeypatch.setattr(app.fp4convert, "preview_quantize", fail)
    run = app.Run()
    run.carry_out("Plan", typed, "org/m", "", "vllm", "", "", False)
    said = capsys.readouterr()
    assert "RuntimeError: Authorization: Bearer ***" in said.out
    assert TOKEN not in said.out + said.err + "".join(run.lines)
    assert "report it" in run.lines[-1]


# In Chromium


class Page:
    """The Space in a process of its own, and a tab that shows it."""

    def __init__(self, address: str, log: Path, tab: Tab) -> None:
        self.address, self.log, self.tab = address, log, tab
        self.load()

    def load(self) -> None:
        self.tab.call("Page.navigate", url=self.address)
        self.tab.wait("document.querySelector('#modules') && document.querySelector('#start')")

    def fill(self, **words: str) -> None:
        for name, word in words.items():
            self.tab.type(f"#{name} :is(input, textarea)", word)
            self.tab.wait(f"document.querySelector({field(name)}).value === {json.dumps(word)}")

    def press(self, button: str) -> None:
        self.tab.click(f"#{button}")

    def value(self, name: str) -> str:
        return str(self.tab.value(f"document.querySelector({field(name)}).value"))

    def wait(self, name: str, part: str = "") -> str:
        """What a field says, once it says that."""
        place = f"document.querySelector({field(name)}).value"
        try:
            self.tab.wait(f"{place} && {place}.includes({json.dumps(part)})")
        except TimeoutError:
            pytest.fail(f"{name}: {self.value(name)!r}; {self.log.read_text()}")
        return self.value(name)

    def text(self, selector: str) -> str:
        return str(self.tab.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    def pictures(self, name: str) -> None:
        for width in (390, 1280) if PICTURES else ():
            self.tab.size(width, 900)
            time.sleep(1)
            self.tab.picture(Path(PICTURES, f"{name}-{width}.png"))


def add_slow(hub: UploadHub, folder: Path) -> None:
    """A source whose first shard is there soon, and whose second takes half a minute."""
    layers = [
        {f"model.layers.{at}.mlp.down_proj.weight": weight(at, 256, 1024)} for at in range(13)
    ]
    second = {name: tensor for layer in layers[1:] for name, tensor in layer.items()}
    shards = {"part-0.safetensors": layers[0], "part-1.safetensors": second}
    hub.add("org/m", write_checkpoint(folder, shards))
    hub.nbytes_per_second = 200_000


def field(name: str) -> str:
    return json.dumps(f"#{name} :is(input, textarea)")


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as opened:
        opened.call("Page.addScriptToEvaluateOnNewDocument", source=ALERT)
        opened.size(1280, 900)
        yield opened


@pytest.fixture
def page(hub, tab, tmp_path, monkeypatch) -> Iterator[Page]:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is not there: make system makes it, with Gradio")
    monkeypatch.delenv("HF_TOKEN")
    places = {name: tmp_path / name for name in ("temp", "home", "cwd")}
    for place in places.values():
        place.mkdir(exist_ok=True)
    own = {"TMPDIR": str(places["temp"]), "HOME": str(places["home"]), "PYTHONUNBUFFERED": "1"}
    environment = {**os.environ, **own, "HF_HUB_DISABLE_XET": "1"}
    log = tmp_path / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [PYTHON, SPACE / "app.py"],
            cwd=places["cwd"],
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        tab.asked.clear()
        yield Page(address_in(log, process), log, tab)
        check_secrets(tab, log, places.values())
    finally:
        process.terminate()
        process.wait(SECONDS)


def address_in(log: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + SECONDS
    while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return found[0]


def check_secrets(tab: Tab, log: Path, places: object) -> None:
    """The token is in no log, address or file, and in the page in no place but its own field."""
    assert TOKEN not in log.read_text()
    assert not [address for address in tab.asked if TOKEN in address]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    shown = "[...document.querySelectorAll('input:not([type=password]), textarea')]"
    kept = "JSON.stringify({...localStorage, ...sessionStorage})"
    values = f"document.documentElement.outerHTML + {shown}.map(one => one.value) + {kept}"
    assert TOKEN not in tab.value(values)
    assert tab.value("indexedDB.databases().then(all => all.length)") == 0


@pytest.mark.system
def test_from_the_plan_to_the_card(page, hub, tmp_path):
    source = write_llama(tmp_path / "m", **{"tokenizer.json": b"{}" * 2000, "README.md": CARD})
    hub.add("org/m", source)
    page.fill(token=TOKEN, source="org/m", target="me/q")
    page.press("plan")
    summary = page.wait("summary", "GB become")
    assert summary.startswith("nvfp4 in dialect compressed-tensors")
    assert "vllm >=" in summary
    assert "warning: o_proj: 64 columns" in summary
    rows = page.text("#modules")
    assert "model.layers.0.self_attn.{q,k,v}_proj" in rows
    assert "an output head" in rows
    assert "me/q" not in hub.repos
    page.pictures("plan")

    page.press("start")
    card = page.wait("card", "# Theirs")
    assert "<script>alert(8)</script>" in card
    progress = page.wait("progress", "inspect: healthy")
    assert re.search(r"^quantize: .* kB in ", progress, re.MULTILINE)
    commit = page.tab.value("document.querySelector('#link a').href")
    assert commit == f"{hub.endpoint}/me/q/commit/{hub.repos['me/q'].branches['main']}"
    page.pictures("end")

    out = tmp_path / "plain"
    plain = run("quantize", "org/m", "--for", "vllm", "-o", out, "--token", TOKEN, "--json").json
    assert page.value("digest") == plain["digest"]
    pushed = hub.read("me/q")
    names = {path.name for path in out.iterdir() if path.is_file()}
    same = names - {"README.md", "quantization_report.json"}
    assert {name: pushed[name] for name in same} == {n: (out / n).read_bytes() for n in same}
    assert card.encode() == pushed["README.md"].replace(b"\r\n", b"\n")
    assert not list((tmp_path / "temp").rglob("*.safetensors"))
    assert not list((tmp_path / "cwd").iterdir())


@pytest.mark.system
def test_what_is_wrong_is_a_message_with_a_next_step(page, hub, tmp_path):
    for words, told in (
        ({"source": "org/absent", "target": ""}, "org/absent"),
        ({"source": "/etc/ssl"}, "expected ORG/NAME"),
        ({"source": ""}, "''; expected ORG/NAME"),
    ):
        page.fill(**words)
        page.press("plan")
        assert re.search(r"\nNext: \S", page.wait("progress", told))
    hub.add("org/m", write_llama(tmp_path / "m"))
    page.fill(source="org/m", target="me/q")
    page.press("start")
    assert "Next: " in page.wait("progress", "Target or token is empty")
    page.fill(token="hf_another", target="me/q")
    page.press("start")
    told = f"document.querySelector({field('progress')}).value"
    page.tab.wait(f"{told}.includes('Next: ') && !{told}.includes('is empty')")
    assert "me/q" not in hub.repos
    assert "Traceback" not in page.log.read_text()


@pytest.mark.system
def test_names_and_cards_stay_text(page, hub, tmp_path):
    tensors = {name_of(text): ("BF16", (32, 64), bytes(4096)) for text in NAMES}
    source = write_single(tmp_path / "m", tensors)
    (source / "README.md").write_bytes(CARD)
    hub.add("org/m", source)
    page.fill(token=TOKEN, source="org/m", target="me/q")
    page.press("start")
    card = page.wait("card", "# Theirs")
    assert "<img src=x onerror=alert(9)>" in card
    rows = page.tab.value("document.querySelector('#modules').textContent")
    for text in NAMES[:5]:
        assert text in rows
    made = "document.querySelectorAll('main :is(script, b, u), main img[src=x]').length"
    assert page.tab.value(made) == 0
    assert page.tab.value("window.alerted === undefined")


@pytest.mark.system
def test_stop_stops_and_start_goes_on(page, hub, tmp_path):
    add_slow(hub, tmp_path / "m")
    page.fill(token=TOKEN, source="org/m", target="me/q")
    page.press("start")
    wait_until(lambda: [seen for seen in hub.seen if seen.method == "PUT"])  # the first shard
    page.press("stop")
    assert "Next: " in page.wait("progress", "Nothing is committed")
    assert len(hub.repos["me/q"].commits) == 1  # which came with the repository
    hub.nbytes_per_second = None
    sent = hub.sent_nbytes()
    page.press("start")
    digest = page.wait("digest")
    page.wait("card")
    assert "were there already" in page.value("progress")
    assert hub.sent_nbytes() > sent
    out = tmp_path / "plain"
    plain = run("quantize", "org/m", "--for", "vllm", "-o", out, "--token", TOKEN, "--json").json
    assert digest == plain["digest"]


@pytest.mark.system
def test_a_run_that_waits_for_another_can_be_stopped(page, hub, tmp_path):
    """Of another session: nothing of it is committed when its turn comes."""
    add_slow(hub, tmp_path / "m")
    page.fill(token=TOKEN, source="org/m", target="me/q")
    page.press("start")
    wait_until(lambda: [seen for seen in hub.seen if seen.method == "PUT"])
    with browser() as second:
        other = Page(page.address, page.log, second)
        other.fill(token=TOKEN, source="org/m", target="me/other")
        other.press("start")
        time.sleep(1)
        other.press("stop")
        hub.nbytes_per_second = None
        page.wait("card")
        assert "Next: " in other.wait("progress", "Nothing is committed")
    assert len(hub.repos["me/q"].commits) > 1
    assert "me/other" not in hub.repos or len(hub.repos["me/other"].commits) == 1


@pytest.mark.system
def test_closing_the_page_stops_too(page, hub, tmp_path):
    add_slow(hub, tmp_path / "m")
    page.fill(token=TOKEN, source="org/m", target="me/q")
    page.press("start")
    wait_until(lambda: [seen for seen in hub.seen if seen.method == "PUT"])  # the first shard
    page.tab.call("Page.navigate", url="about:blank")
    deadline, seen = time.monotonic() + SECONDS, -1
    while seen != len(hub.seen):  # until nothing more is asked for
        assert time.monotonic() < deadline
        seen = len(hub.seen)
        time.sleep(5)
    assert len(hub.repos["me/q"].commits) == 1
    page.load()
