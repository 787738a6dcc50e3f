"""The events: their schemas, and that real ones keep to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from jsonschema import ValidationError
from jupyter_events import EventLogger

import jupyter_gpu_ckpt
from jupyter_gpu_ckpt import models

FOLDER = Path(jupyter_gpu_ckpt.__file__).parent / "events"
SCHEMAS = "https://schema.jupyter.org/jupyter_gpu_ckpt/"
OPERATION: dict[str, Any] = {
    "operation_id": "o", "kind": "save", "cause": "user", "kernel_id": "k", "path": None,
    "state_id": None, "status": "running", "phase": "dumping", "progress": 0.5, "message": None,
    "reason": None,
}  # fmt: skip
KERNEL: dict[str, Any] = {
    "action": "restored", "kernel_id": "k", "path": "a.ipynb", "state_id": "s", "cause": "death",
    "in_flight_msg_id": None, "execution_count": 3, "message": None,
    "held_msg_ids": [],
}  # fmt: skip


SERVER: dict[str, Any] = {
    "action": "saved", "ending_id": "e", "source": "slurm", "why": "The job ends.", "sure": True,
    "seconds": None, "saved": 2, "not_saved": ["a.ipynb"], "not_uploaded": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def logger() -> EventLogger:
    logger = EventLogger()
    for schema in FOLDER.glob("*.yaml"):
        logger.register_event_schema(schema)
    return logger


@pytest.mark.parametrize(
    ("name", "data"),
    [("operation/v1", OPERATION), ("kernel/v1", KERNEL), ("server/v1", SERVER)],
)
def test_schemas_are_strict(logger: EventLogger, name: str, data: dict[str, Any]) -> None:
    logger.schemas.validate_event(SCHEMAS + name, data)
    with pytest.raises(ValidationError):
        logger.schemas.validate_event(SCHEMAS + name, {**data, "extra": 1})
    for field in data:
        with pytest.raises(ValidationError):
            rest = {key: value for key, value in data.items() if key != field}
            logger.schemas.validate_event(SCHEMAS + name, rest)


def test_schemas_say_that_they_hold_personal_data() -> None:
    for path in FOLDER.glob("*.yaml"):
        assert yaml.safe_load(path.read_text())["personal-data"] is True, path.name


def test_words_agree_with_the_models() -> None:
    schema = yaml.safe_load((FOLDER / "operation_v1.yaml").read_text())["properties"]
    assert set(schema["status"]["enum"]) == set(get_args(models.OperationStatus))
    assert set(schema["kind"]["enum"]) == set(get_args(models.OperationKind))
    assert set(schema["phase"]["enum"]) == set(get_args(models.Phase))
