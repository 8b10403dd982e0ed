"""The house stands: packages on their floors, no circle, heavy packages at home, nothing grown too
large.

FLOORS is the only table of floors: docs/reference.py reads it for the site.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from operator import attrgetter

from paths import ROOT

PACKAGE = ROOT / "fp4convert"
FLOORS = [
    {"errors", "process", "progress", "version"},
    {"engines", "numerics", "storage"},
    {"recipes"},
    {"checkpoint"},
    {"calibration"},
    {"makers"},
    {"planning"},
    {"execution", "quality"},
    {"options"},
    {"conversion", "report"},
    {"commands"},
    {"cli"},
    {"__main__"},  # the entry; a floor of its own, as is the lazy face of the package
]
FLOOR = {package: number for number, packages in enumerate(FLOORS, 1) for package in packages}
# where a heavy package, or one that only some systems have, may be imported: beginnings of module
# names
HOMES = {
    "torch": ("calibration.", "commands.calibration", "commands.tensors"),
    "transformers": ("calibration.",),
    "greenlet": ("calibration.layers",),
    "cupy": ("numerics.backends.",),
    "cupy_backends": ("numerics.backends.",),
    "huggingface_hub": ("storage.hub.", "storage.source", "storage.open", "report.model_card"),
    "urllib3": ("storage.hub.",),
    "safetensors": ("storage.shard_writer",),
    "gguf": ("storage.gguf",),
    "ray": ("conversion.ray_workers",),
    "model_signing": ("quality.signature",),
    "rich": ("cli.",),
    "typer": ("cli.",),
    "packaging": ("engines.versions",),
    "regex": ("recipes.expressions",),
    "ctypes": ("numerics.backends.", "storage.system", "process"),
}
NO_VERBS = frozenset(
    [
        "a",
        "an",
        "the",
        "this",
        "that",
        "these",
        "those",
        "it",
        "its",
        "what",
        "which",
        "who",
        "whose",
        "where",
        "when",
        "whether",
        "why",
        "how",
        "every",
        "all",
        "each",
        "one",
        "two",
        "some",
        "any",
        "no",
        "none",
        "nothing",
        "true",
        "false",
        "of",
        "in",
        "on",
        "at",
        "by",
        "for",
        "from",
        "with",
        "as",
        "so",
        "meanwhile",
        "same",
        "inputerror",
    ]
)
MOST_FACE_LINES = 50  # of an __init__.py; the package's own has the table of public names
# Of a docstring's first line; the site shows those of modules.
MOST_WORDS_COLUMNS = 72
PUBLIC_PARAMETERS = {"commands.tensors.quantize_tensor": 6}  # what a caller may choose, by name
MOST_FILE_LINES, MOST_FUNCTION_LINES, MOST_PARAMETERS = 600, 60, 5  # past 400 lines: look at it
MADE = "commands.functions"  # of the declared options, by docs/functions.py: as long as they are


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its name without "fp4convert.": "storage.disk"; a package by
    its own name.
    """
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def imported(name: str) -> Iterator[str]:
    """Dotted names of what a module imports, wherever the import stands; without "fp4convert." for
    our own.
    """
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("fp4convert.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (
                f"{node.module}.{alias.name}".removeprefix("fp4convert.") for alias in node.names
            )


def neighbours(name: str) -> set[str]:
    """The modules of the package that a module imports."""
    known = modules()
    found = {dotted if dotted in known else dotted.rpartition(".")[0] for dotted in imported(name)}
    return (found & known.keys()) - {name, "__init__"}


def test_nobody_inside_imports_the_package_itself():
    """It stands above all: what it re-exports has a home of its own."""
    strays = [
        f"{name}: line {node.lineno}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and (node.module == "fp4convert" or node.level))
        or (isinstance(node, ast.Import) and any(each.name == "fp4convert" for each in node.names))
    ]
    assert strays == []


def test_every_package_has_its_floor_and_imports_go_down():
    assert {name.partition(".")[0] for name in modules()} - {"__init__"} == FLOOR.keys()
    upward = [
        f"{name} imports {other}"
        for name in modules().keys() - {"__init__"}
        for other in neighbours(name)
        if (here := name.partition(".")[0]) != (there := other.partition(".")[0])
        and FLOOR[there] >= FLOOR[here]
    ]
    assert upward == []


