"""pytest's hooks: they pass options to ``options``, the run to ``session``, its record to ``recorder``.

Two doors register them: ``conformance/conftest.py`` for a path, `fx_quant_conformance.plugin` for ``--pyargs``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.conformance.machine.foreign import list_foreign_code
from fx_quant_conformance.conformance.machine.fork_server import name_server
from fx_quant_conformance.conformance.run.options import raise_usage_error_for, register
from fx_quant_conformance.conformance.run.progress import Progress
from fx_quant_conformance.conformance.run.recorder import PAYLOAD, Recorder
from fx_quant_conformance.conformance.run.resume import read_earlier
from fx_quant_conformance.conformance.run.session import (
    DESCRIPTION,
    DONE,
    GIVEN_OUTLINE,
    SERVER,
    Run,
    limit_run,
    preflight,
    run_of,
)
from fx_quant_conformance.reports.reading import FileFault, open_to_append
from fx_quant_conformance.reports.results import ResultsError
from fx_quant_conformance.reports.text import show

NAME = "fx-quant-conformance-hooks"
"""The plugin's name in pytest, by which it is registered once."""
WARNINGS = (
    "error::pytest.PytestUnraisableExceptionWarning",
    "ignore:torch.ao.quantization is deprecated:DeprecationWarning",
    "ignore:Failed to initialize NumPy:UserWarning",
    "ignore:torch.quantize_per_tensor, torch.quantize_per_channel and other:UserWarning",
)
"""The filters of warnings that a run needs: a checkout's pyproject.toml has them for the project's own tests too."""
_SUITE = Path(__file__).resolve().parents[1]
_RECORDER = pytest.StashKey[Recorder]()
FOREIGN_CODE = "conformance_foreign_code"
"""Key of the foreign code of a worker's process, in what the controlling process gets of it."""
_SILENCED = (("reportchars", "fE", "N"), ("tbstyle", "auto", "no"))
"""Options of pytest whose default repeats the suite's own summary: name, default, value without that output."""
_KINDS = {"claim": ("claim",), "job": ("model", "measurement")}


def register_hooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the hooks of this module with pytest, unless they are registered."""
    if not pluginmanager.has_plugin(NAME):
        pluginmanager.register(sys.modules[__name__], NAME)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `conformance.run.options` to pytest's."""
    register(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Open the run before pytest does anything; if there is nothing to run, end with an exit status.

    The controlling process gets a recorder; a worker, and a run that only collects, writes nothing. The message of a
    UsageError may have what a vendor's code says.
    """
    try:
        return _open_run(config)
    except pytest.UsageError as error:
        raise pytest.UsageError(show(str(error))) from error


def _open_run(config: pytest.Config) -> int | None:
    run = preflight(config)
    if not isinstance(run, Run):
        return run
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        with raise_usage_error_for(ResultsError, "--failed-of: " if run.options.failed_of else "--resume: "):
            earlier = read_earlier(run)
        _check_junit(config)
        config.stash[_RECORDER] = Recorder(limit_run(config, run, earlier.rows), earlier)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends the run as Ctrl-C does, with its report
    return None


def _check_junit(config: pytest.Config) -> None:
    """Raise UsageError if pytest could not write its own file at the end."""
    given: str | None = getattr(config.option, "xmlpath", None)
    if not given:
        return
    path = Path(os.path.expanduser(os.path.expandvars(given))).absolute()  # as pytest reads it
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        open_to_append(path).close()
    except OSError as error:
        raise pytest.UsageError(f"--junit-xml: {path} cannot be written: {error.strerror}") from error
    except FileFault as fault:
        raise pytest.UsageError(f"--junit-xml: {path} {fault}") from fault


def pytest_configure(config: pytest.Config) -> None:
    """Add the filters of warnings; in the controlling process register what records, and silence what it repeats."""
    for line in WARNINGS:
        config.addinivalue_line("filterwarnings", line)
    if _RECORDER not in config.stash:
        return
    config.pluginmanager.unregister(name="hypothesispytest")  # it would load Hypothesis at the end to say nothing
    config.pluginmanager.register(Controller(config.stash[_RECORDER], run_of(config)), "conformance-controller")
    for name, default, silent in _SILENCED:
        if getattr(config.option, name, None) == default:
            setattr(config.option, name, silent)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each selected claim and each selected job."""
    if not _is_ours(metafunc.definition):
        return
    for name, kinds in _KINDS.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, run_of(metafunc.config).make_params(*kinds))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop the test that pytest makes for an empty list of parameters."""
    items[:] = [item for item in items if not (_is_ours(item) and item.name.endswith("[NOTSET]"))]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach a test's rows to its report, which takes them from a worker to the recorder."""
    report = yield
    if call.when == "call" and PAYLOAD in item.stash:
        report.conformance = item.stash[PAYLOAD]  # type: ignore[attr-defined]
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the controlling process which foreign code a worker holds."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[FOREIGN_CODE] = _list_foreign_code(session.config)


