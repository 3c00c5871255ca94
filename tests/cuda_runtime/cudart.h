/* What the files of the runtime and of the driver share. Numbers of devices are those of the visible ones. */
#ifndef FAKE_CUDART_H
#define FAKE_CUDART_H
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>

/* error.c: keeps an error for cudaGetLastError, and returns it. */
cudaError_t failed(cudaError_t error);

/* device.c */
int visible_devices(void);
bool is_device(int device);
int physical(int device);
int current_device(void);
bool has_context(int device);
cudaError_t make_context(int device);
void device_capability(int *major, int *minor);
int device_attribute(int attribute, int device);

/* address_space.c: all memory that was handed out. `owner` is the physical memory of a mapped range. */
enum { PAGE = 4096, DEVICE_PAGE = 2 << 20 }; /* the driver hands out device memory in pages of 2 MiB */
enum kind { DEVICE, POOL, HOST, REGISTERED };
struct range { char *base; size_t size; enum kind kind; int device; void *owner; struct range *next; };

size_t whole(size_t bytes, size_t page);
void *reserve(size_t bytes, int protection);
void range_add(void *base, size_t size, enum kind kind, int device, void *owner);
bool range_remove(const void *base, struct range *removed);
bool range_find(const void *address, struct range *found);
#endif
