/* libfake_machine.so: see machine.h. */
#define _GNU_SOURCE
#include "machine.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- Settings ---- */

size_t size_setting(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    char *end;
    if (!text || !*text) return otherwise;
    double value = strtod(text, &end);
    if (end == text || value < 0) return otherwise;
    while (*end == ' ') end++;
    switch (tolower((unsigned char)*end)) {
    case 't': value *= 1024; /* fall through */
    case 'g': value *= 1024; /* fall through */
    case 'm': value *= 1024; /* fall through */
    case 'k': value *= 1024;
    }
    return (size_t)value;
}

long number_setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 10) : otherwise;
}

void bounded_copy(void *to, const void *from, size_t bytes) {
    size_t most = size_setting("FAKE_CUDA_COPY", (size_t)-1);
    if (to != from) memmove(to, from, bytes < most ? bytes : most);
}

/* ---- Devices ---- */

int machine_devices(void) {
    long count = number_setting("FAKE_CUDA_DEVICES", 1);
    return count < 0 ? 0 : count > MOST_DEVICES ? MOST_DEVICES : (int)count;
}

int machine_integrated(void) { return number_setting("FAKE_CUDA_INTEGRATED", 0) != 0; }

/* FAKE_CUDA_MEMORY is the size of every device; FAKE_CUDA_MEMORY_1 that of device 1. */
size_t machine_total(int device) {
    char name[32];
    snprintf(name, sizeof name, "FAKE_CUDA_MEMORY_%d", device);
    return size_setting(name, size_setting("FAKE_CUDA_MEMORY", (size_t)16 << 30));
}

void uuid_text(int device, char text[41]) {
    snprintf(text, 41, "GPU-fa4ec0da-0000-4000-8000-%012x", (unsigned)device);
}

/* ---- What the processes share ----
 *
 * The file has an entry for each process. A process holds a record lock (fcntl) on one byte of the file from the
 * moment it takes an entry until it ends: the kernel drops such a lock when the process ends in whatever way, even as
 * a zombie, and a forked child has none of its parent's. So what a dead process used is free again, as the driver
 * would see to, and a process that gets a dead one's number inherits nothing. */

struct process {
    int pid; /* 0: the entry is free */
    bool entered[MOST_DEVICES];
    size_t used[MOST_DEVICES];
};

static const off_t WHOLE_STATE = MOST_PROCESSES; /* this byte is locked while the entries are read or changed */

static struct process *processes;
static int state_file = -1;
static int own_index = -1;
static int own_pid;
static pthread_once_t opened = PTHREAD_ONCE_INIT;
/* A record lock does not tell the threads of a process apart. */
static pthread_mutex_t among_threads = PTHREAD_MUTEX_INITIALIZER;

static void before_fork(void) { pthread_mutex_lock(&among_threads); }
static void after_fork(void) { pthread_mutex_unlock(&among_threads); }

static void open_state(void) {
    const size_t size = MOST_PROCESSES * sizeof(struct process);
    const char *given = getenv("FAKE_CUDA_STATE");
    char path[256];
    if (given && *given) {
        snprintf(path, sizeof path, "%s", given);
    } else {
        snprintf(path, sizeof path, "/dev/shm/fake-cuda-%u", (unsigned)getuid());
    }
    pthread_atfork(before_fork, after_fork, after_fork);
    state_file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (state_file >= 0 && ftruncate(state_file, (off_t)size) == 0) {
        processes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, state_file, 0);
    }
    if (!processes || processes == MAP_FAILED) {
        fprintf(stderr, "fake CUDA: no shared state in %s (%s): other processes are not seen\n", path, strerror(errno));
        processes = calloc(MOST_PROCESSES, sizeof(struct process));
        if (!processes) abort();
    }
}

static void lock_byte(off_t byte, short type, int command) {
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    while (state_file >= 0 && fcntl(state_file, command, &lock) < 0 && errno == EINTR) {}
}

static void lock_state(void) {
    pthread_once(&opened, open_state);
    pthread_mutex_lock(&among_threads);
    lock_byte(WHOLE_STATE, F_WRLCK, F_SETLKW);
}

static void unlock_state(void) {
    lock_byte(WHOLE_STATE, F_UNLCK, F_SETLK);
    pthread_mutex_unlock(&among_threads);
}

/* The functions from here to `leave` are called with the state locked. */

static struct process *own_entry(void) {
    return own_index >= 0 && own_pid == getpid() ? &processes[own_index] : NULL;
}

static bool lives(int index) {
    if (&processes[index] == own_entry()) return true; /* a process does not see its own locks */
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = index, .l_len = 1};
    return state_file >= 0 && fcntl(state_file, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

static void forget_the_dead(void) {
    for (int i = 0; i < MOST_PROCESSES; i++) {
        if (processes[i].pid && !lives(i)) memset(&processes[i], 0, sizeof processes[i]);
    }
}

static struct process *entry_of_this_process(void) {
    if (own_entry()) return own_entry();
    for (int i = 0; i < MOST_PROCESSES; i++) {
        if (processes[i].pid) continue;
        own_index = i;
        own_pid = processes[i].pid = getpid();
        lock_byte(i, F_WRLCK, F_SETLK);
        return &processes[i];
    }
    fprintf(stderr, "fake CUDA: more than %d processes use the devices\n", MOST_PROCESSES);
    return NULL;
}

static size_t used_now(int device) {
    size_t sum = 0;
    forget_the_dead();
    for (int i = 0; i < MOST_PROCESSES; i++) sum += processes[i].used[device];
    return sum;
}

__attribute__((destructor)) static void leave(void) {
    if (!processes) return;
    lock_state();
    struct process *own = own_entry();
    if (own) memset(own, 0, sizeof *own);
    own_index = -1;
    unlock_state();
}

size_t machine_used(int device) {
    lock_state();
    size_t used = used_now(device);
    unlock_state();
    return used;
}

int machine_processes(int device, struct usage *found, int room) {
    int count = 0;
    lock_state();
    forget_the_dead();
    for (int i = 0; i < MOST_PROCESSES; i++) {
        if (!processes[i].entered[device]) continue;
        if (count < room) found[count] = (struct usage){(unsigned)processes[i].pid, processes[i].used[device]};
        count++;
    }
    unlock_state();
    return count;
}

void machine_enter(int device) {
    lock_state();
    forget_the_dead();
    struct process *own = entry_of_this_process();
    if (own) own->entered[device] = true;
    unlock_state();
}

bool machine_take(int device, size_t bytes) {
    lock_state();
    size_t used = used_now(device), total = machine_total(device);
    struct process *own = used <= total && bytes <= total - used ? entry_of_this_process() : NULL;
    if (own) own->used[device] += bytes;
    unlock_state();
    return own != NULL;
}

void machine_give(int device, size_t bytes) {
    lock_state();
    struct process *own = own_entry(); /* none in a forked child: the memory is its parent's */
    if (own) own->used[device] -= bytes <= own->used[device] ? bytes : own->used[device];
    unlock_state();
}
