/* Addresses of simulated memory, and the list of what lies where. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "cudart.h"

static struct range *ranges;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

size_t whole(size_t bytes, size_t page) { return (bytes + page - 1) / page * page; }

/* Address space without memory: the host gives a page when it is first written. Aligned to DEVICE_PAGE, as the
 * driver's addresses are. */
void *reserve(size_t bytes, int protection) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *start = mmap(NULL, bytes + DEVICE_PAGE, protection, flags, -1, 0);
    if (start == MAP_FAILED) return NULL;
    char *aligned = (char *)whole((size_t)start, DEVICE_PAGE);
    size_t before = (size_t)(aligned - start);
    if (before) munmap(start, before);
    munmap(aligned + whole(bytes, PAGE), DEVICE_PAGE - before);
    return aligned;
}

void range_add(void *base, size_t size, enum kind kind, int device, void *owner) {
    struct range *added = malloc(sizeof *added);
    *added = (struct range){base, size, kind, device, owner, NULL};
    pthread_mutex_lock(&lock);
    added->next = ranges;
    ranges = added;
    pthread_mutex_unlock(&lock);
}

bool range_remove(const void *base, struct range *removed) {
    pthread_mutex_lock(&lock);
    struct range **at = &ranges;
    while (*at && (*at)->base != base) at = &(*at)->next;
    struct range *found = *at;
    if (found) *at = found->next;
    pthread_mutex_unlock(&lock);
    if (found) *removed = *found;
    free(found);
    return found != NULL;
}

bool range_find(const void *address, struct range *found) {
    const char *byte = address;
    pthread_mutex_lock(&lock);
    struct range *at = ranges;
    while (at && (byte < at->base || byte >= at->base + at->size)) at = at->next;
    if (at) *found = *at;
    pthread_mutex_unlock(&lock);
    return at != NULL;
}
