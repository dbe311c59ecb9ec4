"""The doctor's findings, and which of them are problems."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import afresh
import pytest
import torch

import fusednorm
from fusednorm.__main__ import main
from fusednorm.host import native, torch_compat, triton_compat
from fusednorm.tools import doctor
from fusednorm.tools.doctor import Finding

ROOT = Path(__file__).parents[2]


def gpu(major: int, minor: int) -> SimpleNamespace:
    return SimpleNamespace(name="X", major=major, minor=minor, multi_processor_count=4, total_memory=1 << 30)


def test_doctor_finds_this_machine_able():
    # This process interprets Triton. The doctor has a process without the interpreter, so that a GPU runs its ops.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = afresh.run_module("fusednorm", "doctor", environment=environment)
    said = asked.stdout
    assert asked.returncode == 0, said + asked.stderr
    machine = "fusednorm", "python", "torch", "triton", "device", "compiler", "cache"
    for subject in (*machine, "native", "cpu ops", "cuda ops"):
        assert f" {subject} " in said
    assert "Everything this machine can run works." in said


def test_a_problem_makes_the_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "diagnose", lambda: [Finding("ok", "a", "fine"), Finding("problem", "b", "broken")])
    assert doctor.run(argparse.Namespace()) == 1
    assert "Problems: 1." in capsys.readouterr().out


def test_one_broken_check_does_not_hide_the_others(monkeypatch):
    def check_device():
        raise OSError("no driver")

    monkeypatch.setattr(doctor, "check_device", check_device)
    findings = {finding.subject: finding for finding in doctor.diagnose()}
    assert findings["device"] == Finding("problem", "device", "OSError: no driver")
    assert findings["cpu ops"].status == "ok"


def test_old_versions_are_problems(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    monkeypatch.setattr(doctor, "triton_version", lambda: "3.5.1")
    assert doctor.check_versions()[-1] == Finding("problem", "torch", "2.10.1+cpu, needs 2.11 or later")
    assert doctor.check_triton() == [Finding("problem", "triton", "3.5.1, needs 3.6 or later")]


@pytest.mark.parametrize("has_gpu, status", [(True, "problem"), (False, "note")])
def test_triton_and_compiler_are_needed_where_there_is_a_gpu(has_gpu, status, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(doctor, "triton_version", lambda: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert [f.status for f in (*doctor.check_triton(), *doctor.check_compiler())] == [status, status]


def test_gpus_before_sm_80_are_problems():
    assert doctor.describe_gpu(gpu(7, 5)).status == "problem"
    assert doctor.describe_gpu(gpu(8, 0)) == Finding("ok", "device", "X, sm_80, 4 SMs, 1 GiB")


def test_a_compiler_that_is_named_but_not_there_and_a_cache_inside_of_a_file_are_told(tmp_path, monkeypatch):
    from triton import knobs

    monkeypatch.setenv("CC", "no-such-compiler -m64")
    (finding,) = doctor.check_compiler()
    assert finding.status != "ok" and finding.text.startswith("no no-such-compiler -m64: Triton needs a C compiler")
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "file" / "cache"))
    (tmp_path / "file").touch()
    assert doctor.check_cache()[0].status == "problem"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written_is_a_problem(tmp_path, monkeypatch):
    from triton import knobs

    tmp_path.chmod(0o500)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    assert doctor.check_cache()[0].status == "problem"


def test_the_host_side_in_cpp_is_no_problem_whether_it_is_there_or_not(monkeypatch):
    monkeypatch.setattr(triton_compat, "installed", lambda: (3, 6))
    monkeypatch.setattr(native, "extension", object())
    assert doctor.check_native() == [Finding("ok", "native", "built: ops repeat without Python")]
    monkeypatch.setattr(native, "extension", None)
    (finding,) = doctor.check_native()
    assert finding.status == "note" and finding.text.endswith("run: python -m fusednorm build")


def test_the_command_knows_its_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"fusednorm {fusednorm.__version__}\n"


def test_without_torch_a_command_answers_with_a_sentence():
    code = "import sys, runpy; sys.modules['torch'] = None; sys.argv = ['-m']; runpy._run_module_as_main('fusednorm')"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert asked.returncode == 1 and "fusednorm needs PyTorch 2.11 or later, found none" in asked.stderr
    assert len(asked.stderr.splitlines()) == 1


def test_wrong_ops_are_a_problem(monkeypatch):
    right = doctor.fused
    monkeypatch.setattr(doctor, "fused", lambda case, inputs: right(case, doctor.make_inputs(case, seed=1)))
    (finding,) = doctor._guarded(doctor.check_cpu_ops)
    assert finding.status == "problem"
    assert "AssertionError: layer-64x1024-bf16" in finding.text


@pytest.mark.parametrize("release, status", [((3, 6), "ok"), ((3, 9), "ok"), ((3, 10), "note"), ((4, 0), "note")])
def test_a_triton_whose_launcher_is_not_known_is_named(release, status, monkeypatch):
    monkeypatch.setattr(triton_compat, "installed", lambda: release)
    monkeypatch.setattr(doctor, "triton_version", lambda: f"{release[0]}.{release[1]}.0")
    (finding,) = doctor.check_triton()
    assert finding.status == status
    if status == "note":
        assert "us of host time" in finding.text and "those of 3.6, 3.7, 3.8, 3.9 have" in finding.text
        monkeypatch.setattr(native, "extension", None)
        assert "fusednorm build" in doctor.check_native()[0].text


def test_names_that_a_torch_lacks_are_named(monkeypatch):
    monkeypatch.setattr(torch_compat, "missing", ["torch._C._x"])
    assert "torch._C._x" in doctor.missing_names()[0].text
