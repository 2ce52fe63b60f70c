"""Write the definitions of Envoy's messages for the tests: `python scripts/ext_proc_descriptors.py`.

Needs `xds-protos` (PyPI), in an environment of its own: the package has modules of OpenTelemetry too, and replaces
those of `opentelemetry-proto`. What is written is a FileDescriptorSet of ext_proc and access log, with all files that
theirs import.
"""

from __future__ import annotations

from pathlib import Path

from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet

WRITTEN = Path(__file__).resolve().parent.parent / "tests" / "support" / "ext_proc.binpb"


def add(file: FileDescriptor, found: dict[str, FileDescriptor]) -> None:
    """Imports first."""
    if file.name not in found:
        for imported in file.dependencies:
            add(imported, found)
        found[file.name] = file


def main() -> None:
    found: dict[str, FileDescriptor] = {}
    add(external_processor_pb2.DESCRIPTOR, found)
    add(als_pb2.DESCRIPTOR, found)
    described = FileDescriptorSet()
    for file in found.values():
        file.CopyToProto(described.file.add())
    WRITTEN.write_bytes(described.SerializeToString())
    print(f"{WRITTEN}: {len(found)} files")


if __name__ == "__main__":
    main()
