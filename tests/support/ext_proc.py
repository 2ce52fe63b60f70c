"""Envoy's own ext_proc messages, from their definitions (`scripts/ext_proc_descriptors.py`).

A pool of its own keeps them apart from other generated modules in the process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_DEFINED = FileDescriptorSet.FromString((Path(__file__).parent / "ext_proc.binpb").read_bytes())
_POOL = DescriptorPool()
for _file in _DEFINED.file:
    _POOL.Add(_file)


def message(name: str) -> Any:
    return GetMessageClass(_POOL.FindMessageTypeByName(name))


_SERVICE = "envoy.service.ext_proc.v3"
ProcessingRequest = message(f"{_SERVICE}.ProcessingRequest")
ProcessingResponse = message(f"{_SERVICE}.ProcessingResponse")
ProtocolConfiguration = message(f"{_SERVICE}.ProtocolConfiguration")
HttpHeaders, HttpBody, HttpTrailers = (
    message(f"{_SERVICE}.{name}") for name in ("HttpHeaders", "HttpBody", "HttpTrailers")
)
HeaderMap, HeaderValue = (message(f"envoy.config.core.v3.{name}") for name in ("HeaderMap", "HeaderValue"))
StreamAccessLogsMessage = message("envoy.service.accesslog.v3.StreamAccessLogsMessage")
ResponseFlags = message("envoy.data.accesslog.v3.ResponseFlags")
