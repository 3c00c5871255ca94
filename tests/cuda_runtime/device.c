/* Devices of the runtime: which are visible, their contexts and properties (an A100's). */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "cudart.h"
#include "machine.h"

/* ---- CUDA_VISIBLE_DEVICES ---- */

static int visible[MOST_DEVICES], visible_count;

/* Returns the physical device that a word names, by number or by the beginning of its UUID, or -1. */
static int named_device(const char *word) {
    int found = -1;
    char *end;
    if (strncasecmp(word, "GPU-", 4)) {
        long number = strtol(word, &end, 10);
        return end != word && !*end && number >= 0 && number < machine_devices() ? (int)number : -1;
    }
    for (int device = 0; device < machine_devices(); device++) {
        char uuid[41];
        uuid_text(device, uuid);
        if (strncasecmp(word, uuid, strlen(word))) continue;
        if (found >= 0) return -1; /* the beginning of several */
        found = device;
    }
    return found;
}

/* As documented: devices after the first invalid name are not visible. A name that comes twice hides all. */
static void find_visible(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
        visible_count = machine_devices();
        for (int i = 0; i < visible_count; i++) visible[i] = i;
        return;
    }
    char copy[1024], *rest = copy, *word;
    snprintf(copy, sizeof copy, "%s", text);
    while ((word = strsep(&rest, ",")) && visible_count < MOST_DEVICES) {
        word += strspn(word, " ");
        word[strcspn(word, " ")] = 0;
        int device = named_device(word);
        if (device < 0) return;
        for (int i = 0; i < visible_count; i++) {
            if (visible[i] != device) continue;
            visible_count = 0;
            return;
        }
        visible[visible_count++] = device;
    }
}

int visible_devices(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_visible);
    return visible_count;
}

bool is_device(int device) { return device >= 0 && device < visible_devices(); }
int physical(int device) { return visible[device]; }

/* ---- Contexts ---- */

static __thread int chosen_device;
static bool contexts[MOST_DEVICES];
static int initialized_by; /* process id; 0: nobody */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int current_device(void) { return chosen_device; }
bool has_context(int device) { return contexts[device]; }

/* CUDA can't be used in a fork of a process that has used it. */
static bool in_bad_fork(void) { return initialized_by && initialized_by != getpid(); }

/* Takes FAKE_CUDA_CONTEXT bytes of the device, once. */
cudaError_t make_context(int device) {
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&lock);
    if (!visible_devices()) {
        error = cudaErrorNoDevice;
    } else if (in_bad_fork()) {
        error = cudaErrorInitializationError;
    } else if (!contexts[device]) {
        initialized_by = getpid();
        machine_enter(physical(device));
        contexts[device] = machine_take(physical(device), size_setting("FAKE_CUDA_CONTEXT", 0));
        if (!contexts[device]) error = cudaErrorMemoryAllocation;
    }
    pthread_mutex_unlock(&lock);
    return failed(error);
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = in_bad_fork() ? 0 : visible_devices();
    if (in_bad_fork()) return failed(cudaErrorInitializationError);
    return failed(*count ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
    *device = chosen_device;
    return failed(visible_devices() ? cudaSuccess : cudaErrorNoDevice);
}

/* Since CUDA 12 this makes the device's context. */
cudaError_t cudaSetDevice(int device) {
    if (!is_device(device)) return failed(cudaErrorInvalidDevice);
    chosen_device = device;
    return make_context(device);
}

cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
    cudaError_t error = make_context(chosen_device);
    if (error != cudaSuccess) return error;
    *total = machine_total(physical(chosen_device));
    size_t used = machine_used(physical(chosen_device));
    *unused = used < *total ? *total - used : 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    if (!is_device(device) || !is_device(peer)) return failed(cudaErrorInvalidDevice);
    *can = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
    static bool enabled[MOST_DEVICES][MOST_DEVICES];
    if (!is_device(peer) || peer == chosen_device) return failed(cudaErrorInvalidDevice);
    if (enabled[chosen_device][peer]) return failed(cudaErrorPeerAccessAlreadyEnabled);
    enabled[chosen_device][peer] = true;
    return cudaSuccess;
}

/* ---- Properties ---- */

