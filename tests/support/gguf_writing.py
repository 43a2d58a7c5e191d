"""The end of a GGUF file that a test writes."""

from __future__ import annotations

import gguf


def finish(writer: gguf.GGUFWriter) -> None:
    """Write all that the writer was given, and close its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
