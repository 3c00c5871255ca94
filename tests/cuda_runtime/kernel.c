/* Kernels: known, with plausible properties, never run. */
#include <stdlib.h>

#include "cudart.h"

/* ---- What nvcc's code calls as a library is loaded, and around a launch ---- */

void **__cudaRegisterFatBinary(void *) { return calloc(1, sizeof(void *)); }
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **handle) { free(handle); }
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
char __cudaInitModule(void **) { return 1; }

static __thread struct { dim3 grid, block; size_t shared; cudaStream_t stream; } configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(cudaStream_t *)stream = configuration.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

/* ---- Launches ---- */

cudaError_t __cudaLaunchKernel(void) { return cudaSuccess; }

cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t) { return cudaSuccess; }

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *, void **) { return cudaSuccess; }

cudaError_t cudaLaunchCooperativeKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t) {
    return cudaSuccess;
}

/* ---- Properties, from which torch derives the sizes of grids, and so of temporary buffers ---- */

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *) {
    int major, minor;
    device_capability(&major, &minor);
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024,
        .numRegs = 32,
        .ptxVersion = major * 10 + minor,
        .binaryVersion = major * 10 + minor,
        .maxDynamicSharedSizeBytes = 163 << 10,
    };
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *, enum cudaFuncAttribute, int) { return cudaSuccess; }

/* As many as a multiprocessor's 2,048 threads allow: registers and shared memory are never the limit. */
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int size, size_t,
                                                                   unsigned) {
    *blocks = size > 0 && size <= 2048 ? 2048 / size : 1;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int size,
                                                          size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, size, shared, 0);
}

cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
