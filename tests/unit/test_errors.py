import errno

import pytest
import torch

from regard.errors import (
    CountedWarnings,
    DataError,
    KernelError,
    OutOfMemoryError,
    RegardError,
    SpecError,
    join,
    lacks_memory,
    nearest,
)


def test_spec_error_begins_with_its_path() -> None:
    error = SpecError("decoder.depth", "must be at least 1, not 0")
    assert str(error) == "decoder.depth: must be at least 1, not 0"
    assert (error.path, error.message) == ("decoder.depth", "must be at least 1, not 0")


def test_spec_error_without_a_path_is_its_message() -> None:
    assert str(SpecError("", "unknown preset")) == "unknown preset"


def test_inside_prefixes_the_path_and_keeps_the_message() -> None:
    error = SpecError("[2].d_hidden", "is odd").inside("branches").inside("decoder")
    assert (error.path, error.message) == ("decoder.branches[2].d_hidden", "is odd")


@pytest.mark.parametrize(
    ("prefix", "path", "joined"),
    [("a", "b", "a.b"), ("a", "[0].b", "a[0].b"), ("", "b", "b"), ("a", "", "a"), ("", "", "")],
)
def test_join(prefix: str, path: str, joined: str) -> None:
    assert join(prefix, path) == joined


def test_nearest_names_one_close_option() -> None:
    assert nearest("d_hiden", ["depth", "d_hidden", "d_head"]) == "did you mean 'd_hidden'?"


def test_nearest_lists_all_options_if_none_is_close() -> None:
    assert nearest("zzz", ["b", "a"]) == "known names: 'a', 'b'"


def test_nearest_cuts_a_long_list() -> None:
    hint = nearest("zzz", [f"option_{i:02}" for i in range(30)])
    assert "option_23" in hint
    assert "option_24" not in hint
    assert hint.endswith("and 6 more")


def test_nearest_without_options() -> None:
    assert nearest("a", []) == "there are no names to choose from"


def test_every_error_is_a_regard_error_and_a_builtin_one() -> None:
    assert issubclass(SpecError, RegardError | ValueError)
    assert issubclass(SpecError, ValueError)
    assert issubclass(DataError, RegardError)
    assert issubclass(DataError, ValueError)
    assert issubclass(KernelError, RegardError)
    assert issubclass(KernelError, RuntimeError)


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("too much"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("unable to mmap 51080 bytes from file <weights>: Cannot allocate memory (12)"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
    ids=str,
)
def test_lacks_memory_recognises_out_of_memory_errors(error: Exception, lacks: bool) -> None:
    assert lacks_memory(error) == lacks


def test_lacks_memory_recognises_a_failed_allocation_in_torch() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert lacks_memory(raised.value)


def test_repeated_warnings_are_counted() -> None:
    printed: list[str] = []
    with CountedWarnings(printed.append) as warn:
        for line in (3, 5, 1_800):
            warn(f"line {line}: {100 * line} tokens are too many")
        warn("the engine stops by its own rule")
        assert printed == ["line 3: 300 tokens are too many", "the engine stops by its own rule"]
    assert printed[2:] == ["2 more like this one: line 3: 300 tokens are too many"]
    warn.close()
    assert len(printed) == 3
