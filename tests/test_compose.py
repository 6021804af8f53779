"""The container files, without an engine: what Compose makes of them, what images are built of."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

_ROOT = Path(__file__).parent.parent
_BASE = _ROOT / "docker-compose.yml"
_GPU = _ROOT / "deploy/docker-compose.gpu.yml"
_DOCKERFILE = (_ROOT / "deploy/Dockerfile").read_text()
_SERVICES = {"model", "tokenizer", "engine", "client", "gateway"}


class _Loader(yaml.SafeLoader):
    """Knows Compose's own tag for a list that replaces another."""


_Loader.add_constructor("!override", lambda loader, node: loader.construct_sequence(node))


def _load(file: Path) -> Any:
    return yaml.load(file.read_text(), _Loader)  # a SafeLoader


def _render(*files: Path, **environment: str) -> Any:
    """What Compose makes of the files; needs its command, but no engine."""
    command = ["docker", "compose", "--project-directory", str(_ROOT), "--env-file", "/dev/null"]
    for file in files:
        command += ["-f", str(file)]
    try:
        shown = subprocess.run(
            [*command, "--profile", "*", "config", "--format", "json"],
            env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]} | environment,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except FileNotFoundError:
        pytest.skip("no docker command")
    if "unknown" in shown.stderr:
        pytest.skip("docker without compose")
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)["services"]


def test_every_service_is_confined() -> None:
    services = _load(_BASE)["services"]
    assert set(services) == _SERVICES
    for service in services.values():
        assert service["init"] is service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not {"privileged", "cap_add", "user", "network_mode"} & set(service)


def test_services_wait_for_the_model_and_outlive_each_other() -> None:
    services = _load(_BASE)["services"]
    for name in ("tokenizer", "engine"):
        service = services[name]
        assert service["depends_on"] == {"model": {"condition": "service_completed_successfully"}}
        assert service["restart"] == "unless-stopped"
        assert service["stop_grace_period"] == "30s"
        assert all(volume.endswith(":ro") for volume in service["volumes"])
        (port,) = service["ports"]
        assert port.startswith("${BIND:-127.0.0.1}:")


def test_rendered_defaults_and_settings() -> None:
    services = _render(_BASE)
    assert services["engine"]["command"] == services["model"]["command"] == []
    assert services["engine"]["volumes"][0]["source"] == "models"
    assert services["engine"]["ports"][0] == {
        "mode": "ingress",
        "host_ip": "127.0.0.1",
        "target": 50051,
        "published": "50051",
        "protocol": "tcp",
    }

    services = _render(_BASE, MODEL="org/x", ENGINE_ARGS="--max-num-seqs 3", ENGINE_PORT="1")
    assert services["model"]["command"] == ["--model", "org/x"]
    assert services["tokenizer"]["command"] == ["--model", "org/x"]
    assert services["engine"]["command"] == ["--model", "org/x", "--max-num-seqs", "3"]
    assert services["engine"]["ports"][0]["published"] == "1"


@pytest.mark.parametrize("folder", ["/data/my model", "./my model"])
def test_rendered_model_folder_goes_before_the_id(folder: str) -> None:
    services = _render(_BASE, MODEL="org/x", MODEL_DIR=folder)
    for name in ("model", "tokenizer", "engine"):
        assert services[name]["command"][-2:] == ["--model", f"/models/{folder}"]
        volume = services[name]["volumes"][0]
        assert (volume["type"], volume["read_only"]) == ("bind", True)
        assert volume["source"] == str(_ROOT / folder)
        assert volume["target"] == os.path.normpath(f"/models/{folder}")


def test_the_gateway_is_a_profile_in_front_of_the_engine() -> None:
    service = _load(_BASE)["services"]["gateway"]
    assert service["profiles"] == ["gateway"]
    assert service["depends_on"] == {"engine": {"condition": "service_healthy"}}
    rendered = _render(_BASE)["gateway"]
    assert rendered["command"] == ["--worker-urls", "grpc://engine:50051"]
    (port,) = rendered["ports"]
    assert (port["host_ip"], port["target"], port["published"]) == ("127.0.0.1", 30000, "30000")
    two = _render(
        _BASE, GATEWAY_WORKERS="grpc://engine:50051 grpc://b:1", GATEWAY_ARGS="--policy random",
        GATEWAY_PORT="8000",
    )["gateway"]  # fmt: skip
    assert two["command"] == [
        *("--worker-urls", "grpc://engine:50051", "grpc://b:1", "--policy", "random")
    ]
    assert two["ports"][0]["published"] == "8000"


