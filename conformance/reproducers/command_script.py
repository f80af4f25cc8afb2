"""Scripts of cases that ran on a device by a command: they run the command again, on the folder of that case alone."""

from __future__ import annotations

from fx_quant_conformance.conformance.reproducers.python_text import compose
from fx_quant_conformance.conformance.vectors.command import CommandSettings

_BODY = """
CASE = {case!r}
COMMAND = {command!r}
RUNS_IN, ENVIRONMENT, LIMIT = {folder!r}, {environment!r}, {timeout!r}
CHUNK = pathlib.Path(__file__).resolve().parents[1] / {chunk!r}

with tempfile.TemporaryDirectory() as made:
    bundle, outputs = pathlib.Path(made, "device"), pathlib.Path(made, "outputs")
    shutil.copytree(CHUNK / "device", bundle)
    outputs.mkdir()
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["cases"] = [row for row in manifest["cases"] if row["case"] == CASE]
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    places = {{"{{bundle}}": str(bundle), "{{outputs}}": str(outputs), "{{device}}": "0"}}
    words = COMMAND
    for place, path in places.items():
        words = [word.replace(place, path) for word in words]
    done = subprocess.run(words, cwd=RUNS_IN, env={{**os.environ, **ENVIRONMENT}}, timeout=LIMIT)
    print(f"the command ended with status {{done.returncode}}; the case is {{bundle}}/cases/{{CASE}}.json of {{CHUNK}}")
    for path in sorted((outputs / CASE).glob("*")):
        earlier = CHUNK / "outputs" / CASE / path.name
        is_same = earlier.is_file() and earlier.read_bytes() == path.read_bytes()
        print(f"{{path.name}}: {{'as' if is_same else 'not as'}} in the run that was judged, in {{earlier.parent}}")
raise SystemExit(1)
"""


def format_command_script(settings: CommandSettings, chunk: str, case: str, heading: str) -> str:
    """Return the text of a script; ``chunk``: the folder, below that of the report, that has the case."""
    body = _BODY.format(
        case=case,
        command=list(settings.command),
        folder=str(settings.folder.absolute()),
        environment=dict(settings.environment),
        timeout=settings.timeout,
        chunk=chunk,
    )
    return compose(heading, body, {})
