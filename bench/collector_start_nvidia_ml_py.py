"""The collector's sample through nvidia-ml-py and json: the same queries, the same line. The folder of pynvml is argv[1].

Written as one would write it with that package; it only samples healthy cards, which is all that the bench asks for.
"""

import sys

sys.path.append(sys.argv[1])

import json

import pynvml


def sample() -> dict[str, object]:
    pynvml.nvmlInit()
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        gpus.append(
            {
                "index": index,
                "uuid": pynvml.nvmlDeviceGetUUID(handle),
                "pci_bus_id": pynvml.nvmlDeviceGetPciInfo(handle).busId,
                "utilization_gpu": rates.gpu,
                "utilization_memory": rates.memory,
                "memory_total_bytes": memory.total,
                "memory_used_bytes": memory.used,
                "memory_free_bytes": memory.free,
                "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
                "power_usage_mw": pynvml.nvmlDeviceGetPowerUsage(handle),
                "errors": [],
            }
        )
    ready = pynvml.nvmlSystemGetConfComputeGpusReadyState() == pynvml.NVML_CC_ACCEPTING_CLIENT_REQUESTS_TRUE
    enabled = pynvml.nvmlSystemGetConfComputeState().ccFeature == pynvml.NVML_CC_SYSTEM_FEATURE_ENABLED
    pynvml.nvmlShutdown()
    return {"gpus": gpus, "error": "", "cc_ready": ready, "cc_enabled": enabled, "sample_age_ms": None}


print(json.dumps(sample()))
