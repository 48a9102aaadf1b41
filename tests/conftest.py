import sys
from pathlib import Path

import numpy as np
import pytest

import kvfast

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=kvfast.available_isas())
def isa(request):
    """Every ISA tier of this machine in turn."""
    with kvfast.use_isa(request.param):
        yield request.param


@pytest.fixture
def rng():
    return np.random.default_rng(0)
