import pytest


@pytest.fixture(autouse=True, scope="session")
def quiet():
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
