"""Where a user's states can be restored, as a hint to the spawner that starts her next server.

A state can be restored where the processor has the features that its kernel may use, and, if it has
GPU memory, where there are GPUs of the same name and a driver that is no older.
"""

from __future__ import annotations

import atexit
import inspect
import re
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgspec
from traitlets.config import Config

from ..capture.node import NodeInfo
from ..gpus.fit import used_gpus
from ..gpus.inventory import GpuUse, version
from ..store import StateRecord
from .errands import Errands
from .names import groups_of
from .service_reading import Person, UserStores
from .settings import GpuCkptHub

#: Seconds that a server's start waits for the store.
_PATIENCE: Final = 10.0
#: How many kernels are looked at, the last saved first.
_MOST: Final = 20

_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
# Of a processor's features those by which nodes differ, and which node-feature-discovery labels.
_FEATURES: Final = re.compile(r"avx|amx|gfni$|vaes$|sve|sme")


class Needs(msgspec.Struct, frozen=True):
    """What a node must have for the newest states of a user's kernels.

    ``features`` are as Linux writes them in ``/proc/cpuinfo``; ``driver`` is the first number of
    the oldest NVIDIA driver.
    """

    machine: str | None = None
    features: frozenset[str] = frozenset()
    gpus: tuple[str, ...] = ()
    driver: int | None = None


def needs(newest: Sequence[StateRecord]) -> Needs:
    """What these states need together, the first of them the most: it alone says which GPUs."""
    found = Needs()
    for record in newest:
        node = msgspec.convert(record.meta.node, NodeInfo)
        if found.machine not in (None, node.machine):
            continue  # nowhere are both
        gpus, driver = found.gpus, found.driver
        use = msgspec.convert(record.meta.gpu, GpuUse | None)
        if use is not None and use.processes:
            used = used_gpus(use.processes, use.gpus)
            gpus = gpus or tuple(dict.fromkeys(gpu.name for gpu in use.gpus if gpu.uuid in used))
            first = version(node.driver or "")[:1]
            driver = max([*first, *([driver] if driver else [])], default=None)
        features = {flag for flag in node.cpu_flags if _FEATURES.match(flag)}
        found = Needs(node.machine, found.features | features, gpus, driver)
    return found


def kubernetes_terms(need: Needs, labels: dict[str, str]) -> list[dict[str, Any]]:
    """As expressions that match the labels of Kubernetes' nodes; ``labels``: what they are called.

    The names of features are those of node-feature-discovery, of GPUs those of NVIDIA's GPU
    feature discovery.
    """
    terms: list[dict[str, Any]] = []

    def add(kind: str, operator: str, values: Sequence[str], suffix: str = "") -> None:
        if label := labels.get(kind):
            terms.append({"key": label + suffix, "operator": operator, "values": [*values]})

    if need.machine in _ARCHITECTURES:
        add("machine", "In", [_ARCHITECTURES[need.machine]])
    for feature in sorted(need.features):
        add("feature", "In", ["true"], feature.upper().replace("_", ""))
    if need.gpus:
        add("gpu", "In", [re.sub(r"\s+", "-", name) for name in need.gpus])
    if need.driver:
        add("driver", "Gt", [str(need.driver - 1)])
    return terms


def slurm_features(need: Needs, names: dict[str, str]) -> str | None:
    """As features of Slurm's nodes; ``names``: what a cluster calls a feature or a GPU."""
    wanted = [*need.gpus, *sorted(need.features), *([need.machine] if need.machine else [])]
    found = list(dict.fromkeys(names[name] for name in wanted if name in names))
    return "&".join(found) or None


