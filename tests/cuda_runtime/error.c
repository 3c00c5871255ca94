/* Errors, and the way from the runtime to the driver. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

#include "cudart.h"

static __thread cudaError_t last_error;

cudaError_t failed(cudaError_t error) {
    /* cudaErrorNotReady is an answer, and is not kept. */
    if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

static const struct { cudaError_t error; const char *name, *text; } ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported (by the simulated device)"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorIllegalState, "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not initiated in this stream"},
};

const char *cudaGetErrorName(cudaError_t error) {
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++) {
        if (ERRORS[i].error == error) return ERRORS[i].name;
    }
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error) {
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++) {
        if (ERRORS[i].error == error) return ERRORS[i].text;
    }
    return "unrecognized error code";
}

static CUresult not_supported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

/* torch calls the driver only through the pointers that it gets here. A name may stand for several versions of a
 * function: the newest is given. What is not there is a function that fails, as if the driver knew it. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                             enum cudaDriverEntryPointQueryResult *status) {
    char newer[128];
    Dl_info self;
    dladdr((void *)cudaGetDriverEntryPointByVersion, &self);
    void *library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    snprintf(newer, sizeof newer, "%s_v2", name);
    *function = dlsym(library, newer);
    if (!*function) *function = dlsym(library, name);
    if (!*function) *function = (void *)not_supported;
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
