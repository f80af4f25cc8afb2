"""Scripts of cases that ran on a device by a command: they run the command again, on the folder of that case alone."""

from __future__ import annotations

from fx_quant_conformance.conformance.reproducers.python_text import compose
from fx_quant_conformance.conformance.vectors.command import CALL

_BODY = """
CASE = {case!r}
CHUNK = pathlib.Path(__file__).resolve().parents[1] / {chunk!r}
call = json.loads((CHUNK / {call!r}).read_text())

with tempfile.TemporaryDirectory() as made:
    bundle, outputs = pathlib.Path(made, "device"), pathlib.Path(made, "outputs")
    shutil.copytree(CHUNK / "device", bundle)
    outputs.mkdir()
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["cases"] = [row for row in manifest["cases"] if row["case"] == CASE]
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    words = call["command"]
    for place, path in (("{{bundle}}", bundle), ("{{outputs}}", outputs), ("{{device}}", "0")):
        words = [word.replace(place, str(path)) for word in words]
    environment = {{**os.environ, **call["environment"]}}
    done = subprocess.run(words, cwd=call["folder"], env=environment, timeout=call["timeout"])
    print(f"the command ended with status {{done.returncode}}; the case is device/cases/{{CASE}}.json in {{CHUNK}}")
    for path in sorted((outputs / CASE).glob("*")):
        earlier = CHUNK / "outputs" / CASE / path.name
        is_same = earlier.is_file() and earlier.read_bytes() == path.read_bytes()
        print(f"{{path.name}}: {{'as' if is_same else 'not as'}} in the run that was judged, in {{earlier.parent}}")
raise SystemExit(1)
"""


def format_command_script(chunk: str, case: str, heading: str) -> str:
    """Return the text of a script; ``chunk``: the folder, below that of the report, that has the case and the call."""
    return compose(heading, _BODY.format(case=case, chunk=chunk, call=CALL), {})
