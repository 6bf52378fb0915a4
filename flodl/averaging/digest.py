"""A digest of a flat image: equal bytes give equal digests, whatever device holds them or plane made them.

The image is read once. Words of 64 bits are added (wrapping) down the columns of fixed blocks, and the column sums are
hashed: a single flipped bit changes exactly one sum and so the digest, as does a value that moved to another column
or block. Blocks have fixed places, so the digest does not depend on how a reduction was split.
"""

import hashlib

import torch

_COLUMNS = 4096
_ROWS = 32
_BLOCK = _COLUMNS * _ROWS
_DIGEST_BYTES = 16
_WORD_BYTES = 8


def image_digest(image: torch.Tensor) -> str:
    """The digest as 32 hex digits. ``image``: uint8 [n], contiguous, at a multiple of 8 bytes."""
    rest = image.numel() % _WORD_BYTES
    words = image[: image.numel() - rest].view(torch.int64)
    whole = words.numel() // _BLOCK * _BLOCK
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    if whole:
        sums = words[:whole].view(-1, _ROWS, _COLUMNS).sum(dim=1)
        digest.update(sums.cpu().numpy().data)
    digest.update(words[whole:].cpu().numpy().data)
    digest.update(image[image.numel() - rest :].cpu().numpy().data)
    return digest.hexdigest()
