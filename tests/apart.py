"""Runs the tests of some folders in processes of their own. They are collected, chosen, spread over xdist's workers and
reported like all others.

A process that interprets kernels cannot compile them (fusednorm/tools/interpreter.py), and the tests of the C++ host
side register its ops for CPU tensors, for good. Each pytest process therefore starts a further process for each entry
of FOLDERS when it comes to the first test there.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from fusednorm.host import building

HERE = Path(__file__).parent
serving = False  # whether this is a process apart
Folders = tuple[str, ...]
NEEDS_CPP = ("host/native",)
FOLDERS = NEEDS_CPP, ("kernels/simulated", "simulator")


def folders_of(item: pytest.Item) -> Folders | None:
    return next((each for each in FOLDERS if any(item.path.is_relative_to(HERE / folder) for folder in each)), None)


class Processes:
    """A plugin that sends tests to the processes apart."""

    def __init__(self) -> None:
        self.connections: dict[Folders, Connection] = {}

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        folders = folders_of(item)
        if folders is None:
            return None
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self.reports(item, nextitem, folders):
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        item.session._setupstate.teardown_exact(nextitem)  # of fixtures of tests before this one
        return True

    def reports(self, item: pytest.Item, nextitem: pytest.Item | None, folders: Folders) -> list[pytest.TestReport]:
        hook, config = item.config.hook, item.config
        try:
            if folders not in self.connections:
                self.connections[folders] = start(config, folders)
            connection = self.connections[folders]
            connection.send((item.nodeid, nextitem and nextitem.nodeid))
            answers = connection.recv()
            if isinstance(answers, str):
                raise RuntimeError(answers)
        except Exception as error:  # the process could not start, or has crashed: the next test gets a new one
            self.connections.pop(folders, None)
            why = f"the process that runs {', '.join(folders)} gave no report: {type(error).__name__}: {error}"
            return [pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")]
        return [hook.pytest_report_from_serializable(config=config, data=each) for each in answers]

    def pytest_sessionfinish(self) -> None:
        for connection in self.connections.values():
            connection.close()


def start(config: pytest.Config, folders: Folders) -> Connection:
    if folders == NEEDS_CPP:
        building.build()
    ours, theirs = multiprocessing.Pipe()
    paths = [str(HERE / folder) for folder in folders]
    options = [*paths, f"--rootdir={config.rootpath}", "-p", "no:cacheprovider", "-p", "no:terminal"]
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, options), daemon=True)
    process.start()
    theirs.close()
    return ours


def serve(connection: Connection, options: list[str]) -> None:
    """The process apart: runs the tests whose ids it receives, until the connection is closed."""
    global serving
    serving = True
    os.environ.pop("TRITON_INTERPRET", None)  # still in time: nothing has imported Triton
    pytest.main(options, plugins=[Server(connection)])


class Server:
    """A plugin of the process apart."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.broken = connection, ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.broken += report.longreprtext if report.failed else ""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items, hook = {item.nodeid: item for item in session.items}, session.config.hook
        while True:
            try:
                asked, following = self.connection.recv()
            except EOFError:
                return True
            if asked not in items:
                self.connection.send(self.broken or "it is not collected there")
                continue
            # After the last known test fixtures of the session stay, because another test may follow.
            following = items.get(following) or next((each for each in session.items if each.nodeid != asked), None)
            session._setupstate.teardown_exact(items[asked])  # if another test was to follow
            reports = runtestprotocol(items[asked], nextitem=following, log=False)
            self.connection.send(
                [hook.pytest_report_to_serializable(config=session.config, report=each) for each in reports]
            )