def _list_foreign_code(config: pytest.Config) -> list[str]:
    """Return the foreign code of this process, and of the judge's as it was opened."""
    outline, plugins = run_of(config).outline, config.pluginmanager.get_plugins()
    return [*outline.foreign_code, *list_foreign_code(list(sys.modules), plugins, outline.sources or ())]


def _is_ours(item: pytest.Item) -> bool:
    """Tell whether a test is one of the suite's: others can be run beside them."""
    return item.path.resolve().is_relative_to(_SUITE)


class Controller:
    """The hooks of the controlling process, which pass reports to the recorder, and to workers what they need."""

    def __init__(self, recorder: Recorder, run: Run) -> None:
        self._recorder = recorder
        self._run = run
        self._ready: set[object] = set()
        self._progress = Progress(None)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Start to show progress, on a terminal or in a log; note the foreign code that is there."""
        self._recorder.note_foreign_code(_list_foreign_code(session.config))
        self._progress = Progress(session.config.pluginmanager.get_plugin("terminalreporter"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Return no letter for a test if the progress line replaces pytest's dots; with -v the verdict as its word."""
        if report.when != "call":
            return None
        if self._progress.replaces_dots:
            return report.outcome, "", ""
        self._recorder.take(report)
        verdict = self._recorder.find_verdict(report)
        return (report.outcome, "." if report.passed else "F", verdict) if verdict else None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Pass the collected tests to the recorder, in a run without workers."""
        self._recorder.start(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Give a worker what the backend says of itself, as it asks no process of its own, and what is left to do."""
        self._run.openers.close()  # the work is done elsewhere
        node.workerinput[DESCRIPTION] = self._run.setup.text
        node.workerinput[GIVEN_OUTLINE] = json.dumps(self._run.outline.to_data())
        node.workerinput[DONE] = sorted(self._run.done)
        spec = node.gateway.spec
        is_like_this = spec.popen and not spec.python and not spec.via
        node.workerinput[SERVER] = name_server() if is_like_this else ""

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: Sequence[str]) -> None:
        """Pass a worker's tests to the recorder; all workers collect the same ones."""
        self._ready.add(node)
        self._recorder.start(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Note a worker's foreign code; end the run, with status 1, if it dies before it has collected its tests."""
        self._recorder.note_foreign_code(getattr(node, "workeroutput", {}).get(FOREIGN_CODE, ()))
        if error and node not in self._ready:  # another worker would end the same way
            raise pytest.exit.Exception(show(f"a worker process could not start: {error}"), returncode=1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Pass a test's report to the recorder, and show the progress."""
        self._recorder.take(report)
        self._progress.show(*self._recorder.count_progress())

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Finish the results file, before any plugin can fail; the run's exit status follows from pytest's."""
        self._progress.end()
        self._recorder.note_foreign_code(_list_foreign_code(session.config))
        session.exitstatus = self._recorder.finish(exitstatus)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the summary of the results under its own heading."""
        terminalreporter.section("conformance")
        terminalreporter.write(self._recorder.summary)

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Print the verdict as the last line, after pytest's count of tests."""
        reporter: pytest.TerminalReporter | None = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and self._recorder.verdict:
            reporter.write_line(
                self._recorder.verdict, bold=True, green=self._recorder.passes, red=not self._recorder.passes
            )
