from tests.pipeline.conftest import _in_process  # noqa: F401
