"""How much memory becomes how many blocks, and which settings are refused."""

from pathlib import Path

import pytest
import torch

from executor import memory
from executor.kv.pool import BlockPool, KVLayout
from executor.memory import build_cache, check_memory, free_bytes, limits
from shared.errors import StartupError
from shared.settings import ExecutorSettings

CPU = torch.device("cpu")
LAYOUT = KVLayout(layers=2, kv_heads=4, head_dim=16, dtype=torch.float32, device=CPU)
TOKEN_BYTES = 2 * 2 * 4 * 16 * 4


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def settings(**given: object) -> ExecutorSettings:
    return ExecutorSettings(**{"kv_memory": "1MiB", **given})  # type: ignore[arg-type]


def test_a_size_becomes_as_many_whole_blocks_as_fit() -> None:
    cache = build_cache(LAYOUT, settings(kv_memory="1005KiB", block_size=10))
    assert cache.block_size == 10
    assert cache.pool.num_blocks == 1005 * 1024 // (TOKEN_BYTES * 10) == 100
    assert cache.capacity == (cache.pool.num_blocks - 1) * 10, "one block is for padding"


def test_a_share_is_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 4 * 2**20)
    cache = build_cache(LAYOUT, settings(kv_memory="0.25"))
    assert cache.pool.num_blocks == 2**20 // (TOKEN_BYTES * cache.block_size)


def test_the_block_size_is_a_whole_number_of_pages_by_itself() -> None:
    assert build_cache(LAYOUT, settings()).block_size == 16
    narrow = KVLayout(layers=2, kv_heads=1, head_dim=16, dtype=torch.float32, device=CPU)
    assert build_cache(narrow, settings()).block_size == 64


def test_too_little_memory_is_a_sentence_that_says_how_much_a_block_takes() -> None:
    least = 8 * 16 * TOKEN_BYTES // 1024
    assert build_cache(LAYOUT, settings(kv_memory=f"{least}KiB")).pool.num_blocks == 8
    with pytest.raises(StartupError, match=r"holds 7 blocks of 16 tokens \(0\.02 MiB each\); give it room for 8"):
        build_cache(LAYOUT, settings(kv_memory=f"{least - 1}KiB"))


def test_a_step_must_take_a_block() -> None:
    assert build_cache(LAYOUT, settings(block_size=64, max_batch_tokens=64)).block_size == 64
    with pytest.raises(StartupError, match="block_size 64 is above max_batch_tokens 63"):
        build_cache(LAYOUT, settings(block_size=64, max_batch_tokens=63, max_running=8))


@pytest.mark.parametrize("failure", [RuntimeError, MemoryError, torch.OutOfMemoryError])
def test_memory_that_cannot_be_had_is_a_sentence(monkeypatch: pytest.MonkeyPatch, failure: type[Exception]) -> None:
    def fails(*_: object) -> BlockPool:
        raise failure

    monkeypatch.setattr(memory, "BlockPool", fails)
    with pytest.raises(StartupError, match="kv_memory 1MiB could not be allocated on cpu; set less"):
        build_cache(LAYOUT, settings())


def test_the_caches_bounds_are_the_settings() -> None:
    found = limits(
        settings(
            high_water=0.7,
            low_water=0.6,
            max_cached_nodes=11,
            max_cached_tokens=12,
            max_children=13,
            max_roots=14,
            namespace_share=0.5,
            eviction="lfu_aged",
            min_cached_tokens=15,
            min_copy_tokens=16,
            prefix_cache=False,
        )
    )
    assert (found.high_water, found.low_water, found.namespace_share) == (0.7, 0.6, 0.5)
    assert (found.max_nodes, found.max_tokens, found.max_children, found.max_roots) == (11, 12, 13, 14)
    assert (found.min_cached_tokens, found.min_copy_tokens) == (15, 16)
    assert (found.eviction, found.prefix_cache) == ("lfu_aged", False)


def test_free_memory_counts_what_the_page_cache_would_give_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemTotal:       100 kB\nMemFree:         10 kB\nMemAvailable:    60 kB\nHugePages_Total:   0\n")
    monkeypatch.setattr(memory, "_MEMINFO", told)
    assert free_bytes(CPU) == 60 * 1024


def test_all_memory_counts_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "nothing")
    assert free_bytes(CPU) > 2**20


def test_more_memory_than_there_is_is_refused_before_a_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "total_bytes", lambda device: 2**30)
    with pytest.raises(StartupError, match=r"kv_memory 2GiB is more than cpu has \(1\.0 GiB\); set less"):
        check_memory(settings(kv_memory="2GiB"), CPU)
    check_memory(settings(kv_memory="1GiB"), CPU)
    check_memory(settings(kv_memory="1"), CPU)
