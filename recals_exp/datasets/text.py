"""Text for language models, byte by byte: what every Python ships, or a file the user names.

Bytes need no tokenizer and no download: the vocabulary is 256. The built-in text is the help of Python's own language
reference (``pydoc_data.topics``, about 700 kB of English prose), present in every installation.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from recals_exp.datasets.spec import LANGUAGE_MODEL, Batch, DataSpec, InputSpec, task_loss
from recals_exp.runconfig import ConfigError

VOCABULARY = 256


def text(path: str | None = None, seq_len: int = 128) -> DataSpec:
    """Windows of ``seq_len`` bytes and, as targets, the same windows one byte later."""
    if not isinstance(seq_len, int) or isinstance(seq_len, bool) or seq_len < 1:
        raise ConfigError(f"seq_len={seq_len!r} is not allowed: use a whole number of bytes, at least 1")
    content = _builtin_text() if path is None else _read(path)
    if len(content) <= seq_len:
        raise ConfigError(
            f"text: {path or 'the built-in text'} has {len(content)} bytes, but one sample takes {seq_len + 1}: "
            "use a longer file or a smaller dataset.seq_len"
        )
    stream = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    span = torch.arange(seq_len + 1)

    def sample(rows: Tensor) -> Batch:
        windows = stream[rows.unsqueeze(1) + span].to(torch.int64)
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())

    return DataSpec(
        name="text",
        task=LANGUAGE_MODEL,
        input_spec=InputSpec((seq_len,), torch.int64),
        n_classes=VOCABULARY,
        n_samples=len(content) - seq_len,
        sample=sample,
        loss=task_loss,
        note=f"{len(content)} bytes of {path or 'the help texts that come with Python (pydoc_data.topics)'}",
    )


def _builtin_text() -> bytes:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"text: cannot read {Path(path).resolve()} ({error.strerror}): name a file with dataset.path=FILE, or leave "
            "dataset.path out for the text that comes with Python"
        ) from error
