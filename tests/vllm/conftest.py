import pytest


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """A function of a name of MODELS: the folder of such a model."""
    from vllm_engines import save_model

    folders = {}

    def folder(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            save_model(name, folders[name])
        return folders[name]

    return folder
