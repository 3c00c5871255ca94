/* The runtime's memory: allocation, copies, fills. Device memory is host memory that takes nothing until written. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>

#include "cudart.h"
#include "machine.h"

/* ---- Device memory ---- */

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    int device = current_device();
    size_t size = whole(bytes, DEVICE_PAGE);
    *pointer = NULL;
    cudaError_t error = make_context(device);
    if (error != cudaSuccess || !bytes) return error;
    if (size < bytes || !machine_take(physical(device), size)) return failed(cudaErrorMemoryAllocation);
    *pointer = reserve(size, PROT_READ | PROT_WRITE);
    if (!*pointer) {
        machine_give(physical(device), size);
        return failed(cudaErrorMemoryAllocation);
    }
    range_add(*pointer, size, DEVICE, device, NULL);
    return cudaSuccess;
}

cudaError_t cudaFree(void *pointer) {
    struct range freed;
    if (!pointer) return make_context(current_device()); /* programs free nothing to make the context */
    if (!range_remove(pointer, &freed)) return failed(cudaErrorInvalidValue);
    munmap(freed.base, freed.size);
    machine_give(physical(freed.device), freed.size);
    return cudaSuccess;
}

/* ---- Host memory ---- */

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned) {
    size_t size = whole(bytes ? bytes : 1, PAGE);
    *pointer = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*pointer == MAP_FAILED) {
        *pointer = NULL;
        return failed(cudaErrorMemoryAllocation);
    }
    range_add(*pointer, size, HOST, current_device(), NULL);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *pointer) {
    struct range freed;
    if (!pointer) return cudaSuccess;
    if (!range_remove(pointer, &freed)) return failed(cudaErrorInvalidValue);
    munmap(freed.base, freed.size);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned) {
    range_add(pointer, bytes, REGISTERED, current_device(), NULL);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer) {
    struct range removed;
    return failed(range_remove(pointer, &removed) ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    struct range found;
    *attributes = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -1};
    if (!range_find(pointer, &found)) return cudaSuccess;
    bool on_device = found.kind == DEVICE || found.kind == POOL;
    attributes->type = on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->device = found.device;
    attributes->devicePointer = (void *)pointer;
    attributes->hostPointer = on_device ? NULL : (void *)pointer;
    return cudaSuccess;
}

/* ---- Copies: made at once, since all memory is the host's ---- */

/* Copies to the host are whole: the host's memory that they write is the program's own. */
static void copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    if (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost) {
        if (to != from) memmove(to, from, bytes);
    } else {
        bounded_copy(to, from, bytes);
    }
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    copy(to, from, bytes, kind);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t) {
    copy(to, from, bytes, kind);
    return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t) {
    bounded_copy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t) {
    for (size_t row = 0; row < height; row++) {
        copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind);
    }
    return cudaSuccess;
}

/* ---- Fills ---- */

/* Zeros of device memory are made by giving whole pages back to the host, which reads zeros from them afterwards:
 * a large tensor of zeros takes no memory. */
cudaError_t cudaMemset(void *pointer, int value, size_t bytes) {
    char *start = pointer, *end = start + bytes;
    char *first = (char *)whole((size_t)start, PAGE), *last = (char *)((size_t)end / PAGE * PAGE);
    struct range found;
    if (value || last <= first || !range_find(pointer, &found) || found.kind != DEVICE) {
        memset(pointer, value, bytes);
        return cudaSuccess;
    }
    memset(start, 0, (size_t)(first - start));
    madvise(first, (size_t)(last - first), MADV_DONTNEED);
    memset(last, 0, (size_t)(end - last));
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t) {
    return cudaMemset(pointer, value, bytes);
}

/* Variables of kernels, which don't run: nobody reads them. */
cudaError_t cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, enum cudaMemcpyKind) {
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **pointer, const void *) {
    static char variable[1 << 16];
    *pointer = variable;
    return cudaSuccess;
}
