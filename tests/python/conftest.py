import pytest
import torch

# The matrices of these tests are small: more threads wait longer than they compute, above all where
# other programs run too. `test_the_number_of_threads_does_not_matter` uses several.
torch.set_num_threads(1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    """The CPU always; with `-m gpu` the first GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    return torch.device(request.param)
