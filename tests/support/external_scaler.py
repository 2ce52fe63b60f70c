"""KEDA's own messages of its external scaler.

`external_scaler.binpb` is what `protoc --descriptor_set_out` makes of pkg/scalers/externalscaler/externalscaler.proto
(kedacore/keda, Apache-2.0).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_POOL = DescriptorPool()
for _file in FileDescriptorSet.FromString((Path(__file__).parent / "external_scaler.binpb").read_bytes()).file:
    _POOL.Add(_file)


def message(name: str) -> Any:
    return GetMessageClass(_POOL.FindMessageTypeByName(f"externalscaler.{name}"))


ScaledObjectRef, GetMetricsRequest = message("ScaledObjectRef"), message("GetMetricsRequest")
IsActiveResponse, GetMetricSpecResponse, GetMetricsResponse = map(
    message, ("IsActiveResponse", "GetMetricSpecResponse", "GetMetricsResponse")
)
