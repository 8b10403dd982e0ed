"""A page that plans conversions and streams them into a repository; fp4convert does all of it."""

import hashlib
import html
import os
import re
import shutil
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

import fp4convert

FOR = ["vllm", "sglang", "tensorrt-llm", "transformers", "llama.cpp", "mlx", "comfyui", "diffusers"]
TABLE = ["pattern", "count", "action", "format", "reason", "group", "source_bytes", "output_bytes"]
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
PLACE = tempfile.TemporaryDirectory(prefix="fp4convert-space-")
ABOUT = Path(__file__).with_name("README.md").read_text("utf-8").split("<!--page-->")[1]
ONE = threading.Lock()  # whoever converts has it
RUNS: dict[str, list["Run"]] = {}  # by the session of a page


class Run(fp4convert.Phases):
    """What one press of a button told and made, and whether it shall stop."""

    def __init__(self) -> None:
        super().__init__(lambda line, tensor: self.lines.append(f"{line}  {tensor}"), says_all=True)
        self.lines = ["One conversion runs at a time; others wait."]
        self.made = dict.fromkeys(("summary", "link", "digest", "card"), "") | {"modules": []}
        self.is_stopped = threading.Event()

    def report(self, tensor: str, nbytes: int) -> None:
        if self.is_stopped.is_set():
            raise fp4convert.OutputError("stopped", "Nothing is committed.", "Start goes on.")
        super().report(tensor, nbytes)

    def carry_out(self, button: str, token: str, *fields: Any) -> None:
        """Do it, and tell how it failed; a traceback goes to the log, without the token."""
        token = token.strip() or os.environ.get("HF_TOKEN", "")
        try:
            (plan if button == "Plan" else convert)(self, **read_fields(button, token, *fields))
            self.end()
        except fp4convert.Fp4Error as error:
            self.lines.append(f"{error.message}\nNext: {error.next_step}")
        except Exception:
            print(traceback.format_exc().replace(token or "\0", "***"), flush=True)
            found = "Committed; not all can be shown." if self.made["digest"] else "A bug of ours."
            self.lines.append(f"{found}\nNext: report it, with the log of this Space.")


def read_fields(button: str, token: str, source: str, target: str, *rest: Any) -> dict[str, Any]:
    """Return the words of `quantize`; without a push where no target is named."""
    for what, name in (("Source", source), ("Target", target or source)):
        if not REPOSITORY.fullmatch(name):  # a folder would be read from this machine
            raise fp4convert.InputError("usage", f"{what} {name!r}; expected ORG/NAME", "Copy it.")
    if (target and not token) or (button == "Start" and not target):
        raise fp4convert.InputError("no-token", "Target or token is empty.", "Fill in both.")
    words = {name: rest[at] or None for at, name in enumerate(("engine", "format", "revision"))}
    key = hashlib.sha256(repr((source, target, rest)).encode()).hexdigest()
    words |= {"source": source, "token": token or None, "output": Path(PLACE.name, "runs", key)}
    return words | ({"push_to_hub": target, "private": rest[3], "no_keep": True} if target else {})


def plan(run: Run, **words: Any) -> dict[str, Any]:
    """Show what `quantize` would do, by kinds of modules; return its words with the disk's GB."""
    if "push_to_hub" in words:  # a free Space has 50
        words["disk"] = min(40.0, 0.9 * shutil.disk_usage(PLACE.name).free / 1e9)
    found = fp4convert.preview_quantize(**words, phases=run)
    before, after, peak = (f"{found[at] / 1e9:,.3f} GB" for at in (*TABLE[-2:], "peak_disk_bytes"))
    bits = f"{found['bits_per_weight'] or 16:.2f} bits a quantized weight"
    lines = [f"{found['format']} in dialect {found['dialect']}", f"{before} become {after}, {bits}"]
    if "disk" in words:
        refused = found.get("error", {"message": "which has room"})["message"]
        lines += [f"at most {peak} on this disk at once: {refused}"]
    lines += [f"{e['engine']} {e['versions']} {e['why']}" for e in [found.get("engine")] if e]
    run.made["summary"] = "\n".join(lines + [f"warning: {line}" for line in found["warnings"]])
    run.made["modules"] = [[row[name] or "" for name in TABLE] for row in found["patterns"]]
    return words


