"""The host's work in a round can be measured for any batch and vocabulary."""

from tests.tools.host import host_milliseconds


def test_every_case_decodes_and_is_counted() -> None:
    found = host_milliseconds(batch_size=3, vocabulary=700)
    assert list(found) == ["greedy", "penalty", "stop", "json", "beside_target"]
    assert all(milliseconds > 0 for milliseconds in found.values())
    assert found["beside_target"] < found["json"], "beside_target is a part of json"
