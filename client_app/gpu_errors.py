"""What an error says of the GPU: torch and its libraries have no types for most of them."""

import torch

# after these nothing runs on the GPU in this process
_lost = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "CUDNN_STATUS_EXECUTION_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Whether the GPU's memory was full: the process can continue with a smaller step."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    is_of_torch = isinstance(error, RuntimeError)
    return is_of_torch and any(text in str(error) for text in ("out of memory", "ALLOC_FAILED"))


def is_gpu_lost(error: Exception) -> bool:
    """Whether this process has lost its GPU."""
    return not is_out_of_memory(error) and any(text in str(error) for text in _lost)
