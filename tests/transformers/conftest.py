import pytest


@pytest.fixture
def llama():
    from tiny_transformers import random_model

    return random_model("llama")
