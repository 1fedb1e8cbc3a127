"""What a round costs the host can be counted for any batch and vocabulary."""

from tests.tools.host import host_milliseconds


def test_every_case_decodes_and_is_counted() -> None:
    found = host_milliseconds(batch_size=3, vocabulary=700)
    assert list(found) == ["greedy", "penalty", "stop", "json", "beside_target"]
    assert all(milliseconds > 0 for milliseconds in found.values())
    assert found["beside_target"] < found["json"], "a part of it"
