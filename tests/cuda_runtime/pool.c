/* The driver's memory pools, of which torch's backend cudaMallocAsync uses each device's default one.
 *
 * A pool grows when its memory does not suffice, and keeps what it has until it is trimmed, since torch sets the
 * release threshold to its maximum. The real pool's fragmentation is not imitated: it grows by whole pages. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/mman.h>

#include "cudart.h"
#include "machine.h"

enum { ALIGNMENT = 512 };

struct CUmemPoolHandle_st { int device; size_t used, most_used, reserved, most_reserved; };

static struct CUmemPoolHandle_st pools[MOST_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t larger(size_t one, size_t other) { return one > other ? one : other; }

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    if (!is_device(device)) return failed(cudaErrorInvalidDevice);
    pools[device].device = device;
    *pool = &pools[device];
    return cudaSuccess;
}

/* Returns false, and changes nothing, if the device has not that much left. */
static bool take_from_pool(cudaMemPool_t pool, size_t bytes) {
    pthread_mutex_lock(&lock);
    size_t needed = whole(pool->used + bytes, DEVICE_PAGE);
    bool enough = needed <= pool->reserved || machine_take(physical(pool->device), needed - pool->reserved);
    if (enough) {
        pool->used += bytes;
        pool->reserved = larger(pool->reserved, needed);
        pool->most_used = larger(pool->most_used, pool->used);
        pool->most_reserved = larger(pool->most_reserved, pool->reserved);
    }
    pthread_mutex_unlock(&lock);
    return enough;
}

static void give_to_pool(cudaMemPool_t pool, size_t bytes) {
    pthread_mutex_lock(&lock);
    pool->used -= bytes;
    pthread_mutex_unlock(&lock);
}

cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t) {
    int device = current_device();
    size_t size = whole(bytes, ALIGNMENT);
    cudaMemPool_t pool;
    *pointer = NULL;
    cudaError_t error = make_context(device);
    if (error != cudaSuccess || !bytes) return error;
    cudaDeviceGetDefaultMemPool(&pool, device);
    if (size < bytes || !take_from_pool(pool, size)) return failed(cudaErrorMemoryAllocation);
    *pointer = reserve(size, PROT_READ | PROT_WRITE);
    if (!*pointer) {
        give_to_pool(pool, size);
        return failed(cudaErrorMemoryAllocation);
    }
    range_add(*pointer, size, POOL, device, NULL);
    return cudaSuccess;
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t) {
    struct range freed;
    if (!pointer) return cudaSuccess;
    if (!range_remove(pointer, &freed)) return failed(cudaErrorInvalidValue);
    munmap(freed.base, whole(freed.size, PAGE));
    give_to_pool(&pools[freed.device], freed.size);
    return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) {
    pthread_mutex_lock(&lock);
    size_t kept = larger(whole(pool->used, DEVICE_PAGE), whole(bytes, DEVICE_PAGE));
    if (kept < pool->reserved) {
        machine_give(physical(pool->device), pool->reserved - kept);
        pool->reserved = kept;
    }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    size_t *bytes = value;
    switch (attribute) {
    case cudaMemPoolAttrUsedMemCurrent: *bytes = pool->used; break;
    case cudaMemPoolAttrUsedMemHigh: *bytes = pool->most_used; break;
    case cudaMemPoolAttrReservedMemCurrent: *bytes = pool->reserved; break;
    case cudaMemPoolAttrReservedMemHigh: *bytes = pool->most_reserved; break;
    default: return failed(cudaErrorNotSupported);
    }
    return cudaSuccess;
}

/* A high mark can only be reset. The other attributes change nothing here. */
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *) {
    if (attribute == cudaMemPoolAttrUsedMemHigh) pool->most_used = pool->used;
    if (attribute == cudaMemPoolAttrReservedMemHigh) pool->most_reserved = pool->reserved;
    return cudaSuccess;
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const struct cudaMemAccessDesc *, size_t) { return cudaSuccess; }
