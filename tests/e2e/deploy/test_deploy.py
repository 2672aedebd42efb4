"""The files in configs/deploy fit this program and each other: commands, routes, ports, labels, mounts, metrics."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.drivers.until import wait_until
from toka_async.cli.overrides import complete_overrides
from toka_async.cli.parser import parse_arguments
from toka_async.config import Config, load_config
from toka_async.server.access.origins import read_origins
from toka_async.server.http.routes import ROUTES

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "configs/deploy"
SCRIPTS = [*sorted((DEPLOY / "slurm").glob("*.sbatch")), DEPLOY / "skypilot.yaml"]
PORT = Config().server.port
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}|\$\(([^()]|\([^()]*\))*\)|\$\{?\w+\}?")


def load_all(*names: str) -> list[Any]:
    found = [yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")) for name in names]
    return [document for documents in found for document in documents]


def manifests() -> list[dict[str, Any]]:
    names = ("cache", "deployment", "leader-worker-set", "inference-pool")
    return load_all(*(f"kubernetes/{name}.yaml" for name in names))


def find_all(value: Any, key: str) -> Iterator[Any]:
    """Every value of the key, at any depth."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name == key:
                yield each
            yield from find_all(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from find_all(each, key)


def containers() -> list[dict[str, Any]]:
    return [each for some in find_all(manifests(), "containers") for each in some if each["name"] == "toka-async"]


def fill(text: str) -> str:
    """A shell's text with something in the place of its variables."""
    return VARIABLE.sub(lambda match: match[2] or "2", text)


def script_commands(path: Path) -> Iterator[list[str]]:
    """The arguments of each toka-async in a script."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if not line.lstrip().startswith("#") and (
            found := re.search(r"(?:^|[\s/])toka-async ((?:serve|node|batch) .*)", line)
        ):
            yield shlex.split(re.split(r" \|\| | && |;| &$", fill(found[1]))[0])


def commands() -> Iterator[Any]:
    for container in containers():
        yield pytest.param(container["args"], id=" ".join(container["args"][:2]))
    service = load_all("compose/compose.yaml")[0]["services"]["toka-async"]
    yield pytest.param([fill(each) for each in service["command"]], id="compose")
    for number, line in enumerate(
        re.findall(r"^CMD (\[\"serve.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    ):
        yield pytest.param(json.loads(line), id=f"Dockerfile-{number}")
    for path in SCRIPTS:
        for arguments in script_commands(path):
            yield pytest.param(arguments, id=path.name)


@pytest.mark.parametrize("arguments", list(commands()))
def test_every_command_is_understood(arguments: list[str]) -> None:
    options = parse_arguments(arguments)
    of_node: list[str] = []
    if options.command == "node":  # the environment of LeaderWorkerSet or Slurm says the rest
        of_node = ["cluster.nodes=2", "cluster.address=tcp://10.0.0.1:10212", "parallel.pp=2"]
    config = load_config(options.config, complete_overrides([*of_node, *options.overrides], has_model=True))
    if options.command == "serve":
        assert (config.server.host, config.server.port) == ("0.0.0.0", PORT)


def test_there_are_commands_of_every_file() -> None:
    assert len(containers()) == 3
    assert all(len(list(script_commands(path))) == 1 for path in SCRIPTS if path.name != "ray.sbatch")
    assert len(list(commands())) >= 6


def test_probes_ask_routes_that_need_no_key() -> None:
    probes = [
        each for kind in ("startupProbe", "readinessProbe", "livenessProbe") for each in find_all(manifests(), kind)
    ]
    assert len(probes) == 5
    assert {probe["httpGet"]["path"] for probe in probes} == {"/health", "/ping"} <= {path for _, path in ROUTES}
    for container in containers():
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        assert ports.get("http", PORT) == PORT


def test_pods_end_after_the_server() -> None:
    for template in find_all(manifests(), "spec"):
        for container in template.get("containers", []):
            drain = [
                float(each.partition("=")[2]) for each in container["args"] if each.startswith("server.drain_timeout")
            ]
            if drain:
                assert template["terminationGracePeriodSeconds"] > drain[0] + 10


def test_all_pods_of_a_group_stay_until_its_requests_end() -> None:
    """A worker computes for the leader's requests."""
    (group,) = find_all(manifests(), "leaderWorkerTemplate")
    of_leader, of_worker = (group[f"{kind}Template"]["spec"] for kind in ("leader", "worker"))
    assert of_worker["terminationGracePeriodSeconds"] == of_leader["terminationGracePeriodSeconds"]


def test_a_ray_job_mounts_what_its_comments_make() -> None:
    text = (DEPLOY / "kubernetes/ray-job.yaml").read_text()
    job, claim = load_all("kubernetes/ray-job.yaml")
    (cache,) = load_all("kubernetes/cache.yaml")
    claims = {cache["metadata"]["name"], claim["metadata"]["name"]}
    assert {each["claimName"] for each in find_all(job, "persistentVolumeClaim")} == claims
    assert {each["name"] for each in find_all(job, "configMap")} == {"toka-async-program"}
    assert "kubectl create configmap toka-async-program" in text
    assert "kubernetes/cache.yaml" in text


def test_the_pool_and_the_services_select_the_pods() -> None:
    labels = [each["metadata"]["labels"] for each in find_all(manifests(), "template")]
    labels += [
        each["metadata"]["labels"]
        for kind in ("leaderTemplate", "workerTemplate")
        for each in find_all(manifests(), kind)
    ]
    services = [each for each in manifests() if each["kind"] == "Service"]
    (pool,) = [each for each in manifests() if each["kind"] == "InferencePool"]
    (values,) = load_all("kubernetes/router-values.yaml")
    selectors = [each["spec"]["selector"] for each in services] + [pool["spec"]["selector"]["matchLabels"]]
    selectors.append(values["router"]["modelServers"]["matchLabels"])
    for selector in selectors:
        assert sum(selector.items() <= each.items() for each in labels) == 1, selector
    for ports in (pool["spec"]["targetPorts"], values["router"]["modelServers"]["targetPorts"]):
        assert ports == [{"number": PORT}]


def test_pods_have_the_volumes_that_they_mount() -> None:
    claims = {each["metadata"]["name"] for each in manifests() if each["kind"] == "PersistentVolumeClaim"}
    for spec in find_all(manifests(), "spec"):
        for container in spec.get("containers", []):
            volumes = {volume["name"] for volume in spec["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            assert {each["claimName"] for each in find_all(spec, "persistentVolumeClaim")} == claims


def test_compose_mounts_what_is_there_and_prometheus_may_ask() -> None:
    (compose,) = load_all("compose/compose.yaml")
    (gpu,) = load_all("compose/gpu.yaml")
    services = compose["services"]
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / "compose" / source).exists(), volume
    build = services["toka-async"]["build"]
    assert (DEPLOY / "compose" / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    stages = re.findall(r"^FROM \S+ AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert {build["target"], gpu["services"]["toka-async"]["build"]["target"]} == set(stages)

    (prometheus,) = load_all("compose/prometheus.yaml")
    (job,) = prometheus["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert (host in services, int(port)) == (True, PORT)
    options = parse_arguments([fill(each) for each in services[host]["command"]])
    config = load_config(None, complete_overrides(options.overrides, has_model=True))
    assert read_origins(config.auth, config.server.host).is_own_host(target)
    assert f'job="{job["job_name"]}"' in (ROOT / "configs/prometheus/rules.yml").read_text()
    mounted = {volume.split(":")[1] for volume in services["prometheus"]["volumes"]}
    assert {*prometheus["rule_files"], "/etc/prometheus/prometheus.yaml"} <= mounted

    (source,) = load_all("compose/grafana-source.yaml")[0]["datasources"]
    assert source["url"].split("/")[2].partition(":")[0] in services
    (provider,) = load_all("compose/grafana-dashboards.yaml")[0]["providers"]
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (ROOT / "configs/grafana" / home.name).is_file()


def test_the_images_copy_what_the_package_needs() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()}
    assert copied == {each[1:] for each in ignored if each.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    pattern = re.search(r"sed -n '(s[^']*)' pyproject.toml", text)
    assert pattern is not None
    found = subprocess.run(
        ["sed", "-n", pattern[1], ROOT / "pyproject.toml"], capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith("torch>=")


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.suffix == ".sbatch"], ids=lambda path: path.name)
def test_scripts_are_bash(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")


def make_shards(folder: Path) -> dict[str, str]:
    """Two shards, and the environment of the task of the second one."""
    (folder / "questions").mkdir()
    for name in ("a", "b"):
        pq.write_table(pa.table({"prompt": [f"of {name}"] * 3}), folder / "questions" / f"{name}.parquet")
    slurm = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "7", "MODEL": "model.device=simulated", "SAMPLES": "2"}
    folders = {"INPUT": str(folder / "questions"), "OUTPUT": str(folder / "answers")}
    return os.environ | slurm | folders | {"PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"}


def test_a_task_of_slurm_answers_its_shard(tmp_path: Path) -> None:
    environment = make_shards(tmp_path)
    subprocess.run(["bash", DEPLOY / "slurm/shards.sbatch"], env=environment, check=True, timeout=60)
    rows = pq.read_table(tmp_path / "answers/b.parquet").to_pylist()
    assert [(row["prompt"], len(row["generated_text"])) for row in rows] == [("of b", 2)] * 3
    assert not (tmp_path / "answers/a.parquet").exists()


def test_a_task_without_time_lets_the_run_end_and_is_put_back(tmp_path: Path) -> None:
    """Commands of the test's own stand in for Slurm's and for a long run."""
    programs = {
        "scontrol": 'echo "$@" > requeued',
        "toka-async": "trap 'echo kept > kept; exit 1' TERM; echo > started; while :; do sleep 0.05; done",
    }
    for name, program in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{program}\n")
        (tmp_path / name).chmod(0o755)
    environment = make_shards(tmp_path)
    task = subprocess.Popen(["bash", DEPLOY / "slurm/shards.sbatch"], env=environment, cwd=tmp_path)
    wait_until((tmp_path / "started").exists)
    task.send_signal(signal.SIGUSR1)
    assert task.wait(30) == 0
    assert (tmp_path / "kept").exists()
    assert (tmp_path / "requeued").read_text() == "requeue 7_1\n"
