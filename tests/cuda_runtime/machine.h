/* The simulated machine: how many devices, how large, and which process uses how much of them.
 *
 * All processes of a user share one small file (FAKE_CUDA_STATE), as processes share a real device: NVML in one
 * process shows what another has allocated, and a device can be full because of another process. The machine is a
 * library of its own, so that a process which loads both CUDA's runtime and NVML has it once. */
#ifndef FAKE_MACHINE_H
#define FAKE_MACHINE_H
#include <stdbool.h>
#include <stddef.h>

enum { MOST_DEVICES = 16, MOST_PROCESSES = 256 };

/* Physical devices, as NVML counts them: CUDA_VISIBLE_DEVICES does not matter here. */
int machine_devices(void);
size_t machine_total(int device);
size_t machine_used(int device);
void uuid_text(int device, char text[41]);

/* Processes with a context on the device. Returns how many there are, and fills in at most `room` of them. */
struct usage { unsigned pid; size_t bytes; };
int machine_processes(int device, struct usage *found, int room);

/* This process's own use. `enter` makes it one of the device's processes. `take` fails, and changes nothing, if the
 * device has not that much left. */
void machine_enter(int device);
bool machine_take(int device, size_t bytes);
void machine_give(int device, size_t bytes);

/* "80 GiB", "512m" or a number of bytes; `otherwise` if the variable is not set or can't be read. */
size_t size_setting(const char *name, size_t otherwise);
long number_setting(const char *name, long otherwise);

/* 1 if the devices have no memory of their own, but use the host's (FAKE_CUDA_INTEGRATED). */
int machine_integrated(void);

/* Copies to a device at most FAKE_CUDA_COPY bytes, for models larger than the host's memory. */
void bounded_copy(void *to, const void *from, size_t bytes);
#endif
