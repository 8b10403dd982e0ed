"""Draw results, recipes, codes and the machine."""

from __future__ import annotations

from textwrap import wrap

from fp4convert.cli.screen import WIDEST, Screen
from fp4convert.progress import count_text, duration_text, size_text
from fp4convert.report.text import (
    Document,
    adapter_text,
    explain_all,
    fake_quantized_text,
    fidelity_text,
)
from fp4convert.version import __version__

CODE_KINDS = {
    "findings": "findings of inspect and verify",
    "errors": "errors, with the exit code of the command",
}


def draw_result(screen: Screen, result: Document) -> None:
    """Draw the result of a conversion.

    adopted_bytes    bytes of the source that were converted before; they count for no rate
    bits_per_weight  of the quantized tensors
    """
    # where it is, in which format
    screen.unwrapped(result["output"], "bold")
    named = {"": result["format"], "dialect ": result["dialect"], "rule ": result["scale_rule"]}
    if (method := result.get("method")) != "rtn":
        named["method "] = method
    screen.line(f"  {', '.join(f'{word}{name}' for word, name in named.items() if name)}")
    # what became of tensors and bytes
    if experts := result.get("experts"):
        stays = f"{experts['kept']} of {experts['before']} experts kept"
        screen.line(f"  {stays} in each of {experts['layers']} layers")
    (how, converted), *others = result["tensors"].items()
    counts = [f"{count} {'kept' if what == 'copied' else what}" for what, count in others]
    screen.line(f"  {', '.join([f'{converted} tensors {how}', *counts])}")
    before, after = result["source_bytes"], result["output_bytes"]
    bits = result.get("bits_per_weight")
    weights = f", {bits:.3f} bits per quantized weight" if bits and before else ""
    ratio = f" ({100 * after / before:.0f} %)" if before else ""
    screen.line(f"  {size_text(before)} -> {size_text(after)}{ratio}{weights}")
    _draw_fidelity(screen, result)
    # how long it took; a part tells what it did itself
    share, seconds = result.get("share"), result["seconds"]
    worked = before if share else before - result.get("adopted_bytes", 0)
    rate = f", {size_text(worked / seconds)}/s" if worked and seconds else ""
    done = f"in {duration_text(seconds)} on {result['device']}{rate}"
    screen.line(f"  {done if worked or not before else 'already there: nothing to do'}")
    if share:
        part = f"part {share['index']} of {share['of']}, shards written: {share['shards']}"
        screen.line(f"  {part}. When every part is done:")
        screen.unwrapped(f"  {result['next'][0]}")
    else:
        screen.line(f"  digest {result['digest']}")
    # components of a pipeline, the Hub, another artifact
    for component in result.get("components", ()):
        name, count = component["name"], component["tensors"][how]
        sizes = " -> ".join(size_text(component[key]) for key in ("source_bytes", "output_bytes"))
        screen.line(f"  {name}: {count} tensors {how}, {sizes}")
        if fidelity := component.get("fidelity"):
            screen.line(f"  {name}: {fidelity_text(fidelity)}")
    if pushed := result.get("pushed"):
        screen.line(f"  pushed: {pushed}")
    if gone := result.get("hub_bytes"):
        screen.line(f"  {size_text(gone)} of it are there alone, and not in {result['output']}")
    if carried := result.get("carried"):
        _draw_carried(screen, carried)
    if not share:
        _draw_next(screen, result)


