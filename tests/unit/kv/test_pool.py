import pytest
import torch

from executor.kv.pool import (
    TRASH_BLOCK,
    BlockPool,
    BlockState,
    IntegrityError,
    KVLayout,
    OutOfBlocks,
    auto_block_size,
)

CPU = torch.device("cpu")
SMALL = KVLayout(layers=2, kv_heads=2, head_dim=3, dtype=torch.float32, device=CPU)


def pool(blocks: int, block_size: int = 4) -> BlockPool:
    return BlockPool(SMALL, blocks + 1, block_size)


def test_storage_has_one_contiguous_row_of_heads_per_slot_and_layer():
    keys = pool(5).keys
    assert [tuple(layer.shape) for layer in keys] == [(24, 2, 3)] * 2
    assert all(layer.is_contiguous() for layer in keys)


def test_bytes_per_token_counts_keys_and_values_of_all_layers():
    assert SMALL.bytes_per_token == 2 * 2 * 2 * 3 * 4
    assert SMALL.blocks_in(1000, block_size=4) == 2


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtype", "size"),
    [
        (3, 64, torch.float32, 16),
        (1, 64, torch.float16, 32),
        (1, 32, torch.float16, 64),
        (1, 16, torch.float16, 128),
        (1, 6, torch.float32, 16),
    ],
)
def test_the_automatic_block_size_fills_whole_pages_of_keys(kv_heads, head_dim, dtype, size):
    assert auto_block_size(KVLayout(4, kv_heads, head_dim, dtype, CPU)) == size


def test_the_automatic_block_size_on_a_gpu_is_16():
    assert auto_block_size(KVLayout(4, 1, 16, torch.float16, torch.device("cuda"))) == 16


def test_a_pool_needs_a_block_besides_the_trash_block():
    with pytest.raises(ValueError, match="two blocks"):
        pool(0)


def test_the_trash_block_is_never_allocated():
    blocks = pool(6)
    assert sorted(blocks.allocate() for _ in range(6)) == [1, 2, 3, 4, 5, 6]
    assert blocks.state(TRASH_BLOCK) is BlockState.TRASH
    with pytest.raises(OutOfBlocks):
        blocks.allocate()


def test_two_sequences_that_grow_in_turn_stay_contiguous():
    blocks = pool(40)
    tables = [[blocks.allocate()], [blocks.allocate()], [blocks.allocate()]]
    for _ in range(8):
        for table in tables:
            table.append(blocks.allocate(after=table[-1]))
    assert all(table == list(range(table[0], table[0] + 9)) for table in tables)
    blocks.check()


def test_where_the_next_block_is_taken_allocation_goes_on_in_a_long_run():
    blocks = pool(20)
    for _ in range(4):
        blocks.publish(blocks.allocate())
    assert blocks.allocate(after=2) == 5


def test_a_block_is_freed_once():
    blocks = pool(3)
    block = blocks.allocate()
    blocks.free(block)
    with pytest.raises(IntegrityError):
        blocks.free(block)
    blocks.check()


def test_only_the_tree_gives_up_what_was_published():
    blocks = pool(3)
    block = blocks.allocate()
    blocks.publish(block)
    with pytest.raises(IntegrityError):
        blocks.free(block)
    with pytest.raises(IntegrityError):
        blocks.publish(block)
    blocks.withdraw(block)
    assert blocks.free_blocks == 3
    blocks.check()


def test_counts_follow_the_states():
    blocks = pool(5)
    first, _ = blocks.allocate(), blocks.allocate()
    blocks.publish(first)
    assert (blocks.free_blocks, blocks.private_blocks, blocks.tree_blocks, blocks.usable_blocks) == (3, 1, 1, 5)


def test_copied_rows_are_those_asked_for_in_all_layers():
    blocks = pool(2)
    source, target = blocks.allocate(), blocks.allocate()
    for layer in range(2):
        blocks.keys[layer][source * 4 : source * 4 + 4] = 1 + layer
        blocks.values[layer][source * 4 : source * 4 + 4] = -1 - layer
    blocks.copy_rows(source, target, 3)
    for layer in range(2):
        assert blocks.keys[layer][target * 4 : target * 4 + 4, 0, 0].tolist() == [1 + layer] * 3 + [0]
        assert blocks.values[layer][target * 4 : target * 4 + 4, 0, 0].tolist() == [-1 - layer] * 3 + [0]


def test_rows_are_never_copied_to_a_block_that_others_read():
    blocks = pool(2)
    source, target = blocks.allocate(), blocks.allocate()
    blocks.publish(target)
    with pytest.raises(IntegrityError):
        blocks.copy_rows(source, target, 1)
