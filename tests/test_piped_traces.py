"""Traces through a pipe: in every format what the file gives, and an error by name where there is no room for them."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from click.testing import CliRunner
from routing import groups_of, tokens

from fastcache.cli import main
from fastcache.errors import TraceError
from fastcache.traces import read, read_trace, write_trace
from fastcache.traces.importers import FORMATS

LAYERS, EXPERTS = 4, 9


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return {format: a file of it}, all of one run, larger than a pipe holds."""
    directory = tmp_path_factory.mktemp("traces")
    trace = tokens(layers=LAYERS, experts=EXPERTS, top_k=2, count=2000)
    groups = [(group[0] // EXPERTS, [key % EXPERTS for key in group]) for group in groups_of(trace)]
    files = {name: directory / name for name in FORMATS}
    write_trace(trace, files["fastcache"])
    np.array([(layer, e) for layer, experts in groups for e in experts], "<i4").tofile(files["kimi-k3"])
    with open(files["vllm"], "wb") as file:
        np.save(file, np.array([experts for _, experts in groups]).reshape(-1, LAYERS, 2))
    lines = {
        "jsonl": ({"layer": layer, "experts": experts} for layer, experts in groups),
        "megatron": ({"step": 0, "layer": layer, "top_indices": [experts]} for layer, experts in groups),
    }
    for name, rows in lines.items():
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    files["route-csv"].write_text(
        f"# route_trace v1\n# n_layer={LAYERS} n_expert={EXPERTS} n_expert_used=2\n"
        + "".join(f"0,1,{i // LAYERS},{n},0,{e},1,0,0\n" for i, (n, experts) in enumerate(groups) for e in experts)
    )
    return files


def piped(path, read, tmp_path):
    """Return what read() makes of a named pipe that a thread writes the file into."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write():
        with open(pipe, "wb") as file:
            file.write(path.read_bytes())

    writer = threading.Thread(target=write)
    writer.start()
    try:
        return read(pipe)
    finally:
        writer.join()


def command(text, **environment):
    return subprocess.run(
        ["bash", "-c", text.replace("fastcache ", f"{sys.executable} -m fastcache ")],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", list(FORMATS))
def test_a_pipe_gives_what_the_file_gives(files, tmp_path, name, named):
    whole = read(files[name])
    trace = piped(files[name], lambda pipe: read(pipe, name if named else None), tmp_path)
    for field in ("keys", "batches", "phase", "token"):
        np.testing.assert_array_equal(getattr(trace, field), getattr(whole, field), err_msg=field)
    assert trace.layers == whole.layers and whole.requests == 2000 * LAYERS * 2
    assert trace.name == {"fastcache": "made"}.get(name, "pipe")


def test_read_trace_takes_a_pipe_too(files, tmp_path):
    assert piped(files["fastcache"], read_trace, tmp_path).requests == 2000 * LAYERS * 2


def test_a_bad_record_of_a_pipe_is_named_by_the_pipes_name(tmp_path):
    bad = tmp_path / "bad"
    np.array([(0, 1), (0, -1)] * 40_000, "<i4").tofile(bad)
    with pytest.raises(TraceError, match=f"{tmp_path / 'pipe'}, record 1: layer 0, expert -1") as caught:
        piped(bad, lambda pipe: read(pipe, "kimi-k3"), tmp_path)
    assert caught.value.filename == str(tmp_path / "pipe")


def test_commands_take_standard_input_and_process_substitutions(files):
    plain = json.loads(command(f"fastcache replay {files['kimi-k3']} --slots 5 --policy lru --json").stdout)
    assert plain["requests"] == 2000 * LAYERS * 2
    for name in ("kimi-k3", "vllm"):
        done = command(f"cat {files[name]} | fastcache replay /dev/stdin --slots 5 --policy lru --json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["rows"] == plain["rows"]
    done = command(f"fastcache mrc --policy lru <(cat {files['jsonl']})")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests"] == plain["requests"]


def test_nothing_of_a_pipe_is_left_behind(files, tmp_path, monkeypatch):
    room = tmp_path / "room"
    room.mkdir()
    monkeypatch.setenv("TMPDIR", str(room))
    open_files = len(os.listdir("/proc/self/fd"))
    piped(files["jsonl"], read, tmp_path)
    assert not list(room.iterdir()) and len(os.listdir("/proc/self/fd")) == open_files


def test_input_without_end_is_an_error_by_name_once_there_is_no_room(tmp_path):
    """A limit on file sizes stands in for a full disk; the input would never end."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))

    with subprocess.Popen(["cat", "/dev/zero"], stdout=subprocess.PIPE) as zeros:
        done = subprocess.run(
            [sys.executable, "-m", "fastcache", "replay", "/dev/stdin"],
            stdin=zeros.stdout,
            capture_output=True,
            text=True,
            env=os.environ | {"TMPDIR": str(tmp_path)},
            preexec_fn=limit,
        )
        zeros.stdout.close()
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"TraceError: /dev/stdin: what comes through a pipe is kept in {tmp_path}, which took" in done.stderr
    assert "File too large; set TMPDIR to a directory with room" in done.stderr


def test_no_directory_for_what_comes_through_a_pipe_is_an_error_by_name(files, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(TraceError, match="none, which took 0 bytes of it and no more: No such file"):
        piped(tmp_path.__class__("/dev/null"), read, tmp_path)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
@pytest.mark.parametrize("read", [read, read_trace, lambda path: read(path, "kimi-k3")])
def test_a_device_is_refused_before_it_is_read(device, read):
    with pytest.raises(TraceError, match=f"{device}: is a device"):
        read(device)
    result = CliRunner().invoke(main, ["replay", device])
    assert result.exit_code == 1 and f"TraceError: {device}: is a device" in result.output


def test_what_is_not_there_and_a_directory_are_errors_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        read(tmp_path / "nothing")
    with pytest.raises(IsADirectoryError):
        read(tmp_path)
