/* The part of libcuda.so.1 that torch calls, without memory: devices, contexts, kernels compiled at run time. */
#include <stdio.h>
#include <stdlib.h>

#include "cudart.h"
#include "machine.h"

/* ---- Devices ---- */

CUresult cuInit(unsigned) { return visible_devices() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }

CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = visible_devices();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int number) {
    if (!is_device(number)) return CUDA_ERROR_INVALID_DEVICE;
    *device = number;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int room, CUdevice device) {
    struct cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t)room, "%s", properties.name);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = machine_total(physical(device));
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    struct cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) return CUDA_ERROR_INVALID_DEVICE;
    *uuid = properties.uuid;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *value = device_attribute((int)attribute, device);
    return CUDA_SUCCESS;
}

/* ---- Contexts: a device's only one has the device's number plus 1 for a handle ---- */

static CUcontext context_of(int device) { return (CUcontext)(size_t)(device + 1); }

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = has_context(current_device()) ? context_of(current_device()) : NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    if (context) cudaSetDevice((int)(size_t)context - 1);
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) { return cuCtxSetCurrent(context); }
CUresult cuCtxPopCurrent_v2(CUcontext *context) { return cuCtxGetCurrent(context); }

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = has_context(device);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    cudaError_t error = make_context(device);
    *context = context_of(device);
    return (CUresult)error; /* the runtime's and the driver's numbers of these errors are the same */
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_NOT_SUPPORTED ? "operation not supported (by the simulated device)"
                                              : cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = cudaGetErrorName((cudaError_t)error);
    return CUDA_SUCCESS;
}

/* ---- Kernels that are compiled at run time: loaded, never run ---- */

CUresult cuModuleLoadData(CUmodule *module, const void *) {
    *module = malloc(1);
    return CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule *module, const char *) { return cuModuleLoadData(module, NULL); }

CUresult cuModuleUnload(CUmodule module) {
    free(module);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *) {
    *function = (CUfunction)module;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                        void **, void **) {
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute, CUfunction) {
    *value = 0;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int size, size_t shared) {
    return (CUresult)cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, size, shared);
}
