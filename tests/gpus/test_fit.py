"""Onto which GPUs a state's GPU memory fits, and in which words it does not."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_gpu_ckpt.gpus.fit import choices, fit, used_gpus
from jupyter_gpu_ckpt.gpus.inventory import (
    CudaGpu,
    CudaProcess,
    Gpu,
    GpuProcess,
    GpuUse,
    Inventory,
)

GB = 10**9


def saved(*gpus: CudaGpu, need: int = 10 * GB, visible: str | None = None) -> GpuUse:
    return GpuUse([CudaProcess(7, memory_bytes=need, visible=visible)], list(gpus))


def stored(*gpus: CudaGpu) -> GpuUse:
    """Memory that only the driver's custom storage brings back."""
    return GpuUse([CudaProcess(7, memory_bytes=10 * GB, stored=True)], list(gpus))


def old(letter: str, name: str = "H100", memory: int = 80 * GB) -> CudaGpu:
    return CudaGpu(f"GPU-{letter}", name, memory)


def new(letter: str, name: str = "H100", memory: int = 80 * GB, **more: Any) -> Gpu:
    return Gpu(0, name, f"GPU-{letter}", memory, **more)


def node(*gpus: Gpu, driver: str | None = "580.95.05", **more: Any) -> Inventory:
    return Inventory(driver, 13000, list(gpus), **more)


def test_the_same_gpu_stands_for_itself() -> None:
    found = fit(saved(old("a"), old("b")), node(new("a"), new("b")), "580.95.05")
    assert (found.pairs, found.differences) == ({"GPU-a": "GPU-a", "GPU-b": "GPU-b"}, [])


def test_another_gpu_of_its_kind() -> None:
    found = fit(saved(old("a")), node(new("x", "L4"), new("y", used=70 * GB), new("z")))
    assert found.pairs == {"GPU-a": "GPU-z"}
    (difference,) = found.differences
    assert (difference.blocking, difference.saved, difference.here) == (False, "GPU-a", "GPU-z")


def test_one_that_is_full_is_left_for_one_with_room() -> None:
    found = fit(saved(old("a")), node(new("a", used=75 * GB), new("b")))
    assert found.pairs == {"GPU-a": "GPU-b"}


def test_what_can_be_chosen_is_what_suits_full_or_not() -> None:
    use = saved(old("a"), old("b", "L4", 24 * GB), visible="0")
    here = node(new("a", used=75 * GB), new("b"), new("c", "L4"), new("d", mig=True))
    found = {uuid: [gpu.uuid for gpu in gpus] for uuid, gpus in choices(use, here).items()}
    assert found == {"GPU-a": ["GPU-a", "GPU-b"]}
    assert choices(use, node(new("a"), new("b"), driver="575.1")) == {}
    assert choices(None, here) == {}


def test_all_gpus_are_named_and_only_those_in_use_have_to_fit() -> None:
    use = saved(old("a", "L4", 24 * GB), old("b"), visible="1")
    found = fit(use, node(new("x"), new("y", "L4", 24 * GB)))
    assert found.pairs == {"GPU-a": "GPU-y", "GPU-b": "GPU-x"}
    found = fit(use, node(new("x"), new("y")))
    assert set(found.pairs) == {"GPU-a", "GPU-b"} and set(found.pairs.values()) == {
        "GPU-x",
        "GPU-y",
    }


REFUSED: list[tuple[GpuUse, Inventory, str | None, str]] = [
    (saved(old("a")), Inventory(), None, "10.0 GB of GPU memory, and this node has no GPU"),
    (saved(old("a")), Inventory(error="It hangs."), None, "It hangs."),
    (saved(old("a")), node(broken=["GPU 0: GPU is lost"]), None, "GPU 0: GPU is lost"),
    (saved(old("a")), node(new("b", "L4")), None, "uses a GPU H100, and this node has none"),
    (saved(old("a"), old("b")), node(new("a")), None, "2 GPUs at the save, and here are 1"),
    (saved(old("a")), node(new("b", memory=40 * GB)), None, "have less memory"),
    (saved(old("a")), node(new("b", used=75 * GB)), None, "10.0 GB of GPU memory, and 5.0 GB are"),
    (saved(old("a")), node(new("a", mig=True)), None, "MIG is on"),
    (saved(old("a")), node(new("a"), driver="550.1"), None, "too old"),
    (saved(old("a")), node(new("a"), driver="575.1"), "580.95.05", "older than at the save"),
    (stored(old("a")), node(new("a")), "580.95.05", "offer CUDA 13.4"),
    (saved(old("a")), node(new("b"), driver="575.1"), "575.1", "from 580 on"),
]


@pytest.mark.parametrize(("use", "here", "driver", "words"), REFUSED, ids=lambda it: "")
def test_refused_in_words(use: GpuUse, here: Inventory, driver: str | None, words: str) -> None:
    found = fit(use, here, driver)
    (difference,) = (one for one in found.differences if one.blocking)
    assert words in difference.message
    assert found.pairs == {}


