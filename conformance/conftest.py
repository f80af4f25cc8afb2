"""pytest's hooks, handed on: options to ``options``, the run and its record to ``session``, xdist to ``scheduling``."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from conformance.options import register
from conformance.session import FINDING, Recorder, preflight, recorder_of, run_of

if TYPE_CHECKING:
    from conformance.scheduling import ClaimScheduling


def pytest_addoption(parser: pytest.Parser) -> None:
    register(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    return preflight(config)


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "reportchars", "") == "fE":  # pytest's default: the suite's own summary says it better
        config.option.reportchars = "N"
    if recorder := recorder_of(config):
        config.pluginmanager.register(Controller(recorder), "conformance-controller")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "claim" in metafunc.fixturenames:
        metafunc.parametrize(("claim", "stage"), run_of(metafunc.config).params())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call" and FINDING in item.stash:
        report.conformance = item.stash[FINDING]  # type: ignore[attr-defined]
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ClaimScheduling:
    from conformance.scheduling import ClaimScheduling

    return ClaimScheduling(config, log)


class Controller:
    """The hooks of the controlling process alone: what comes in goes to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._ready: set[object] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._recorder.start(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: Sequence[str]) -> None:
        self._ready.add(node)
        self._recorder.start(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        if error and node not in self._ready:  # another worker would end the same way
            raise pytest.exit.Exception(f"a worker process could not start: {error}", returncode=1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._recorder.take(report)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        session.exitstatus = self._recorder.finish(exitstatus)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("conformance")
        terminalreporter.write(self._recorder.summary)
