"""What is published while a task is being finished, and what is not."""

from __future__ import annotations

from celery_unique.followers.continuations import continues, finishing


def test_a_block_that_a_signal_kept_from_its_end_finishes_nothing_afterwards():
    block = finishing()
    block.__enter__()
    assert continues(None)

    del block  # without __exit__, as an interrupted frame leaves it

    assert not continues(None)


def test_blocks_can_be_nested():
    with finishing():
        with finishing():
            assert continues(None)
        assert continues(None)
    assert not continues(None)