def test_the_memory_of_the_kernel_that_makes_place_is_free() -> None:
    full = new("a", used=80 * GB, processes=[GpuProcess(7, 60 * GB)])
    assert fit(saved(old("a")), node(full)).pairs == {}
    assert fit(saved(old("a")), node(full), ending={7}).pairs == {"GPU-a": "GPU-a"}
    # In a container the driver's numbers are other ones: it is said, and tried.
    found = fit(saved(old("a")), node(full), ending={1234})
    assert found.pairs and not any(one.blocking for one in found.differences)


def test_a_state_without_gpu_memory_fits_everywhere() -> None:
    for use in (None, GpuUse(), GpuUse([], [old("a")])):
        assert fit(use, Inventory()).differences == []


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, "ab"), ("", ""), ("-1", ""), ("1", "b"), ("1,0", "ab"), ("0,7,1", "a"),
        ("GPU-b", "b"), (" 0 , GPU-b", "ab"), ("0,0", ""), ("GPU-", ""), ("MIG-1", ""),
    ],
)  # fmt: skip
def test_cuda_visible_devices(visible: str | None, uuids: str) -> None:
    found = used_gpus([CudaProcess(1, visible=visible)], [old("a"), old("b")])
    assert found == {f"GPU-{letter}" for letter in uuids}


names = st.sampled_from(["H100", "L4"])
sizes = st.sampled_from([24 * GB, 80 * GB])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(names, sizes), min_size=1, max_size=4),
    st.lists(st.tuples(names, sizes, st.booleans()), max_size=5),
    st.integers(0, 5),
)
def test_a_placement_is_found_where_there_is_one(
    was: list[tuple[str, int]], are: list[tuple[str, int, bool]], same: int
) -> None:
    use = saved(*(old(str(i), *one) for i, one in enumerate(was)), need=0)
    gpus = [
        new(str(i) if i < same else f"new-{i}", name, memory, mig=mig)
        for i, (name, memory, mig) in enumerate(are)
    ]
    found = fit(use, node(*gpus))

    def suits(before: CudaGpu, gpu: Gpu) -> bool:
        return before.name == gpu.name and before.memory_bytes <= gpu.memory and not gpu.mig

    possible = any(
        all(suits(before, gpu) for before, gpu in zip(use.gpus, chosen, strict=True))
        for chosen in permutations(gpus, len(use.gpus))
    )
    assert bool(found.pairs) == possible
    assert possible != any(one.blocking for one in found.differences)
    if possible:
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        assert list(found.pairs) == [one.uuid for one in use.gpus]
        assert len(set(found.pairs.values())) == len(found.pairs)
        assert all(suits(one, by_uuid[found.pairs[one.uuid]]) for one in use.gpus)


def test_by_hand() -> None:
    use, here = saved(old("a"), old("b")), node(new("x"), new("y"), new("z", "L4"))
    found = fit(use, here, chosen={"GPU-a": "GPU-y"})
    assert found.pairs == {"GPU-a": "GPU-y", "GPU-b": "GPU-x"}
    for chosen, words in [
        ({"GPU-c": "GPU-x"}, "no GPU GPU-c at the save"),
        ({"GPU-a": "GPU-c"}, "no GPU GPU-c, which was chosen"),
        ({"GPU-a": "GPU-x", "GPU-b": "GPU-x"}, "for more than one"),
        ({"GPU-a": "GPU-z"}, "another kind"),
    ]:
        (difference,) = fit(use, here, chosen=chosen).differences
        assert difference.blocking and words in difference.message


def test_room_is_needed_on_each_gpu_where_the_driver_told_how_much() -> None:
    gpus = [CudaGpu(f"GPU-{i}", "H100", 80 * GB, n * GB) for i, n in (("a", 50), ("b", 10))]
    use = saved(*gpus, need=60 * GB)
    here = node(new("a", used=40 * GB), new("b"))
    assert fit(use, here).pairs == {"GPU-a": "GPU-b", "GPU-b": "GPU-a"}
    (short,) = (it for it in fit(use, here, chosen={"GPU-a": "GPU-a"}).differences if it.blocking)
    assert "needs 50.0 GB of GPU memory, and 40.0 GB are free" in short.message


def test_a_lost_gpu_of_the_same_node_stands_for_one_that_is_not_in_use() -> None:
    gpus = [CudaGpu(f"GPU-{i}", "H100", 80 * GB, n) for i, n in (("a", 10 * GB), ("b", 0))]
    here = node(new("b"), broken=["GPU 0: GPU is lost"])
    assert fit(saved(*gpus), here).pairs == {"GPU-a": "GPU-b", "GPU-b": "GPU-a"}
    # The same where it is said that only one may be used.
    assert fit(saved(old("a"), old("b"), visible="0"), here).pairs == {
        "GPU-a": "GPU-b",
        "GPU-b": "GPU-a",
    }
    # Both are in use; another node, whose lost GPU nobody can name.
    for use, there in [
        (saved(old("a"), old("b")), here),
        (saved(*gpus), node(new("c"), broken=["GPU 0: GPU is lost"])),
    ]:
        found = fit(use, there)
        (difference,) = (one for one in found.differences if one.blocking)
        assert found.pairs == {} and "GPU 0: GPU is lost" in difference.message
