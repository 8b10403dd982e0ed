"""Contents of artifacts in few words, for engines to judge."""

from fp4convert.recipes.engine_rows import Contents, Part


def contents(dialect, *parts, model="llama", **facts):
    """Parts as "nvfp4", "mxfp4 experts" or "nvfp4 w4a4 experts"."""
    made = set()
    for words in parts:
        four = "w4a4" in words
        plain = words.replace(" w4a4", "").replace(" experts", "")
        made.add(Part(plain, 4 if four else 16, "experts" in words))
    return Contents(dialect, frozenset(made), model, **facts)
