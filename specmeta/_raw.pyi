"""The compiled module that specmeta.cupy stands on: csrc/raw/module.cpp."""

from collections.abc import Sequence

HOST: int

class Tensor:
    def __init__(
        self,
        data: int,
        shape: Sequence[int],
        strides: Sequence[int] | None,
        dtype: str,
        device: int,
        read_only: bool,
    ) -> None: ...
    @property
    def device(self) -> int: ...

def from_dlpack(capsule: object) -> Tensor: ...
def cuda_device(memory: int) -> int: ...
def call(op: int, arguments: list[Tensor | int | None], stream: int) -> None: ...
def schema() -> str: ...
def workspace_words(rows: int, steps: int) -> int: ...
