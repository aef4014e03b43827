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

class GuestInfo(_message.Message):
    __slots__ = ("version", "app_id", "instance_id", "app_cert", "tcb_info", "device_id")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    APP_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    APP_CERT_FIELD_NUMBER: _ClassVar[int]
    TCB_INFO_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    version: str
    app_id: bytes
    instance_id: bytes
    app_cert: str
    tcb_info: str
    device_id: bytes
    def __init__(self, version: _Optional[str] = ..., app_id: _Optional[bytes] = ..., instance_id: _Optional[bytes] = ..., app_cert: _Optional[str] = ..., tcb_info: _Optional[str] = ..., device_id: _Optional[bytes] = ...) -> None: ...

class IpAddress(_message.Message):
    __slots__ = ("address", "prefix")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    address: str
    prefix: int
    def __init__(self, address: _Optional[str] = ..., prefix: _Optional[int] = ...) -> None: ...

class Interface(_message.Message):
    __slots__ = ("name", "addresses", "rx_bytes", "tx_bytes", "rx_errors", "tx_errors")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    RX_BYTES_FIELD_NUMBER: _ClassVar[int]
    TX_BYTES_FIELD_NUMBER: _ClassVar[int]
    RX_ERRORS_FIELD_NUMBER: _ClassVar[int]
    TX_ERRORS_FIELD_NUMBER: _ClassVar[int]
    name: str
    addresses: _containers.RepeatedCompositeFieldContainer[IpAddress]
    rx_bytes: int
    tx_bytes: int
    rx_errors: int
    tx_errors: int
    def __init__(self, name: _Optional[str] = ..., addresses: _Optional[_Iterable[_Union[IpAddress, _Mapping]]] = ..., rx_bytes: _Optional[int] = ..., tx_bytes: _Optional[int] = ..., rx_errors: _Optional[int] = ..., tx_errors: _Optional[int] = ...) -> None: ...

