"""What several tests share."""

import pytest


@pytest.fixture
def one_thread():
    """For small calls: threads of torch only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