def draw_reproduced(screen: Screen, found: Document) -> None:
    """Draw the verdict of `reproduce`, and the files that differ."""
    differing, count = found["differing"], found["files"]
    made_by = found["made_by"] or "of no version that the record names"
    now = "" if made_by == __version__ else f"; now by {__version__}"
    by = f" (made by fp4convert {made_by}{now})"
    read, recorded = found["source_revision"], found["recorded_revision"]
    named = found["recorded_source"]
    if named and named != found["source"] and not read:
        where = f"read from {found['source']}"
        screen.line(f"{where}: the record says {named}, which was not asked", "yellow")
    if read and recorded and read != recorded:
        where = f"read from {found['source']} at commit {read}"
        screen.line(f"{where}: the recorded one, {recorded}, is not there", "yellow")
    if others := found["unrecorded"]:
        many = "1 file is" if len(others) == 1 else f"{len(others)} files are"
        screen.line(f"{many} not in the record, nor compared; the first is {others[0]}", "yellow")
    if found["reproduced"]:
        screen.line(f"reproduced: all {count} files came out again, byte for byte{by}", "green")
        return
    own = [entry for entry in differing if entry["file"] not in others]
    added = [entry["file"] for entry in differing if entry not in own]
    what = f"{len(own)} of {count} files differ" if own else "the record differs"
    if len(own) > count:
        what = f"{len(own)} files differ, or came out beside its {count}"
    screen.line(
        f"NOT reproduced: {'what engines load was added' if added and not own else what}{by}", "red"
    )
    for entry in own:
        where = f", first in {entry['tensor']}" if entry["tensor"] else ""
        what = "differs, or is not there" if entry["sha256"] else "did not come out"
        screen.line(f"  {entry['file']} {what}{where}")
    for file in added:
        screen.line(f"  {file} is what engines load, and the record does not name it")
    if found["record"]:
        screen.line(f"  of the record differ: {', '.join(found['record'])}")
    if found["derivation"]:
        screen.line(f"  derivation.json is not so: {', '.join(found['derivation'])}")


def draw_attested(screen: Screen, signed: Document) -> None:
    """Draw the signature of `attest`."""
    screen.unwrapped(signed["signature"], "bold")
    more = ", as the record has them" if signed["recorded"] else "; it has no record to compare"
    if others := signed["unrecorded"]:
        count = "one more is" if len(others) == 1 else f"{len(others)} more are"
        more += f"; {count} signed and not recorded, the first {others[0]}"
    screen.line(f"  signed: {signed['files'] - len(others)} files{more}")
    if signed["derivation"]:
        screen.line("  among them derivation.json, which states what it was made from")


def draw_pushed(screen: Screen, pushed: Document) -> None:
    """Draw what `push` uploaded."""
    screen.unwrapped(pushed["pushed"], "bold")
    gates = f"gates met: {', '.join(pushed['gates'])}" if pushed["gates"] else "no gate was set"
    grade = pushed["evaluated"]
    screen.line(f"  {pushed['files']} files, {size_text(pushed['bytes'])}; {gates}")
    screen.line(f"  evaluated: {grade}" if grade else "  not evaluated: its card has no KL")
    screen.line(f"  digest {pushed['digest']}")


def _draw_fidelity(screen: Screen, result: Document) -> None:
    """Draw the losses, and the share of an adapter that stays."""
    if fidelity := result.get("fidelity"):
        screen.line(f"  {fidelity_text(fidelity)}")
        for key, text in (("adapter", adapter_text), ("fake_quantized", fake_quantized_text)):
            if found := fidelity.get(key):
                screen.line(f"  {text(found)}")


def _draw_next(screen: Screen, result: Document) -> None:
    """Draw the commands that a person may run now."""
    if not screen.is_quiet:
        for number, step in enumerate(result.get("next", ())):
            screen.unwrapped(step, "bold", "      " if number else "next: ")


def _draw_carried(screen: Screen, carried: Document) -> None:
    """Draw the values that transcoding keeps, and those that it changes."""
    how = "keep every value in the new format" if "blocks" in carried else "are copied bit for bit"
    screen.line(f"  {carried['bit_for_bit']} of {carried['modules']} modules {how}")
    for key, what in (
        ("rounded", "one scale changes in its last bit when its reciprocal is stored"),
        ("lossy", "blocks too small for E4M3 were rounded"),
    ):
        if names := carried.get(key):
            screen.line(f"  {len(names)} are not ({what}), the first {names[0]}", "yellow")
    for key, what in (("floats", "ordinary weights"), ("q8_0", "Q8_0")):
        if count := carried.get(key):
            why = "for the dialect has no form for them"
            screen.line(f"  {count} become {what}, {why}", "yellow")
    if "blocks" in carried:
        blocks = f"{carried['kept_blocks']:,} of {carried['blocks']:,} blocks"
        screen.line(f"  {blocks} keep every value")
    if draft := carried.get("draft"):
        blocks = f"{draft['kept_blocks']:,} of {draft['blocks']:,}"
        screen.line(f"  {blocks} in {draft['modules']} modules of layers that draft tokens")


