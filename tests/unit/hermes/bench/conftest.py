from collections.abc import Iterator

import pytest

from tests.unit.hermes.bench.fake_peer import FakePeer


@pytest.fixture
def peer() -> Iterator[FakePeer]:
    peer = FakePeer()
    yield peer
    peer.close()
