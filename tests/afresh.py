"""Runs code as `python -c` does, in a process that has imported torch and nothing of this package: a fork of one that
keeps waiting, because importing torch takes seconds. CUDA refuses forks of a process that has used it, be it to count
GPUs. Such a fork starts Python anew."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(
    code: str, *arguments: object, cwd: Path = ROOT, environment: Mapping[str, str] | None = None, after: str = "torch"
) -> subprocess.CompletedProcess:
    """environment: os.environ by default. Its PYTHONPATH is searched behind cwd. after: the module that is imported."""
    variables = dict(os.environ if environment is None else environment)
    server = _server(after)
    print(json.dumps([code, [*map(str, arguments)], str(cwd), variables]), file=server.stdin, flush=True)
    return subprocess.CompletedProcess(code, *json.loads(server.stdout.readline()))


def run_module(name: str, *arguments: object, **more) -> subprocess.CompletedProcess:
    """As `python -m NAME` does. more: as for `run`."""
    return run(f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)", *arguments, **more)


@functools.cache
def _server(after: str) -> subprocess.Popen:
    """It ends when this process does, which closes its stdin. With -E its path has nothing of PYTHONPATH."""
    command = [sys.executable, "-E", __file__, after]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT.anchor)


def _serve(after: str, only: str | None = None) -> None:
    """only: the one line to serve, by this process itself."""
    sys.path.pop(0)  # the folder of this file
    importlib.import_module(after)
    if only:
        _run(*json.loads(only))
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
            child = os.fork()
            if not child:
                os.dup2(out.fileno(), 1)
                os.dup2(error.fileno(), 2)
                if "torch" in sys.modules and sys.modules["torch"].cuda._is_in_bad_fork():
                    os.execv(sys.executable, [sys.executable, "-E", __file__, after, line])
                _run(*json.loads(line))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said = [(file.seek(0), file.read())[1] for file in (out, error)]
        print(json.dumps([code, *said]), flush=True)


def _run(code: str, arguments: list[str], cwd: str, environment: dict[str, str]) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = ["-c", *arguments]
    sys.path[:0] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    exited = 0
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        exited = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        exited = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exited)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