void device_capability(int *major, int *minor) {
    const char *text = getenv("FAKE_CUDA_CAPABILITY");
    if (text && sscanf(text, "%d.%d", major, minor) == 2) return;
    *major = 8;
    *minor = 0;
}

static void set_uuid(cudaUUID_t *uuid, int device) {
    char text[41];
    int count = 0;
    uuid_text(physical(device), text);
    for (const char *at = text + strlen("GPU-"); *at; at++) {
        unsigned byte;
        if (*at == '-') continue;
        sscanf(at++, "%2x", &byte);
        uuid->bytes[count++] = (char)byte;
    }
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    if (!is_device(device)) return failed(cudaErrorInvalidDevice);
    *properties = (struct cudaDeviceProp){
        .name = "Fake CUDA device",
        .totalGlobalMem = machine_total(physical(device)),
        .multiProcessorCount = (int)number_setting("FAKE_CUDA_PROCESSORS", 108),
        .pciBusID = physical(device) + 1,
        .warpSize = 32,
        .sharedMemPerBlock = 48 << 10,
        .sharedMemPerBlockOptin = 163 << 10,
        .sharedMemPerMultiprocessor = 164 << 10,
        .reservedSharedMemPerBlock = 1 << 10,
        .totalConstMem = 64 << 10,
        .l2CacheSize = 40 << 20,
        .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536,
        .maxThreadsPerBlock = 1024,
        .maxThreadsPerMultiProcessor = 2048,
        .maxBlocksPerMultiProcessor = 32,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .memPitch = 2147483647,
        .memoryBusWidth = 5120,
        .textureAlignment = 512,
        .texturePitchAlignment = 32,
        .asyncEngineCount = 3,
        .concurrentKernels = 1,
        .unifiedAddressing = 1,
        .streamPrioritiesSupported = 1,
        .cooperativeLaunch = 1,
        .canMapHostMemory = 1,
        .integrated = machine_integrated(),
        .hostRegisterSupported = 1,
        .memoryPoolsSupported = 1,
    };
    device_capability(&properties->major, &properties->minor);
    set_uuid(&properties->uuid, device);
    return cudaSuccess;
}

int device_attribute(int attribute, int device) {
    struct cudaDeviceProp p;
    cudaGetDeviceProperties(&p, device);
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: return p.maxThreadsPerBlock;
    case cudaDevAttrMaxBlockDimX: return p.maxThreadsDim[0];
    case cudaDevAttrMaxBlockDimY: return p.maxThreadsDim[1];
    case cudaDevAttrMaxBlockDimZ: return p.maxThreadsDim[2];
    case cudaDevAttrMaxGridDimX: return p.maxGridSize[0];
    case cudaDevAttrMaxGridDimY: return p.maxGridSize[1];
    case cudaDevAttrMaxGridDimZ: return p.maxGridSize[2];
    case cudaDevAttrMaxSharedMemoryPerBlock: return (int)p.sharedMemPerBlock;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return (int)p.sharedMemPerBlockOptin;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return (int)p.sharedMemPerMultiprocessor;
    case cudaDevAttrWarpSize: return p.warpSize;
    case cudaDevAttrMaxRegistersPerBlock: return p.regsPerBlock;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return p.regsPerMultiprocessor;
    case cudaDevAttrMultiProcessorCount: return p.multiProcessorCount;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return p.maxThreadsPerMultiProcessor;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return p.maxBlocksPerMultiProcessor;
    case cudaDevAttrComputeCapabilityMajor: return p.major;
    case cudaDevAttrComputeCapabilityMinor: return p.minor;
    case cudaDevAttrL2CacheSize: return p.l2CacheSize;
    case cudaDevAttrIntegrated: return p.integrated;
    case cudaDevAttrClockRate: return 1410000; /* kHz */
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrUnifiedAddressing:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    default: return 0;
    }
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    if (!is_device(device)) return failed(cudaErrorInvalidDevice);
    *value = device_attribute((int)attribute, device);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int room, int device) {
    if (!is_device(device)) return failed(cudaErrorInvalidDevice);
    snprintf(text, (size_t)room, "0000:%02X:00.0", (unsigned)physical(device) + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
