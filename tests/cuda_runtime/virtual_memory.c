/* The driver's virtual memory, of which torch makes expandable segments: addresses are reserved, and physical memory
 * (cuMemCreate) is mapped to them piece by piece.
 *
 * Physical memory is only counted, since each is mapped at one place at a time: a range gets fresh pages when it is
 * mapped. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>

#include "cudart.h"
#include "machine.h"

/* Mapped or not, it takes the device's memory until its handle is released and it is mapped nowhere. */
struct physical_memory { size_t size; CUmemAllocationProp properties; int references; };

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *, CUmemAllocationGranularity_flags) {
    *bytes = DEVICE_PAGE;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    *pointer = (CUdeviceptr)reserve(bytes, PROT_NONE);
    return *pointer ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
    return munmap((void *)pointer, bytes) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long) {
    int device = properties->location.id;
    if (!bytes || bytes % DEVICE_PAGE || !is_device(device)) return CUDA_ERROR_INVALID_VALUE;
    if (properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) return CUDA_ERROR_NOT_SUPPORTED;
    cudaError_t error = make_context(device);
    if (error != cudaSuccess) return (CUresult)error;
    if (!machine_take(physical(device), bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    struct physical_memory *memory = malloc(sizeof *memory);
    *memory = (struct physical_memory){bytes, *properties, 1};
    *handle = (CUmemGenericAllocationHandle)memory;
    return CUDA_SUCCESS;
}

static void refer(struct physical_memory *memory) { __atomic_add_fetch(&memory->references, 1, __ATOMIC_RELAXED); }

static void release(struct physical_memory *memory) {
    if (__atomic_sub_fetch(&memory->references, 1, __ATOMIC_ACQ_REL)) return;
    machine_give(physical(memory->properties.location.id), memory->size);
    free(memory);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    release((struct physical_memory *)handle);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
    struct physical_memory *memory = (struct physical_memory *)handle;
    struct range there;
    if (offset || bytes != memory->size) return CUDA_ERROR_INVALID_VALUE; /* as documented: offset must be 0 */
    if (range_find((void *)pointer, &there)) return CUDA_ERROR_ALREADY_MAPPED;
    refer(memory);
    range_add((void *)pointer, bytes, DEVICE, memory->properties.location.id, memory);
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *, size_t) {
    return mprotect((void *)pointer, bytes, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* The range may have been mapped in several parts. */
CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
    for (CUdeviceptr at = pointer; at < pointer + bytes;) {
        struct range mapped;
        if (!range_remove((void *)at, &mapped)) return CUDA_ERROR_INVALID_VALUE;
        release(mapped.owner);
        at += mapped.size;
    }
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    void *emptied = mmap((void *)pointer, bytes, PROT_NONE, flags, -1, 0);
    return emptied == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    struct range found;
    if (!range_find(address, &found) || !found.owner) return CUDA_ERROR_INVALID_VALUE;
    refer(found.owner);
    *handle = (CUmemGenericAllocationHandle)found.owner;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle) {
    *properties = ((struct physical_memory *)handle)->properties;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer) {
    struct range found;
    if (!range_find((void *)pointer, &found)) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = (CUdeviceptr)found.base;
    if (bytes) *bytes = found.size;
    return CUDA_SUCCESS;
}