class Gateway(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class NetworkInformation(_message.Message):
    __slots__ = ("dns_servers", "gateways", "interfaces", "wg_info")
    DNS_SERVERS_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    INTERFACES_FIELD_NUMBER: _ClassVar[int]
    WG_INFO_FIELD_NUMBER: _ClassVar[int]
    dns_servers: _containers.RepeatedScalarFieldContainer[str]
    gateways: _containers.RepeatedCompositeFieldContainer[Gateway]
    interfaces: _containers.RepeatedCompositeFieldContainer[Interface]
    wg_info: str
    def __init__(self, dns_servers: _Optional[_Iterable[str]] = ..., gateways: _Optional[_Iterable[_Union[Gateway, _Mapping]]] = ..., interfaces: _Optional[_Iterable[_Union[Interface, _Mapping]]] = ..., wg_info: _Optional[str] = ...) -> None: ...

class ListContainersResponse(_message.Message):
    __slots__ = ("containers",)
    CONTAINERS_FIELD_NUMBER: _ClassVar[int]
    containers: _containers.RepeatedCompositeFieldContainer[Container]
    def __init__(self, containers: _Optional[_Iterable[_Union[Container, _Mapping]]] = ...) -> None: ...

class Container(_message.Message):
    __slots__ = ("id", "names", "image", "image_id", "created", "state", "status")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    id: str
    names: _containers.RepeatedScalarFieldContainer[str]
    image: str
    image_id: str
    created: int
    state: str
    status: str
    def __init__(self, id: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., image: _Optional[str] = ..., image_id: _Optional[str] = ..., created: _Optional[int] = ..., state: _Optional[str] = ..., status: _Optional[str] = ...) -> None: ...

class SystemInfo(_message.Message):
    __slots__ = ("os_name", "os_version", "kernel_version", "cpu_model", "num_cpus", "total_memory", "available_memory", "used_memory", "free_memory", "total_swap", "used_swap", "free_swap", "uptime", "loadavg_one", "loadavg_five", "loadavg_fifteen", "disks")
    OS_NAME_FIELD_NUMBER: _ClassVar[int]
    OS_VERSION_FIELD_NUMBER: _ClassVar[int]
    KERNEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CPU_MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_CPUS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MEMORY_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    USED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    FREE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SWAP_FIELD_NUMBER: _ClassVar[int]
    USED_SWAP_FIELD_NUMBER: _ClassVar[int]
    FREE_SWAP_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    LOADAVG_ONE_FIELD_NUMBER: _ClassVar[int]
    LOADAVG_FIVE_FIELD_NUMBER: _ClassVar[int]
    LOADAVG_FIFTEEN_FIELD_NUMBER: _ClassVar[int]
    DISKS_FIELD_NUMBER: _ClassVar[int]
    os_name: str
    os_version: str
    kernel_version: str
    cpu_model: str
    num_cpus: int
    total_memory: int
    available_memory: int
    used_memory: int
    free_memory: int
    total_swap: int
    used_swap: int
    free_swap: int
    uptime: int
    loadavg_one: int
    loadavg_five: int
    loadavg_fifteen: int
    disks: _containers.RepeatedCompositeFieldContainer[DiskInfo]
    def __init__(self, os_name: _Optional[str] = ..., os_version: _Optional[str] = ..., kernel_version: _Optional[str] = ..., cpu_model: _Optional[str] = ..., num_cpus: _Optional[int] = ..., total_memory: _Optional[int] = ..., available_memory: _Optional[int] = ..., used_memory: _Optional[int] = ..., free_memory: _Optional[int] = ..., total_swap: _Optional[int] = ..., used_swap: _Optional[int] = ..., free_swap: _Optional[int] = ..., uptime: _Optional[int] = ..., loadavg_one: _Optional[int] = ..., loadavg_five: _Optional[int] = ..., loadavg_fifteen: _Optional[int] = ..., disks: _Optional[_Iterable[_Union[DiskInfo, _Mapping]]] = ...) -> None: ...

class DiskInfo(_message.Message):
    __slots__ = ("name", "mount_point", "total_size", "free_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MOUNT_POINT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SIZE_FIELD_NUMBER: _ClassVar[int]
    FREE_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    mount_point: str
    total_size: int
    free_size: int
    def __init__(self, name: _Optional[str] = ..., mount_point: _Optional[str] = ..., total_size: _Optional[int] = ..., free_size: _Optional[int] = ...) -> None: ...

class GpuDevice(_message.Message):
    __slots__ = ("index", "uuid", "pci_bus_id", "utilization_gpu", "utilization_memory", "memory_total_bytes", "memory_used_bytes", "memory_free_bytes", "temperature_c", "power_usage_mw", "errors")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    PCI_BUS_ID_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_GPU_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_MEMORY_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_C_FIELD_NUMBER: _ClassVar[int]
    POWER_USAGE_MW_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    index: int
    uuid: str
    pci_bus_id: str
    utilization_gpu: int
    utilization_memory: int
    memory_total_bytes: int
    memory_used_bytes: int
    memory_free_bytes: int
    temperature_c: int
    power_usage_mw: int
    errors: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, index: _Optional[int] = ..., uuid: _Optional[str] = ..., pci_bus_id: _Optional[str] = ..., utilization_gpu: _Optional[int] = ..., utilization_memory: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., memory_used_bytes: _Optional[int] = ..., memory_free_bytes: _Optional[int] = ..., temperature_c: _Optional[int] = ..., power_usage_mw: _Optional[int] = ..., errors: _Optional[_Iterable[str]] = ...) -> None: ...

class GpuInfoResponse(_message.Message):
    __slots__ = ("gpus", "error", "cc_ready", "cc_enabled", "sample_age_ms")
    GPUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CC_READY_FIELD_NUMBER: _ClassVar[int]
    CC_ENABLED_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    gpus: _containers.RepeatedCompositeFieldContainer[GpuDevice]
    error: str
    cc_ready: bool
    cc_enabled: bool
    sample_age_ms: int
    def __init__(self, gpus: _Optional[_Iterable[_Union[GpuDevice, _Mapping]]] = ..., error: _Optional[str] = ..., cc_ready: bool = ..., cc_enabled: bool = ..., sample_age_ms: _Optional[int] = ...) -> None: ...