@pytest.mark.parametrize(("environment", "count"), [({}, 1), ({"GPUS": "2"}, 2)])
def test_gpu_file_reserves_gpus_for_the_engine(environment: dict[str, str], count: int) -> None:
    engine = _render(_BASE, _GPU, **environment)["engine"]
    (device,) = engine["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": count, "capabilities": ["gpu"]}


def test_gpu_file_keeps_what_triton_compiles() -> None:
    """On a volume; tests/compose writes there as the service may."""
    plain, gpu = _render(_BASE)["engine"], _render(_BASE, _GPU)["engine"]
    folder = gpu["environment"].pop("TRITON_CACHE_DIR")
    assert gpu["environment"] == plain["environment"]
    (added,) = [volume for volume in gpu["volumes"] if volume not in plain["volumes"]]
    assert (added["type"], added["target"]) == ("volume", folder)
    assert not added.get("read_only")


def test_gpu_file_changes_nothing_but_the_engine() -> None:
    plain, gpu = _render(_BASE), _render(_BASE, _GPU)
    changed = {key for key in gpu["engine"] if gpu["engine"][key] != plain["engine"].get(key)}
    assert changed == {*("build", "deploy", "environment", "image", "shm_size", "tmpfs", "volumes")}
    assert gpu["engine"]["tmpfs"] == ["/tmp:exec"]
    assert "find-links" in plain["engine"]["build"]["args"]["TORCH_PIP_ARGS"]
    assert gpu["engine"]["build"]["args"]["TORCH_PIP_ARGS"] == ""  # not the wheelhouse's CPU build
    assert {name: gpu[name] for name in gpu if name != "engine"} == {
        name: plain[name] for name in plain if name != "engine"
    }


def test_env_example_names_every_setting() -> None:
    text = _BASE.read_text() + _GPU.read_text()
    used = set(re.findall(r"\$\{([A-Z_]+)", text))
    used |= set(re.findall(r"\b((?:HF|PIP)_[A-Z_]+):\s*(?=[,}\n])", text))
    documented = set(re.findall(r"^#?([A-Z_]+)=", (_ROOT / ".env.example").read_text(), re.M))
    assert documented == used


def test_requirements_leave_torch_out() -> None:
    script = runpy.run_path(str(_ROOT / "deploy/tools/requirements.py"))
    text = (_ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    assert script["requirements"](text, "client") == project["dependencies"]
    extras = project["optional-dependencies"]
    tokenizer = script["requirements"](text, "tokenizer")
    assert tokenizer == project["dependencies"] + extras["tokenizer"]
    engine = script["requirements"](text, "engine")
    left_out = set(project["dependencies"] + extras["engine"]) - set(engine)
    assert {re.match(r"\w+", line)[0] for line in left_out} == {"torch", "triton"}


def test_dockerfile_builds_without_buildkit() -> None:
    assert not re.search(r"--mount|--chmod|--link|--chown=\$|<<|^#\s*syntax", _DOCKERFILE, re.M)


def test_dockerfile_stages() -> None:
    """Each image: dependencies before the source, no root, torch in the engine's alone."""
    stages = {
        match[2]: match[3]
        for match in re.finditer(
            r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM|\Z)", _DOCKERFILE, re.M | re.S
        )
    }
    assert "wheel" not in stages["gateway"], "nothing of ours"
    assert "\nUSER " in stages["gateway"] and "HEALTHCHECK" in stages["gateway"]
    for name in ("client", "tokenizer", "engine"):
        stage = stages[name]
        order = [f"COPY --from={name}-build", "COPY --from=wheel", "\nUSER ", "\nENTRYPOINT"]
        places = [stage.index(text) for text in order]
        assert places == sorted(places)
        assert ("torch" in stages[f"{name}-build"].replace("grep", "")) == (name == "engine")
    for name in ("tokenizer", "engine"):
        assert re.search(rf'HEALTHCHECK .*\n.*"health", "--{name}"', stages[name])


def test_build_context_has_what_is_copied_and_little_else() -> None:
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", _DOCKERFILE, re.M)
        for source in line.split()
    }
    assert all((_ROOT / source).exists() for source in copied)
    lines = (_ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert copied <= allowed
    assert allowed - copied == {"deploy", "deploy/tools"}  # the way to a file that is copied
