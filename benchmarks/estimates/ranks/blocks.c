/* Counts the bytes in the blocks of torch's CPU allocator, on all threads (LD_PRELOAD).
 *
 * torch's profiler misses blocks that a thread of gloo frees. c10 asks posix_memalign for each block, and so
 * do other libraries (oneDNN): only calls from libc10 count. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS (1u << 22) /* more than the blocks that a small training has at one time */

static struct { void *block; size_t size; } slots[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t level, highest;
static int (*next_memalign)(void **, size_t, size_t);
static void (*next_free)(void *);

static unsigned slot_of(void *block) {
  unsigned at = (uint32_t)(((uintptr_t)block >> 4) * 2654435761u) % SLOTS;
  while (slots[at].block && slots[at].block != block) at = (at + 1) % SLOTS;
  return at;
}

static uintptr_t first, last; /* addresses of libc10's code and data */

static int note_range(struct dl_phdr_info *library, size_t size, void *ignored) {
  (void)size, (void)ignored;
  if (!strstr(library->dlpi_name, "libc10.so")) return 0;
  for (int at = 0; at < library->dlpi_phnum; at++)
    if (library->dlpi_phdr[at].p_type == PT_LOAD)
      last = library->dlpi_addr + library->dlpi_phdr[at].p_vaddr + library->dlpi_phdr[at].p_memsz;
  first = library->dlpi_addr;
  return 1;
}

static int is_of_torch(void *caller) {
  if (!first && !dl_iterate_phdr(note_range, NULL)) return 0;
  return first <= (uintptr_t)caller && (uintptr_t)caller < last;
}

int posix_memalign(void **block, size_t alignment, size_t size) {
  if (!next_memalign) next_memalign = dlsym(RTLD_NEXT, "posix_memalign");
  int failed = next_memalign(block, alignment, size);
  if (failed || !is_of_torch(__builtin_return_address(0))) return failed;
  pthread_mutex_lock(&lock);
  unsigned at = slot_of(*block);
  slots[at].block = *block;
  slots[at].size = size;
  level += size;
  if (level > highest) highest = level;
  pthread_mutex_unlock(&lock);
  return 0;
}

void free(void *block) {
  if (!next_free) next_free = dlsym(RTLD_NEXT, "free");
  if (block && !((uintptr_t)block & 63)) { /* c10's blocks begin at multiples of 64 */
    pthread_mutex_lock(&lock);
    unsigned at = slot_of(block);
    if (slots[at].block) {
      level -= slots[at].size;
      /* The slots behind it may have been moved there by this one. */
      slots[at].block = NULL;
      for (unsigned next = (at + 1) % SLOTS; slots[next].block; next = (next + 1) % SLOTS) {
        void *moved = slots[next].block;
        size_t size = slots[next].size;
        slots[next].block = NULL;
        unsigned to = slot_of(moved);
        slots[to].block = moved;
        slots[to].size = size;
      }
    }
    pthread_mutex_unlock(&lock);
  }
  next_free(block);
}

size_t torch_blocks_level(void) { return level; }

/* Returns the highest level since the last call, and begins anew. */
size_t torch_blocks_peak(void) {
  pthread_mutex_lock(&lock);
  size_t found = highest;
  highest = level;
  pthread_mutex_unlock(&lock);
  return found;
}
