/* libnccl.so.2: collectives in which no process hears of another. Each acts as if all ranks held what this one holds:
 * checks that all ranks agree succeed, and sums are wrong, as everything is that kernels would compute. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "machine.h"

enum { OK = 0, INVALID_ARGUMENT = 4, NO_COLOR = -1 };

struct unique_id { char bytes[128]; };
struct communicator { int ranks, rank; };

static const size_t ITEM[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* bytes, by ncclDataType_t */

int ncclGetVersion(int *version) {
    *version = 22907;
    return OK;
}

const char *ncclGetErrorString(int) { return "simulated NCCL"; }
const char *ncclGetLastError(void *) { return ""; }

/* ---- Communicators. They are never freed: torch may abort one and then destroy it. ---- */

int ncclGetUniqueId(struct unique_id *id) {
    memset(id, 7, sizeof *id);
    return OK;
}

static int make(struct communicator **made, int ranks, int rank) {
    if (ranks < 1 || rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
    *made = malloc(sizeof **made);
    **made = (struct communicator){ranks, rank};
    return OK;
}

int ncclCommInitRank(struct communicator **made, int ranks, struct unique_id, int rank) {
    return make(made, ranks, rank);
}

int ncclCommInitRankConfig(struct communicator **made, int ranks, struct unique_id, int rank, void *) {
    return make(made, ranks, rank);
}

int ncclCommInitRankScalable(struct communicator **made, int ranks, int rank, int, struct unique_id *, void *) {
    return make(made, ranks, rank);
}

int ncclCommInitAll(struct communicator **made, int devices, const int *) {
    for (int rank = 0; rank < devices; rank++) make(&made[rank], devices, rank);
    return OK;
}

/* How many ranks have this one's color is not known here: torch asks for splits of all ranks, or of one. */
int ncclCommSplit(struct communicator *whole, int color, int key, struct communicator **made, void *) {
    *made = NULL;
    return color == NO_COLOR ? OK : make(made, whole->ranks, key < whole->ranks ? key : whole->rank);
}

int ncclCommGetAsyncError(void *, int *error) {
    *error = OK;
    return OK;
}

int ncclCommCount(const struct communicator *one, int *count) {
    *count = one->ranks;
    return OK;
}

int ncclCommUserRank(const struct communicator *one, int *rank) {
    *rank = one->rank;
    return OK;
}

/* ---- Collectives ---- */

int ncclAllReduce(const void *from, void *to, size_t count, int type, int, void *, void *) {
    bounded_copy(to, from, count * ITEM[type]);
    return OK;
}

int ncclReduce(const void *from, void *to, size_t count, int type, int, int root, struct communicator *one, void *) {
    if (one->rank == root) bounded_copy(to, from, count * ITEM[type]);
    return OK;
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct communicator *one, void *) {
    if (one->rank == root) bounded_copy(to, from, count * ITEM[type]);
    return OK;
}

int ncclAllGather(const char *from, char *to, size_t count, int type, struct communicator *one, void *) {
    size_t bytes = count * ITEM[type];
    for (int rank = 0; rank < one->ranks; rank++) bounded_copy(to + (size_t)rank * bytes, from, bytes);
    return OK;
}

int ncclReduceScatter(const char *from, char *to, size_t count, int type, int, struct communicator *one, void *) {
    size_t bytes = count * ITEM[type];
    bounded_copy(to, from + (size_t)one->rank * bytes, bytes);
    return OK;
}
