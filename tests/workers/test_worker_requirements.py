"""The lists of the engine environments agree with each other and with the base environment."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]
GROUPS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["dependency-groups"]


def group(name: str) -> list[str]:
    """The group's requirements, included groups unfolded."""
    out = []
    for entry in GROUPS[name]:
        out += group(entry["include-group"]) if isinstance(entry, dict) else [entry]
    return out


def listed(file: str) -> list[str]:
    lines = (REPOSITORY / "requirements" / file).read_text().splitlines()
    return [line.partition(" ;")[0] for line in lines if line and line[0] not in "# "]


def normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def pins(file: str) -> dict[str, str]:
    return {normal(name): version for name, _, version in (line.partition("==") for line in listed(file))}


def test_the_pins_satisfy_the_group_engine_cpu():
    pinned = pins("engine-cpu.txt")
    for text in group("engine-cpu"):
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[normal(requirement.name)], prereleases=True), text


def test_the_worker_runs_on_the_same_versions_in_both_environments():
    base, engine = pins("base.txt"), pins("engine-cpu.txt")
    names = [normal(Requirement(text).name) for text in group("worker")]
    assert {name: engine[name] for name in names} == {name: base[name] for name in names}


def test_the_gpu_list_is_the_group_engine_gpu():
    assert sorted(listed("engine-gpu.in")) == sorted(group("engine-gpu"))