def test_no_circle_of_files():
    left = {name: neighbours(name) for name in modules()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert left == {}, "these import each other"


def test_heavy_packages_stay_at_home():
    strays = [
        f"{name} imports {dotted}"
        for name in modules()
        for dotted in imported(name)
        if (homes := HOMES.get(dotted.partition(".")[0])) and not name.startswith(homes)
    ]
    assert strays == []


def test_nothing_grows_too_large():
    """Files, faces of packages, functions and lists of parameters: a smell to look at, and looked
    at here.
    """
    large = []
    for file in sorted(
        (*PACKAGE.rglob("*.py"), *(ROOT / "kernels").iterdir(), *(ROOT / "tests").rglob("*.py"))
    ):
        count = file.read_text(encoding="utf-8").count("\n")
        most = (
            MOST_FACE_LINES
            if file.name == "__init__.py" and file.parent != PACKAGE
            else MOST_FILE_LINES
        )
        if file != PACKAGE / f"{MADE.replace('.', '/')}.py":
            large += [f"{file.relative_to(ROOT)}: {count} lines"] * (count > most)
    for name, tree in modules().items():
        if name == MADE:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or 0) - node.lineno
                count = len(
                    [
                        each
                        for each in (*node.args.args, *node.args.kwonlyargs)
                        if each.arg != "self"
                    ]
                )
                most = PUBLIC_PARAMETERS.get(f"{name}.{node.name}", MOST_PARAMETERS)
                if lines >= MOST_FUNCTION_LINES or count > most:
                    large.append(f"{name}.{node.name}: {lines} lines, {count} parameters")
    assert large == []


def test_every_module_says_in_one_line_what_it_does():
    """The site draws the tree with these lines."""
    lines = {
        name: (ast.get_docstring(tree) or "").partition("\n")[0] for name, tree in modules().items()
    }
    assert {
        name: line
        for name, line in lines.items()
        if not line.endswith(".") or len(line) > MOST_WORDS_COLUMNS
    } == {}


def test_what_the_page_says_of_a_file_is_in_it():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    told = re.findall(r"`([\w/]+)\.py: ([\w.]+)`", page)
    wrong = []
    for file, name in told:
        try:
            attrgetter(name)(import_module(f"fp4convert.{file.replace('/', '.')}"))
        except (ImportError, AttributeError) as error:
            wrong.append(f"{file}.py: {name}: {error}")
    assert len(told) > 20
    assert wrong == []


def test_functions_say_what_they_do():
    """A docstring begins with a verb, in one line: no article, no pronoun, no clause. That of a
    class fits its line, too; options classes have help there, which is drawn by its own width.
    """
    odd = []
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (words := ast.get_docstring(node)):
                line = words.partition("\n")[0]
                if line.split()[0].lower() in NO_VERBS or len(line) > MOST_WORDS_COLUMNS:
                    odd.append(f"{name}.{node.name}: {line}")
            elif isinstance(node, ast.ClassDef) and not node.name.endswith("Options"):
                line = (ast.get_docstring(node) or "").partition("\n")[0]
                odd += [f"{name}.{node.name}: {line}"] if len(line) > MOST_WORDS_COLUMNS else []
    assert odd == []


def test_no_module_has_the_name_of_a_public_function():
    """But for the spine's own, which a newcomer looks for by that name."""
    import fp4convert

    assert all(getattr(fp4convert, name) is not None for name in fp4convert.__all__)
    named = {name.rpartition(".")[2] for name in modules().keys() - {"conversion.quantize"}}
    assert named & set(fp4convert.__all__) == set()


SPINE = ("conversion.quantize", "planning.plan", "execution.fill")
FEATURES = {
    "checkpoint.dialects": {"base", "forms", "registry", "stacks", "tables", "target_forms"},
    "checkpoint.encodings": {"base"},
    "makers": {"maker", "table", "unit", "methods"},
    "makers.methods": {"choice", "method"},
    "recipes": set(),
}
# In names of conversion.quantize.
FEATURE_WORDS = re.compile(r"fold(?!er)|padding|carried")
MOST_SPINE_LINES, MOST_SPINE_IFS = 250, 60


def test_the_spine_is_short_and_knows_no_feature_by_name():
    """It may import protocols and the one table of makers; a feature is a file beside it."""
    ifs = 0
    for name in SPINE:
        file = PACKAGE / f"{name.replace('.', '/')}.py"
        assert file.read_text(encoding="utf-8").count("\n") <= MOST_SPINE_LINES, name
        ifs += sum(isinstance(node, ast.If | ast.IfExp) for node in ast.walk(modules()[name]))
        for other in neighbours(name):
            package, _, leaf = other.rpartition(".")
            if package in FEATURES and package != "recipes":
                assert leaf in FEATURES[package], f"{name} imports {other}"
    assert ifs <= MOST_SPINE_IFS
    text = ast.unparse(modules()["conversion.quantize"])
    assert FEATURE_WORDS.findall(text) == []


def test_few_files_import_a_maker():
    """A maker is chosen by the table; who builds one otherwise drafts it for a fixed verdict."""
    drafting = ("planning.", "makers.", "conversion.carried_blocks", "conversion.dry_run")
    known = {"makers.maker", "makers.table", "makers.unit"}
    known |= {"makers.methods.choice", "makers.methods.method"}
    strays = [
        f"{name} imports {other}"
        for name in modules()
        for other in neighbours(name)
        if other.startswith("makers.") and other not in known and not name.startswith(drafting)
    ]
    assert strays == []


def test_numbers_of_the_formats_are_written_once():
    """2688 and 448 outside formats.py would be a second definition."""
    for name in modules().keys() - {"numerics.formats"}:
        numbers = [
            node.value for node in ast.walk(modules()[name]) if isinstance(node, ast.Constant)
        ]
        assert not {2688, 448} & {n for n in numbers if isinstance(n, int | float)}, name