def draw_merged(screen: Screen, merged: Document) -> None:
    """Draw the document of `merge`."""
    screen.unwrapped(merged["output"], "bold")
    made = ", ".join(word for word in (merged["format"], merged["dialect"]) if word)
    size, seconds = size_text(merged["output_bytes"]), duration_text(merged["seconds"])
    count = count_text(merged["shards"], "shard")
    screen.line(f"  {count} merged ({made}), {size}, in {seconds}")
    _draw_fidelity(screen, merged)
    screen.line(f"  digest {merged['digest']}")
    _draw_next(screen, merged)


def draw_recipes(screen: Screen, found: Document) -> None:
    """Draw every recipe in a line, or one recipe, or YAML.

    Families have their models.
    """
    if "yaml" in found:
        for line in found["yaml"].splitlines():
            screen.unwrapped(line)
        return
    if "recipes" not in found:
        draw_recipe(screen, found)
        return
    width = max(len(recipe["name"]) for recipe in found["recipes"])
    for recipe in found["recipes"]:
        models = ", ".join((*recipe["model_types"], *recipe["class_names"]))
        screen.line(f"{recipe['name']:{width}}  {recipe['about']}")
        if models:
            screen.line(f"{'':{width}}  for {models}")


def draw_recipe(screen: Screen, recipe: Document) -> None:
    """Draw one recipe, in the words of its file."""
    screen.line(f"{recipe['name']}: {recipe['about']}")
    if models := (*recipe["model_types"], *recipe["class_names"]):
        screen.line(f"for {', '.join(models)}")
    if recipe["base"]:
        screen.line(f"builds on {', '.join(recipe['base'])}")
    for rule in recipe["keep"]:
        screen.line(f"keeps {', '.join(rule['modules'])}: {rule['reason']}")
    for rule in recipe["only"]:
        screen.line(f"quantizes only {', '.join(rule['modules'])}")
    for rule in recipe["formats"]:
        screen.line(f"makes {rule['format']} of {', '.join(rule['modules'])}")
    for members in recipe["groups"]:
        screen.line(f"one scale for {', '.join(members)}")
    for rule in recipe["stacks"]:
        rows = f", {rule['rows']}" if len(rule["members"]) > 1 else ""
        stacks = f"{', '.join(rule['tensors'])} for stacks of {', '.join(rule['members'])}"
        screen.line(f"takes {stacks}: {rule['order']}{rows}")
    for rule in recipe["experts"]:
        places = ", ".join((*rule["rows"], *rule["columns"]))
        screen.line(f"counts experts by {', '.join(rule['counts'])}: in {places}")


def draw_explained(screen: Screen, explained: Document) -> None:
    """Draw the document of `explain`: one code, a subject's codes, or all."""
    if "page" in explained:
        for line in explained["page"].splitlines():
            screen.unwrapped(line)
    elif "code" in explained:
        draw_code(screen, explained)
    elif "gpu" in explained:
        draw_gpu(screen, explained["gpu"])
    elif "engine" in explained:
        draw_engine(screen, explained["engine"])
    elif explained == explain_all():
        draw_subjects(screen, explained)
    else:
        draw_codes(screen, explained)


def draw_gpu(screen: Screen, gpu: Document) -> None:
    """Draw what engines run on a card."""
    screen.line(f"{gpu['name']}: {gpu['architecture'].upper()}, {gpu['memory_gb']} GB", "bold")
    for engine in dict.fromkeys(use["engine"] for use in gpu["uses"]):
        screen.line(f"{engine}, read in its source:")
        for use in gpu["uses"]:
            if use["engine"] == engine:
                screen.line(f"  {use['says']}", hang=4)
    screen.line(gpu["advice"])


def draw_engine(screen: Screen, engine: Document) -> None:
    """Draw what an engine loads, a row of its file in a line."""
    name = " ".join(filter(None, (engine["name"], engine["version"])))
    screen.line(f"{name}: {engine['tried']}", "bold")
    for row in engine["rows"]:
        which = " ".join(filter(None, (row["versions"], *row["dialects"])))
        more = f"; {row['instead']}" if row["instead"] else ""
        screen.line(
            f"  {row['effect']:<8}{which}: {row['says']}{more} ({row['evidence']})", hang=10
        )
    if engine["serve"]:
        screen.line(f"serve: {engine['serve']}")


