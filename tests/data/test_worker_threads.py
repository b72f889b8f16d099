"""Decoding threads are shared by all who ask for as many, and end with the last of them."""

from structured_ensembles.data.worker_threads import available_cores, decoding_threads


def test_pools_are_shared_while_they_are_used() -> None:
    with decoding_threads(2) as pool:
        with decoding_threads(2) as same, decoding_threads(3) as other:
            assert same is pool
            assert other is not pool
        assert pool.submit(int, "7").result() == 7  # still open
        assert other._shutdown
    assert pool._shutdown
    with decoding_threads(2) as new:
        assert new is not pool
        assert new.submit(int, "8").result() == 8


def test_cores_are_those_of_this_process() -> None:
    assert available_cores() >= 1
