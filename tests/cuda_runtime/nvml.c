/* libnvidia-ml.so.1: the devices and their use by all processes of the user. It needs none of CUDA's libraries. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "machine.h"

/* nvml.h's numbers and structures. */
enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned pid; unsigned long long used; } process_v1;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_v3;

static int initialized; /* as often as it must be shut down */

/* A handle is the device's number plus 1. */
static void *handle_of(int device) { return (void *)(intptr_t)(device + 1); }
static int index_of(void *handle) { return (int)(intptr_t)handle - 1; }

static int check(void *handle) {
    if (!initialized) return UNINITIALIZED;
    return index_of(handle) >= 0 && index_of(handle) < machine_devices() ? OK : INVALID;
}

int nvmlInitWithFlags(unsigned) {
    __atomic_add_fetch(&initialized, 1, __ATOMIC_RELAXED);
    return OK;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    if (!initialized) return UNINITIALIZED;
    __atomic_sub_fetch(&initialized, 1, __ATOMIC_RELAXED);
    return OK;
}

const char *nvmlErrorString(int code) { return code ? "simulated NVML: error" : "Success"; }

/* ---- Devices ---- */

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!initialized) return UNINITIALIZED;
    *count = (unsigned)machine_devices();
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = handle_of((int)index);
    return check(*handle);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    char text[41];
    if (!initialized) return UNINITIALIZED;
    for (int device = 0; device < machine_devices(); device++) {
        uuid_text(device, text);
        if (strcasecmp(text, uuid)) continue;
        *handle = handle_of(device);
        return OK;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) {
    unsigned domain, number;
    if (!initialized) return UNINITIALIZED;
    if (sscanf(bus, "%x:%x:", &domain, &number) != 2 || number < 1) return NOT_FOUND;
    *handle = handle_of((int)number - 1);
    return check(*handle) == OK ? OK : NOT_FOUND;
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned room) {
    char uuid[41];
    if (check(handle)) return check(handle);
    uuid_text(index_of(handle), uuid);
    if (room < sizeof uuid) return INSUFFICIENT_SIZE;
    memcpy(text, uuid, sizeof uuid);
    return OK;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned room) {
    if (check(handle)) return check(handle);
    snprintf(text, room, "Fake CUDA device");
    return OK;
}

int nvmlDeviceGetIndex(void *handle, unsigned *index) {
    *index = (unsigned)index_of(handle);
    return check(handle);
}

int nvmlSystemGetDriverVersion(char *text, unsigned room) {
    snprintf(text, room, "580.00");
    return OK;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return OK;
}

int nvmlDeviceGetUtilizationRates(void *handle, unsigned rates[2]) {
    rates[0] = rates[1] = 0;
    return check(handle);
}

int nvmlDeviceGetMigMode(void *, unsigned *current, unsigned *pending) {
    *current = *pending = 0;
    return NOT_SUPPORTED;
}

/* ---- Memory ---- */

int nvmlDeviceGetMemoryInfo(void *handle, memory_v1 *memory) {
    if (check(handle)) return check(handle);
    if (machine_integrated()) return NOT_SUPPORTED; /* as on a GB10 */
    memory->total = machine_total(index_of(handle));
    memory->used = machine_used(index_of(handle));
    memory->free = memory->total > memory->used ? memory->total - memory->used : 0;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2 *memory) {
    memory_v1 plain;
    int code = nvmlDeviceGetMemoryInfo(handle, &plain);
    if (code) return code;
    memory->total = plain.total;
    memory->reserved = 0; /* what the driver keeps for itself */
    memory->free = plain.free;
    memory->used = plain.used;
    return OK;
}

/* As documented: `count` is the room on entry and the number of processes afterwards, also if the room is too small. */
#define RUNNING(name, type)                                                                               \
    int name(void *handle, unsigned *count, type *out) {                                                  \
        struct usage found[MOST_PROCESSES];                                                               \
        unsigned room = *count;                                                                           \
        if (check(handle)) return check(handle);                                                          \
        *count = (unsigned)machine_processes(index_of(handle), found, MOST_PROCESSES);                    \
        if (*count > room) return INSUFFICIENT_SIZE;                                                      \
        for (unsigned i = 0; i < *count; i++) out[i] = (type){.pid = found[i].pid, .used = found[i].bytes}; \
        return OK;                                                                                        \
    }
RUNNING(nvmlDeviceGetComputeRunningProcesses, process_v1)
RUNNING(nvmlDeviceGetComputeRunningProcesses_v2, process_v3)
RUNNING(nvmlDeviceGetComputeRunningProcesses_v3, process_v3)

/* torch looks for these, and can do without what they tell. */
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void) { return OK; } /* the caller's structure stays all zeros: no fabric */
