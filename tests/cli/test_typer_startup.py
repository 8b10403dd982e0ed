"""cli/typer_startup.py: plain words become what typer makes of them, and what typer refuses is
still refused by typer.
"""

import io
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Annotated, Any

import pytest
import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from fp4convert.cli.typer_startup import PlainCommand

TEXTS = (
    *("8", "0", "-8", "+8", " 8", "8 ", "08", "1_0", "8.0", "8.5", ".5", "5.", "."),
    *("1.2.3", "1e3", "inf", "nan", "", "-", "٣", "²", "a/b"),
)
DIGITS = ("1" * 15, "1" * 16, "1" * 40, "0." + "1" * 15, "1" * 5000)
OPTIONS: dict[str, Any] = {
    "str": Annotated[str | None, typer.Option("--x")],
    "int": Annotated[int | None, typer.Option("--x")],
    "int from 0": Annotated[int | None, typer.Option("--x", min=0)],
    "int from 9": Annotated[int | None, typer.Option("--x", min=9)],
    "int to 7": Annotated[int | None, typer.Option("--x", max=7)],
    "float": Annotated[float | None, typer.Option("--x")],
    "float from 1": Annotated[float | None, typer.Option("--x", min=1)],
}


def taken(
    kind: type[TyperCommand], annotation: object, words: list[str], default: object = None
) -> tuple[object, ...]:
    """What an option of that annotation becomes, or what the user is told."""
    made: list[object] = []

    def command(x: Any = default) -> None:
        made.append(x)

    command.__annotations__["x"] = annotation
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False)
    app.command(cls=kind)(command)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            app(words, standalone_mode=False)
    except Exception as error:
        return type(error), str(error)
    return type(made[0]), repr(made[0])


@pytest.mark.parametrize("annotation", OPTIONS.values(), ids=OPTIONS)
def test_every_word_becomes_what_typer_makes_of_it(annotation: object) -> None:
    for word in (*TEXTS, *DIGITS):
        assert taken(PlainCommand, annotation, ["--x", word]) == taken(
            TyperCommand, annotation, ["--x", word]
        ), word
    assert taken(PlainCommand, annotation, []) == taken(TyperCommand, annotation, [])


@pytest.mark.parametrize(("kind", "word"), [(int, "8"), (float, "8"), (float, "8.5"), (str, "a/b")])
@pytest.mark.parametrize("parameter", [TyperArgument, TyperOption])
def test_plain_words_are_taken_without_typer(
    parameter: Any, kind: Callable[[str], object], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is left to it: it would take the same, after loading pydantic."""
    is_option, left, process = parameter is TyperOption, [], parameter.process_value

    def told(self: Any, ctx: Any, value: Any) -> Any:
        left.append(self.name)
        return process(self, ctx, value)

    monkeypatch.setattr(parameter, "process_value", told)
    annotation: Any = Annotated[kind, typer.Option("--x") if is_option else typer.Argument()]
    given = ["--x", word] if is_option else [word]
    assert taken(PlainCommand, annotation, given) == (type(kind(word)), repr(kind(word)))
    assert "x" not in left
    assert taken(TyperCommand, annotation, given) == (type(kind(word)), repr(kind(word)))
    assert "x" in left


@pytest.mark.parametrize("kind", [str, int, float])
def test_words_that_may_be_several(kind: type) -> None:
    annotation: Any = Annotated[list[kind] | None, typer.Option("--x")]  # type: ignore[valid-type]
    for words in ([], ["8"], ["8", "9"], ["8", "-9"], ["8", "x"]):
        given = [part for word in words for part in ("--x", word)]
        plain, usual = (taken(each, annotation, given) for each in (PlainCommand, TyperCommand))
        assert plain == usual, words


@pytest.mark.parametrize(
    ("kind", "default"), [(int, 16), (float, 1.0), (float, 1), (str, "auto"), (bool, True)]
)
def test_what_is_not_given(kind: type, default: object) -> None:
    annotation: Any = Annotated[kind, typer.Option("--x")]
    assert taken(PlainCommand, annotation, [], default) == taken(
        TyperCommand, annotation, [], default
    )


def test_what_is_missing_is_refused() -> None:
    def command(x: Annotated[str, typer.Argument()]) -> None:
        pass

    told = []
    for kind in (PlainCommand, TyperCommand):
        app: Callable[..., object] = typer.Typer(rich_markup_mode=None, add_completion=False)
        app.command(cls=kind)(command)  # type: ignore[attr-defined]
        with pytest.raises(Exception, match="Missing") as refused:
            app([], standalone_mode=False)
        told.append(refused.value.format_message())  # type: ignore[attr-defined]
    assert told[0] == told[1]


def test_typer_alone_still_loads_what_this_module_is_there_to_spare():
    """Once this fails, typer checks plain words without pydantic: delete cli/typer_startup.py."""
    code = (
        "import sys, typer\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def command(x: float) -> None: pass\n"
        "app(['8'], standalone_mode=False)\n"
        "sys.exit('pydantic' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1
