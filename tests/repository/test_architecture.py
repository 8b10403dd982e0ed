"""The house stands: imports go down only, heavy packages stay in their rooms, files and functions stay small."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fp4convert"
FLOORS = [
    {"errors", "streams", "stops", "recipe_rules"},
    {"disk"},
    {
        "formats",
        "cubins",
        "shard",
        "ranges",
        "pieces",
        "progress",
        "parts",
        "patterns",
        "recipe_files",
        "numbered",
        "budget",
        "explanations",
        "seals",
    },
    {
        "asking",
        "claims",
        "codec",
        "pictures",
        "gguf_shard",
        "header",
        "recipe",
        "gpus",
        "layout",
        "stacks",
        "spelling",
        "xet",
        "places",
        "papers",
    },
    {"sources", "dialects", "lane", "recast", "grid", "accounting", "bounds"},
    {"backends", "reading", "record"},
    {"artifact", "detection", "doctor", "experts", "identity"},
    {"codings", "agreement", "scalars"},
    {"linears", "tasks", "calibration_file", "sampling", "stacking"},
    {"verdicts", "manifest", "pace", "methods", "folds", "ledger", "skeleton", "input_scales", "cache_scales", "gptq", "inputs"},
    {"plan", "output", "rounding", "losses", "merging", "smoothing", "observers", "chain", "unfolding", "calibration_parts"},
    {"respelling", "carrying", "suspicion", "push", "advice", "feeding", "calibration_state", "calibration_needs", "histograms"},
    {"makers", "template", "soundness", "ending", "auditing", "analysis", "calibration", "tensors"},
    {"workers", "measuring", "distances", "inspection"},
    {"job", "render", "beside"},
    {"convert", "verification", "portrait", "card"},
    {"fitting", "forecast", "overview", "studies", "datasheet", "judgements", "sarif", "comparison"},
    {"cluster", "page"},
    {"pipelines", "pruning"},
    {"publishing"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
FLOOR = {name: level for level, names in enumerate(FLOORS) for name in names}
ROOMS = {
    "torch": {
        "calibration",
        "calibration_state",
        "calibration_needs",
        "skeleton",
        "observers",
        "chain",
        "feeding",
        "gptq",
        "tensors",
    },
    "transformers": {"skeleton", "observers", "feeding"},
    "cupy": {"gpus", "lane"},
    "cupy_backends": {"cubins"},
    "huggingface_hub": {"sources", "asking", "push", "card"},
    "hf_xet": {"xet"},
    "safetensors": set(),
    "gguf": {"gguf_shard"},
    "ray": {"cluster"},
    "plotly": {"page"},
    "rich": {"render"},
    "typer": {"cli"},
    "ctypes": {"backends", "disk", "gpus"},
    "numpy": {
        "pieces",
        "gptq",
        "rounding",
        "calibration_file",
        "bounds",
        "calibration_parts",
        "calibration",
        "calibration_state",
        "observers",
        "feeding",
        "suspicion",
        "pace",
        "soundness",
        "histograms",
        "codec",
        "accounting",
        "grid",
        "layout",
        "detection",
        "recast",
        "lane",
        "backends",
        "verification",
        "makers",
        "codings",
        "template",
        "losses",
        "inputs",
        "measuring",
        "datasheet",
        "distances",
        "folds",
        "smoothing",
        "unfolding",
        "tensors",
    },
    "ml_dtypes": {"codec", "grid"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = {"tests": "*.py", "docs": "*.py", "kernels": "*", "pages": "*"}
SOURCES = [
    *MODULES,
    *(file for folder, pattern in FOLDERS.items() for file in sorted((ROOT / folder).rglob(pattern)) if file.is_file()),
]
WIDEST = 160  # signs in a line; ruff has less for Python


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(file: Path) -> Iterator[tuple[str, str]]:
    """(top-level package, room inside fp4convert or '') of every import of a file, wherever it stands."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            yield top, rest.partition(".")[0] if top == "fp4convert" else ""


def test_every_room_has_its_floor():
    assert {room_of(file) for file in MODULES} - {"__init__"} == set(FLOOR)


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_down_only(file):
    room = room_of(file)
    if room == "__init__":
        return
    upward = [other for top, other in imports(file) if other and other != room and FLOOR[other] >= FLOOR[room]]
    assert not upward, f"{file.name} imports {upward} from its own floor or above"


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_heavy_packages_stay_in_their_rooms(file):
    room = room_of(file)
    strays = [top for top, _ in imports(file) if room not in ROOMS.get(top, {room})]
    assert not strays, f"{file.name} imports {strays}, which belong elsewhere"


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_stay_small(file):
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 400
    assert [line for line in lines if len(line) > WIDEST] == []


@pytest.mark.parametrize("file", [file for file in SOURCES if file.suffix == ".py"], ids=lambda file: str(file.relative_to(ROOT)))
def test_functions_stay_small(file):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is too long"
            is_command = file.parent.name == "cli" and node.name.endswith("_command")
            count = len([argument for argument in node.args.args if argument.arg != "self"]) + len(node.args.kwonlyargs)
            assert is_command or file.parent.name == "tests" or count <= 5, f"{node.name} has {count} parameters"


def test_every_room_stands_in_the_readmes_picture():
    picture = (ROOT / "README.md").read_text(encoding="utf-8").partition("## The house")[2]
    drawn = {name: int(floor) for floor, line in floors_of(picture) for name in re.findall(r"(\w+)(?:\.py|/)\s", line)}
    assert {room: drawn.get(room) for room in FLOOR} == FLOOR


def floors_of(picture: str) -> Iterator[tuple[str, str]]:
    """(number, line) of every line of the picture's package; a line without a number belongs to the one above."""
    floor = ""
    for line in picture.partition("fp4convert/\n")[2].partition("tests/")[0].splitlines():
        floor = (re.match(r"  floor (\d+)", line) or [floor, floor])[1]
        yield floor, f"{line} "


def test_no_module_has_the_name_of_a_public_function():
    import fp4convert

    assert not set(fp4convert.__all__) & {room_of(file) for file in MODULES}
    assert all(getattr(fp4convert, name) is not None for name in fp4convert.__all__)


def test_numbers_of_the_formats_are_written_once():
    """2688 and 448 outside formats.py would be a second definition."""
    for file in MODULES:
        if file.name == "formats.py":
            continue
        numbers = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
        assert not {2688, 448} & {n for n in numbers if isinstance(n, int | float)}, file.name