def convert(run: Run, **words: Any) -> None:
    """Convert into the target, and look at what it has then; small files stay until the next."""
    run.begin("wait", 0)
    with ONE:
        run.report("", 0)  # which looks whether it was stopped
        for other in {*words["output"].parent.glob("*")} - {words["output"]}:
            shutil.rmtree(other)  # what an earlier, unfinished run left
        words = plan(run, **words)
        told = {"tell": run.lines.append, "warn": run.lines.extend, "phases": run}
        made = fp4convert.quantize(**words, **told)
        url = html.escape(made.pushed)
        run.made |= {"link": f'<a href="{url}" target="_blank">{url}</a>', "digest": made.digest}
        there = {"revision": url.rpartition("/")[2], "token": words["token"]}
        found = fp4convert.inspect(words["push_to_hub"], engine=words["engine"], **there)
        run.lines += [each["detail"] for each in found["findings"]] or ["inspect: healthy"]
        card = hf_hub_download(words["push_to_hub"], "README.md", local_dir=PLACE.name, **there)
        run.made["card"] = Path(card).read_text("utf-8")


def page() -> Any:
    """Make the page; what comes of a checkpoint is plain text in it."""
    import gradio as gr

    def follow(request: gr.Request, button: str, *fields: Any) -> Any:
        RUNS.setdefault(str(request.session_hash), []).append(run := Run())
        thread = threading.Thread(target=run.carry_out, args=(button, *fields), daemon=True)
        thread.start()
        is_over, was = False, {}
        while not is_over:
            thread.join(0.5)
            is_over = not thread.is_alive()
            now = {"progress": "\n".join(run.lines[-400:]), **run.made}
            yield {shown[part]: now[part] for part in now if now[part] != was.get(part)}
            was = now | {"progress": None}  # which always goes along

    def stop(request: gr.Request) -> None:
        for run in RUNS.pop(str(request.session_hash), []):
            run.is_stopped.set()

    def box(label: str, **how: Any) -> gr.Textbox:
        return gr.Textbox(label=label, elem_id=label.lower(), min_width=280, **how)

    with gr.Blocks(title="fp4convert", analytics_enabled=False) as blocks:
        gr.Markdown(ABOUT)
        with gr.Row():
            form = [box("Token", type="password"), box("Source"), box("Target")]
            form += [gr.Dropdown([*FOR, ""], label="Engine", allow_custom_value=True)]
            form += [gr.Dropdown(["", "nvfp4", "mxfp4"], label="Format")]
            form += [box("Revision"), gr.Checkbox(label="Private")]
        with gr.Row():
            buttons = [gr.Button(name, elem_id=name.lower()) for name in ("Plan", "Start", "Stop")]
        shown = {"progress": box("Progress", lines=6), "summary": box("Summary", lines=3)}
        shown["modules"] = gr.Dataframe(headers=TABLE, elem_id="modules", wrap=True)
        shown |= {"link": gr.HTML(elem_id="link"), "digest": box("Digest"), "card": box("Card")}
        off: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        for each in buttons[:2]:
            each.click(follow, [each, *form], [*shown.values()], concurrency_limit=None, **off)
        buttons[2].click(stop, queue=False, **off)
        blocks.unload(stop)
    return blocks.queue(max_size=20, api_open=False)


if __name__ == "__main__":
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before it is imported
    os.chdir(tempfile.mkdtemp(dir=PLACE.name))  # where ORG/NAME is no folder
    page().launch(run_history=False, footer_links=[], ssr_mode=False)
