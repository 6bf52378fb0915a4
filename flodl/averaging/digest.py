"""A digest of a flat image: equal bytes give equal digests, whatever device holds them or plane made them.

The image is read once. Words of 64 bits are added (wrapping) down the columns of fixed blocks, and the column sums are
hashed: a single flipped bit changes exactly one sum and so the digest, as does a value that moved to another column
or block. Blocks have fixed places, so the digest does not depend on how a reduction was split.
"""

import hashlib

import torch

BLOCK_BYTES = 1 << 20
"""Where an image may be cut that is digested piece by piece."""

_COLUMNS = 1024
_ROWS = 128
_BLOCK = _COLUMNS * _ROWS
_DIGEST_BYTES = 16
_WORD_BYTES = 8


class ImageDigest:
    """The digest of an image that comes in pieces, from its first byte to its last."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def update(self, piece: torch.Tensor) -> None:
        """``piece``: uint8 [n], dense, at a multiple of 8 bytes; n a multiple of ``BLOCK_BYTES``, but at the end."""
        rest = piece.numel() % _WORD_BYTES
        words = piece[: piece.numel() - rest].view(torch.int64)
        whole = words.numel() // _BLOCK * _BLOCK
        if whole:
            sums = words[:whole].view(-1, _ROWS, _COLUMNS).sum(dim=1)
            self._digest.update(sums.cpu().numpy().data)
        self._digest.update(words[whole:].cpu().numpy().data)
        self._digest.update(piece[piece.numel() - rest :].cpu().numpy().data)

    def hexdigest(self) -> str:
        """32 hex digits."""
        return self._digest.hexdigest()


def image_digest(image: torch.Tensor) -> str:
    """The digest of a whole image, uint8 [n], contiguous, at a multiple of 8 bytes: 32 hex digits."""
    digest = ImageDigest()
    digest.update(image)
    return digest.hexdigest()
