"""The Flower app: in one process, in Flower's simulation on Ray, and on a SuperLink with two SuperNodes."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'qclip[flower]'")
pytest.importorskip("sklearn")

from flwr.app import Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from integrations.flower_grid import LocalGrid
from qclip import accounting

APP = Path(__file__).parents[2] / "examples/flower"
CONFIG = {
    "rounds": 3,
    "num-clients": 10,
    "cohort-size": 6,
    "noise-multiplier": 0.3,
    "delta": 1e-3,
    "local-epochs": 1,
    "lr": 0.5,
    "example-noise": 0.0,
    "save-to": "",
}


def run_here(monkeypatch, **changes):
    """Run server and clients in this process; return the grid."""
    monkeypatch.syspath_prepend(str(APP))
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    config = CONFIG | changes
    grid = LocalGrid(import_module("digits_app.client").app, nodes=range(10))
    for node, context in grid.contexts.items():
        context.node_config, context.run_config = {"partition-id": node, "num-partitions": 10}, config
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config, series_id=0)
    import_module("digits_app.server").app(grid, context)
    assert not any(reply.has_error() for reply in grid.received)
    return grid


def test_it_runs_and_goes_on_from_its_file(monkeypatch, tmp_path, capsys):
    path = str(tmp_path / "run.pt")
    run_here(monkeypatch, **{"save-to": path})
    first = capsys.readouterr().out
    assert "after 3 rounds, epsilon " in first
    grid = run_here(monkeypatch, **{"save-to": path})  # it is complete
    assert capsys.readouterr().out == first
    assert grid.sent == []


def test_the_epsilon_of_examples_adds_up_at_their_client(monkeypatch):
    """Each round a client takes ten private steps of one run: its epsilon is that of all of its steps."""
    grid = run_here(monkeypatch, **{"example-noise": 1.0, "rounds": 4})
    rounds = dict.fromkeys(grid.nodes, 0)
    for message in grid.sent:
        rounds[message.metadata.dst_node_id] += 1
    assert max(rounds.values()) > 1
    for node, times in rounds.items():
        state = grid.contexts[node].state
        if not times:
            assert not state
            continue
        kept = state["private-training"]
        assert kept["steps"] == 10 * times
        data = import_module("digits_app.task").client_data(node, 10)
        assert kept["epsilon"] == accounting.epsilon(
            noise_multiplier=1.0, examples=len(data), batch_size=16, steps=10 * times, delta=1e-4
        )


def free_ports(number):
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_for(port):
    for _ in range(300):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1)
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(port)


@pytest.fixture
def launch(tmp_path):
    """A function that starts a process of Flower, which ends with the test."""
    environment = {
        **os.environ,
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    (tmp_path / "flwr").mkdir()
    running = []

    def launched(*command, wait=False):
        if wait:
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
        with (tmp_path / f"{len(running)}.log").open("w") as log:
            running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        return running[-1]

    yield launched
    for process in reversed(running):
        process.terminate()
        process.wait(60)


def run_by_flwr(launch, home, port, *options):
    (home / "flwr/config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    wait_for(port)
    done = launch("flwr", "run", str(APP), "here", "--stream", *options, wait=True)
    text = done.stdout + done.stderr
    assert "held-out accuracy" in text, text
    return text


SUPERLINK = ["flower-superlink", "--insecure", "--disable-runtime-dependency-installation", "--host", "127.0.0.1"]


@pytest.mark.slow
def test_flwr_run_in_the_ray_simulation(launch, tmp_path):
    pytest.importorskip("ray")
    (port,) = free_ports(1)
    launch(*SUPERLINK, "--simulation", "--port", str(port))
    settings = ("--run-config", "rounds=2", "--federation-config", "num-supernodes=10")
    assert "after 2 rounds" in run_by_flwr(launch, tmp_path, port, *settings)


@pytest.mark.slow
def test_flwr_run_on_two_supernodes(launch, tmp_path):
    port, *ports = free_ports(3)
    launch(*SUPERLINK, "--port", str(port))
    wait_for(port)
    for k, own in enumerate(ports):
        launch(
            "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--port", str(own),
            "--node-config", f"partition-id={k} num-partitions=2",
        )  # fmt: skip
    settings = ("--run-config", "rounds=2 num-clients=2 cohort-size=2")
    assert "after 2 rounds" in run_by_flwr(launch, tmp_path, port, *settings)