def draw_subjects(screen: Screen, known: Document) -> None:
    """Draw the subjects of codes, a few codes of each, and how to see all."""
    headings = {one["subject"] for kind in CODE_KINDS for one in known[kind]}
    width = max(map(len, headings))
    for kind, title in CODE_KINDS.items():
        screen.line(title, "bold")
        for subject in dict.fromkeys(one["subject"] for one in known[kind]):
            codes = [one["code"] for one in known[kind] if one["subject"] == subject]
            begun = f"  {subject:{width}}  {len(codes):>2}: "
            room = min(screen.width, WIDEST) - len(begun) - len(", ...")
            told = wrap(", ".join(codes), room, break_on_hyphens=False)
            more = ", ..." if len(told) > 1 else ""
            screen.line(f"{begun}{told[0].removesuffix(',')}{more}")
    screen.line("")
    screen.line("All codes of a subject: fp4convert explain hub. One code: explain sqnr-low.")


def draw_codes(screen: Screen, known: Document) -> None:
    """Draw every code in a line, under its subject."""
    listed = [*known["findings"], *known["errors"]]
    width = max(len(one["code"]) for one in listed)
    for kind, title in CODE_KINDS.items():
        for subject in dict.fromkeys(one["subject"] for one in known[kind]):
            screen.line(f"{subject}: {title}", "bold")
            for one in known[kind]:
                if one["subject"] == subject:
                    exits = "".join(f"{code} " for code in one.get("exits", ()))
                    screen.line(f"  {one['code']:{width}}  {exits}{one['meaning']}")


def draw_code(screen: Screen, explained: Document) -> None:
    """Draw the meaning, the origin and the remedy of one code."""
    code, finding, failure = explained["code"], explained["finding"], explained["error"]
    if finding:
        screen.line(f"{code}: a finding ({', '.join(finding['levels'])})", "bold")
        for key, name in (("means", "meaning"), ("seen", "seen"), ("what to do", "remedy")):
            screen.line(f"  {key:<12}{finding[name]}", hang=14)
    if failure:
        exits = ", ".join(map(str, failure["exits"]))
        screen.line(f"{code}: an error (exit code {exits})", "bold")
        for key, name in (("means", "meaning"), ("comes from", "origin"), ("what to do", "remedy")):
            screen.line(f"  {key:<12}{failure[name]}", hang=14)


def draw_examination(screen: Screen, found: Document) -> None:
    """Draw the document of `doctor`."""
    cache, cpu, disk = found["cubin_cache"], found["cpu"], found["disk"]
    driver = "none"
    if found["driver"]:
        driver = f"NVIDIA, runs CUDA {found['driver']}, shows {found['gpus_shown']} GPU(s)"
    kept = "not writable: each run compiles again"
    if cache["writable"]:
        kept = f"{cache['files']} files, {size_text(cache['bytes'])}"
    free = "the folder is gone"
    if disk["folder"]:
        free = f"{disk['folder']}: {disk['free_bytes'] / 1e9:,.1f} GB free"
    no_cupy = "none that can be used" if found["gpus_shown"] else "not looked for"
    kernels = f"kernels for {cpu['instruction_set']}"
    rows = {
        "fp4convert": f"{found['fp4convert']}, Python {found['python']}",
        "--device auto": found["device"],
        "driver": driver,
        "CuPy": found["cupy"] or no_cupy,
        "NVRTC": found["nvrtc"] or "-",
        "cubin cache": f"{cache['folder']} ({kept})",
        "CPU": f"{cpu['processors']} processors, {cpu['machine']}, {kernels}",
        "disk": free,
    }
    for key, value in rows.items():
        screen.line(f"{key:<16}{value}", hang=16)
    for gpu in found["gpus"]:
        capability = f"compute capability {gpu['compute_capability']}"
        memory = f"{gpu['memory_bytes'] / 1e9:,.1f} GB"
        screen.line(
            f"{gpu['device']:<16}{gpu['name']}, {capability}, {memory}, {gpu['target']}", hang=16
        )
        for how in ("hardware", "software"):
            if kernels := ", ".join(gpu[f"{how}_conversion"]):
                screen.line(f"{'':<16}E2M1 conversion in {how}: {kernels}")
    for gpu in found["gpus_refused"]:
        screen.line(f"{gpu['device']:<16}cannot be used: {gpu['reason']}", "yellow")
    if found["problem"]:
        screen.line(f"no GPU is used: {found['problem']}", "yellow")
        screen.line(f"  {found['next']}")
