import pytest
from evaluating import empty_cache, float32_by_auto
from threads import one_thread

one_thread = pytest.fixture(autouse=True, scope="package")(one_thread)
empty_cache = pytest.fixture(autouse=True)(empty_cache)
float32_by_auto = pytest.fixture(autouse=True)(float32_by_auto)
