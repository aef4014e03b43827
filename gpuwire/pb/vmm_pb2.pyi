from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Id(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("ids", "brief", "keyword", "page", "page_size")
    IDS_FIELD_NUMBER: _ClassVar[int]
    BRIEF_FIELD_NUMBER: _ClassVar[int]
    KEYWORD_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    brief: bool
    keyword: str
    page: int
    page_size: int
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., brief: bool = ..., keyword: _Optional[str] = ..., page: _Optional[int] = ..., page_size: _Optional[int] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("vms", "port_mapping_enabled", "total")
    VMS_FIELD_NUMBER: _ClassVar[int]
    PORT_MAPPING_ENABLED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    vms: _containers.RepeatedCompositeFieldContainer[VmInfo]
    port_mapping_enabled: bool
    total: int
    def __init__(self, vms: _Optional[_Iterable[_Union[VmInfo, _Mapping]]] = ..., port_mapping_enabled: bool = ..., total: _Optional[int] = ...) -> None: ...

class VmInfo(_message.Message):
    __slots__ = ("id", "name", "status", "uptime", "app_url", "app_id", "instance_id", "configuration", "exited_at", "boot_progress", "boot_error", "shutdown_progress", "image_version", "attached_gpus")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    APP_URL_FIELD_NUMBER: _ClassVar[int]
    APP_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    EXITED_AT_FIELD_NUMBER: _ClassVar[int]
    BOOT_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ERROR_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_GPUS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    status: str
    uptime: str
    app_url: str
    app_id: str
    instance_id: str
    configuration: VmConfiguration
    exited_at: str
    boot_progress: str
    boot_error: str
    shutdown_progress: str
    image_version: str
    attached_gpus: _containers.RepeatedCompositeFieldContainer[AttachedGpu]
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., status: _Optional[str] = ..., uptime: _Optional[str] = ..., app_url: _Optional[str] = ..., app_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., configuration: _Optional[_Union[VmConfiguration, _Mapping]] = ..., exited_at: _Optional[str] = ..., boot_progress: _Optional[str] = ..., boot_error: _Optional[str] = ..., shutdown_progress: _Optional[str] = ..., image_version: _Optional[str] = ..., attached_gpus: _Optional[_Iterable[_Union[AttachedGpu, _Mapping]]] = ...) -> None: ...

class VmConfiguration(_message.Message):
    __slots__ = ("name", "image", "vcpu", "memory", "disk_size", "app_id", "hugepages", "pin_numa", "gpus", "stopped", "no_tee")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    VCPU_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    DISK_SIZE_FIELD_NUMBER: _ClassVar[int]
    APP_ID_FIELD_NUMBER: _ClassVar[int]
    HUGEPAGES_FIELD_NUMBER: _ClassVar[int]
    PIN_NUMA_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    NO_TEE_FIELD_NUMBER: _ClassVar[int]
    name: str
    image: str
    vcpu: int
    memory: int
    disk_size: int
    app_id: str
    hugepages: bool
    pin_numa: bool
    gpus: GpuConfig
    stopped: bool
    no_tee: bool
    def __init__(self, name: _Optional[str] = ..., image: _Optional[str] = ..., vcpu: _Optional[int] = ..., memory: _Optional[int] = ..., disk_size: _Optional[int] = ..., app_id: _Optional[str] = ..., hugepages: bool = ..., pin_numa: bool = ..., gpus: _Optional[_Union[GpuConfig, _Mapping]] = ..., stopped: bool = ..., no_tee: bool = ...) -> None: ...

class GpuConfig(_message.Message):
    __slots__ = ("gpus", "attach_mode")
    GPUS_FIELD_NUMBER: _ClassVar[int]
    ATTACH_MODE_FIELD_NUMBER: _ClassVar[int]
    gpus: _containers.RepeatedCompositeFieldContainer[GpuSpec]
    attach_mode: str
    def __init__(self, gpus: _Optional[_Iterable[_Union[GpuSpec, _Mapping]]] = ..., attach_mode: _Optional[str] = ...) -> None: ...

class GpuSpec(_message.Message):
    __slots__ = ("slot",)
    SLOT_FIELD_NUMBER: _ClassVar[int]
    slot: str
    def __init__(self, slot: _Optional[str] = ...) -> None: ...

class AttachedGpu(_message.Message):
    __slots__ = ("host_bdf", "guest_bdf", "source")
    HOST_BDF_FIELD_NUMBER: _ClassVar[int]
    GUEST_BDF_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    host_bdf: str
    guest_bdf: str
    source: str
    def __init__(self, host_bdf: _Optional[str] = ..., guest_bdf: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("found", "info")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    found: bool
    info: VmInfo
    def __init__(self, found: bool = ..., info: _Optional[_Union[VmInfo, _Mapping]] = ...) -> None: ...

class VersionResponse(_message.Message):
    __slots__ = ("version", "rev")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REV_FIELD_NUMBER: _ClassVar[int]
    version: str
    rev: str
    def __init__(self, version: _Optional[str] = ..., rev: _Optional[str] = ...) -> None: ...

class ListGpusResponse(_message.Message):
    __slots__ = ("gpus", "allow_attach_all")
    GPUS_FIELD_NUMBER: _ClassVar[int]
    ALLOW_ATTACH_ALL_FIELD_NUMBER: _ClassVar[int]
    gpus: _containers.RepeatedCompositeFieldContainer[GpuInfo]
    allow_attach_all: bool
    def __init__(self, gpus: _Optional[_Iterable[_Union[GpuInfo, _Mapping]]] = ..., allow_attach_all: bool = ...) -> None: ...

class GpuInfo(_message.Message):
    __slots__ = ("slot", "product_id", "description", "is_free")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PRODUCT_ID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    IS_FREE_FIELD_NUMBER: _ClassVar[int]
    slot: str
    product_id: str
    description: str
    is_free: bool
    def __init__(self, slot: _Optional[str] = ..., product_id: _Optional[str] = ..., description: _Optional[str] = ..., is_free: bool = ...) -> None: ...

class GuestsRequest(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ids: _Optional[_Iterable[str]] = ...) -> None: ...

class GuestReply(_message.Message):
    __slots__ = ("id", "status", "schema", "schema_status", "elapsed_ms", "body", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_STATUS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_MS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: str
    status: int
    schema: str
    schema_status: str
    elapsed_ms: int
    body: bytes
    error: str
    def __init__(self, id: _Optional[str] = ..., status: _Optional[int] = ..., schema: _Optional[str] = ..., schema_status: _Optional[str] = ..., elapsed_ms: _Optional[int] = ..., body: _Optional[bytes] = ..., error: _Optional[str] = ...) -> None: ...
