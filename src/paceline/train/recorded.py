"""Training documents from a recording of the target's replies."""

from __future__ import annotations

import hashlib
import zlib

import torch
from torch.utils.data import Dataset, Subset

from paceline.errors import InvalidData
from paceline.recording.file import Recording
from paceline.recording.rows import RecordedReply
from paceline.train.documents import Document, cut

HELD_OUT = 5
"""One prompt in this many is held out of training. Recorded traffic is often short."""


class RecordedDocuments(Dataset[Document]):
    """All replies of a recording with their prompts, split like `Documents`, in the order of the recording.

    Attributes:
        train: Documents to train on.
        held: Documents of held-out prompts (`is_held`).
        digest: Name for caches. It is the same for the same documents.
    """

    def __init__(self, recording: Recording, max_length: int) -> None:
        """Split a recording.

        Args:
            recording: The recording.
            max_length: Maximum length of a document in tokens (see `documents.cut`).

        Raises:
            InvalidData: If no reply is left to train on.
        """
        self._recording, self._max_length = recording, max_length
        digest, held = hashlib.blake2b(digest_size=16), []
        for reply in recording:
            digest.update(repr(reply.token_ids).encode())
            held.append(is_held(reply))
        self.digest = digest.hexdigest()
        mask = torch.tensor(held, dtype=torch.bool)
        self.train: Subset[Document] = Subset(self, (~mask).nonzero()[:, 0].tolist())
        self.held: Subset[Document] = Subset(self, mask.nonzero()[:, 0].tolist())
        if not len(self.train):
            raise InvalidData(f"{recording.path} holds no replies to train on", "Record more replies")

    def __getitem__(self, row: int) -> Document:
        """Return the document of a reply, by its number in the recording."""
        reply = self._recording[row]
        return cut(Document(reply.prompt, reply.reply), self._max_length)


def is_held(reply: RecordedReply) -> bool:
    """Return True if a reply is held out of training. All replies to a prompt are on the same side."""
    return zlib.crc32(repr(reply.prompt).encode()) % HELD_OUT == 0
