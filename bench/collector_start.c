/* The collector's sample in C: the same NVML calls, the same JSON line. The floor to which the bench compares.
 *
 * Only what healthy cards need: a failed call ends it with status 1.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static void *library;

static void *symbol(const char *name)
{
    void *found = dlsym(library, name);
    if (!found)
        exit(1);
    return found;
}

#define CALL(name, types, ...)                                                                                         \
    do {                                                                                                               \
        if (((int(*) types)symbol(#name))(__VA_ARGS__) != 0)                                                           \
            exit(1);                                                                                                   \
    } while (0)

int main(void)
{
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library)
        return 1;
    unsigned count, ready;
    CALL(nvmlInit_v2, (void));
    CALL(nvmlDeviceGetCount_v2, (unsigned *), &count);
    printf("{\"gpus\":[");
    for (unsigned index = 0; index < count; index++) {
        void *device;
        char uuid[96];
        struct {
            char legacy[16];
            unsigned numbers[5];
            char bus_id[32];
        } pci;
        struct {
            unsigned gpu, memory;
        } rates;
        struct {
            unsigned version;
            unsigned long long total, reserved, free, used;
        } memory = {.version = sizeof memory | 2u << 24};
        unsigned celsius, milliwatts;
        CALL(nvmlDeviceGetHandleByIndex_v2, (unsigned, void **), index, &device);
        CALL(nvmlDeviceGetUUID, (void *, char *, unsigned), device, uuid, sizeof uuid);
        CALL(nvmlDeviceGetPciInfo_v3, (void *, void *), device, &pci);
        CALL(nvmlDeviceGetUtilizationRates, (void *, void *), device, &rates);
        CALL(nvmlDeviceGetMemoryInfo_v2, (void *, void *), device, &memory);
        CALL(nvmlDeviceGetTemperature, (void *, int, unsigned *), device, 0, &celsius);
        CALL(nvmlDeviceGetPowerUsage, (void *, unsigned *), device, &milliwatts);
        printf("%s{\"index\":%u,\"uuid\":\"%s\",\"pci_bus_id\":\"%s\",\"utilization_gpu\":%u,\"utilization_memory\":%u,"
               "\"memory_total_bytes\":%llu,\"memory_used_bytes\":%llu,\"memory_free_bytes\":%llu,\"temperature_c\":%u,"
               "\"power_usage_mw\":%u,\"errors\":[]}",
               index ? "," : "", index, uuid, pci.bus_id, rates.gpu, rates.memory, memory.total, memory.used,
               memory.free, celsius, milliwatts);
    }
    struct {
        unsigned environment, feature, tools;
    } cc;
    CALL(nvmlSystemGetConfComputeGpusReadyState, (unsigned *), &ready);
    CALL(nvmlSystemGetConfComputeState, (void *), &cc);
    CALL(nvmlShutdown, (void));
    printf("],\"error\":\"\",\"cc_ready\":%s,\"cc_enabled\":%s,\"sample_age_ms\":null}\n", ready ? "true" : "false",
           cc.feature ? "true" : "false");
    return 0;
}