class Placement:
    """The ``pre_spawn_hook``: tells a spawner, and lets the server start whatever happens.

    Parameters
    ----------
    hub
        The settings.
    before
        The hook that was set before, which is called first.
    """

    def __init__(
        self, hub: GpuCkptHub, before: Callable[[Any], Awaitable[None] | None] | None = None
    ) -> None:
        self._hub = hub
        self._before = before
        self._errands = Errands()
        self._tiers: Path | None = None
        # By trait what was set before a hint, and with it: a spawner is used again.
        self._hints: WeakKeyDictionary[Any, dict[str, tuple[Any, Any]]] = WeakKeyDictionary()

    async def __call__(self, spawner: Any) -> None:
        """Be the hook."""
        if self._before is not None and inspect.isawaitable(found := self._before(spawner)):
            await found
        if not self._hub.lets(spawner):
            return
        try:
            need = await self._errands.run(
                spawner.user.name, lambda: self.needs_of(spawner), _PATIENCE
            )
            self._tell(spawner, need)
        except Exception as error:
            # No state is worth that a server does not start.
            spawner.log.warning("gpu-ckpt: no hint where %s: %s", spawner.user.name, error)

    def needs_of(self, spawner: Any) -> Needs:
        """What the newest state of each of the user's kernels needs; blocks.

        Raises
        ------
        CkptError
            The user's store cannot be read.
        """
        person = Person(spawner.user.name, tuple(groups_of(spawner)), (spawner.name,))
        if self._tiers is None:  # what is read of remote stores, while the hub lives
            self._tiers = Path(tempfile.mkdtemp(prefix="gpu-ckpt-placement-"))
            atexit.register(shutil.rmtree, self._tiers, ignore_errors=True)
        stores = _Newest(self._hub, person, self._tiers)
        try:
            return needs(stores.newest(spawner.name))
        finally:
            stores.close()

    def _tell(self, spawner: Any, need: Needs) -> None:
        names = {ancestor.__name__ for ancestor in type(spawner).__mro__}
        required = self._hub.placement == "require"
        if "KubeSpawner" in names:
            terms = kubernetes_terms(need, self._hub.node_labels)
            trait = "node_affinity_required" if required else "node_affinity_preferred"
            before = self._without_hint(spawner, trait)
            if terms:
                self._hint(spawner, trait, (_required if required else _preferred)(before, terms))
        elif "SlurmSpawner" in names:
            before = self._without_hint(spawner, "req_options")
            if (wanted := slurm_features(need, self._hub.slurm_features)) is not None:
                option = "--constraint" if required else "--prefer"
                self._hint(spawner, "req_options", _with_features(before, option, wanted))

    def _without_hint(self, spawner: Any, trait: str) -> Any:
        """What a trait is but for the hint of the start before, which is taken back.

        What has been chosen since then stays.
        """
        before, hinted = self._hints.get(spawner, {}).pop(trait, (None, None))
        if hinted is not None and getattr(spawner, trait) == hinted:
            setattr(spawner, trait, before)
        return deepcopy(getattr(spawner, trait))

    def _hint(self, spawner: Any, trait: str, value: Any) -> None:
        before = deepcopy(getattr(spawner, trait))
        setattr(spawner, trait, value)
        self._hints.setdefault(spawner, {})[trait] = before, deepcopy(value)


class _Newest(UserStores):
    def newest(self, server: str) -> list[StateRecord]:
        """The newest state of each kernel, the last saved first."""
        found: dict[str, StateRecord] = {}
        for opened in self._stores():
            if opened.server in ("", server):
                with self._at(opened):
                    for record in opened.store.listing().states:
                        found.setdefault(record.meta.kernel_id, record)
        return sorted(found.values(), key=lambda record: record.created, reverse=True)[:_MOST]


def _preferred(before: Any, terms: list[dict[str, Any]]) -> list[Any]:
    entries = [*before.values()] if isinstance(before, dict) else [*before]
    return [*entries, {"weight": 100, "preference": {"matchExpressions": terms}}]


def _required(before: Any, terms: list[dict[str, Any]]) -> list[Any]:
    """One of the entries must match: each gets the terms too."""
    entries = [*before.values()] if isinstance(before, dict) else [*before]
    return [
        {**entry, "matchExpressions": [*entry.get("matchExpressions", []), *terms]}
        for entry in entries or [{}]
    ]


def _with_features(options: str, option: str, wanted: str) -> str:
    """Slurm's options with the features wanted too: of two such options only the last counts.

    Raises
    ------
    ValueError
        What is set already is more than features that are all needed, and stays as it is.
    """
    short = "|-C *" if option == "--constraint" else ""
    found = [*re.finditer(rf"(?<!\S)(?:{option}[= ] *{short})(\S+)", options)]
    if not found:
        return f"{options} {option}={wanted}".strip()
    have = found[-1]
    value = have[1].strip("\"'")
    if not re.fullmatch(r"[\w.=:&-]+", value):
        raise ValueError(f"{option}={value} of SlurmSpawner.req_options cannot be added to")
    return f"{options[: have.start()]}{option}={value}&{wanted}{options[have.end() :]}"


def add_hint(c: Config, hub: GpuCkptHub) -> None:
    """Add the hook to a hub's configuration, after the one that is set."""
    sections = [name for name in c if name.endswith("Spawner") and "pre_spawn_hook" in c[name]]
    for name in sections or ["Spawner"]:
        c[name].pre_spawn_hook = Placement(hub, c[name].get("pre_spawn_hook"))
