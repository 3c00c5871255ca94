/* libcudnn.so.9: descriptors, convolutions (by the graph interface) and batch normalisation, as far as their memory
 * goes. Recurrent networks are in cudnn_rnn.c.
 *
 * FAKE_CUDA_CUDNN_WORKSPACE is the workspace that every plan asks for. The real library's depends on the algorithm. */
#include <stdint.h>

#include "cudnn.h"
#include "machine.h"

size_t cudnnGetVersion(void) { return 92000; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char *cudnnGetErrorString(int status) { return status ? "simulated cuDNN: not supported" : "success"; }

void cudnnGetLastErrorString(char *text, size_t room) {
    if (room) *text = 0;
}

int cudnnGetProperty(int which, int *value) {
    static const int version[] = {9, 20, 0};
    *value = version[which];
    return OK;
}

/* A handle holds its stream. */
int cudnnCreate(void **handle) {
    *handle = calloc(1, sizeof(void *));
    return OK;
}

int cudnnSetStream(void **handle, void *stream) {
    *handle = stream;
    return OK;
}

int cudnnGetStream(void **handle, void **stream) {
    *stream = *handle;
    return OK;
}

/* ---- Descriptors that are asked for what was put into them ---- */

struct opaque { char bytes[64]; };
DESCRIPTOR(TensorDescriptor, tensor)
DESCRIPTOR(FilterDescriptor, tensor)
DESCRIPTOR(DropoutDescriptor, opaque)
DESCRIPTOR(ActivationDescriptor, opaque)
DESCRIPTOR(ConvolutionDescriptor, opaque)
DESCRIPTOR(PoolingDescriptor, opaque)

void set_tensor(struct tensor *one, int type, int count, const int *sizes, const int *strides) {
    one->type = type;
    one->dimensions = count < MOST_DIMENSIONS ? count : MOST_DIMENSIONS;
    for (int i = 0; i < one->dimensions; i++) {
        one->sizes[i] = sizes[i];
        one->strides[i] = strides ? strides[i] : 1;
    }
}

static void copy_first(int *to, const int *from, int room) {
    for (int i = 0; i < room && i < MOST_DIMENSIONS; i++) to[i] = from[i];
}

int cudnnSetTensorNdDescriptor(struct tensor *one, int type, int count, const int *sizes, const int *strides) {
    set_tensor(one, type, count, sizes, strides);
    return OK;
}

int cudnnSetFilterNdDescriptor(struct tensor *one, int type, int, int count, const int *sizes) {
    set_tensor(one, type, count, sizes, NULL);
    return OK;
}

int cudnnGetTensorNdDescriptor(const struct tensor *one, int room, int *type, int *count, int *sizes, int *strides) {
    *type = one->type;
    *count = one->dimensions;
    copy_first(sizes, one->sizes, room);
    copy_first(strides, one->strides, room);
    return OK;
}

int cudnnGetFilterNdDescriptor(const struct tensor *one, int room, int *type, int *format, int *count, int *sizes) {
    *type = one->type;
    *format = 0; /* NCHW */
    *count = one->dimensions;
    copy_first(sizes, one->sizes, room);
    return OK;
}

int cudnnDropoutGetStatesSize(void *, size_t *bytes) {
    *bytes = 0;
    return OK;
}

/* ---- Convolutions: one engine that does all, found by every heuristic ---- */

enum { HEURISTIC_RESULTS = 202, PLAN_WORKSPACE = 402 };

int cudnnBackendCreateDescriptor(int, void **one) {
    *one = calloc(1, 16);
    return OK;
}

int cudnnBackendDestroyDescriptor(void *one) {
    free(one);
    return OK;
}

int cudnnBackendFinalize(void *) { return OK; }
int cudnnBackendExecute(void *, void *, void *) { return OK; }
int cudnnBackendSetAttribute(void *, int, int, int64_t, const void *) { return OK; }

int cudnnBackendGetAttribute(void *, int name, int, int64_t room, int64_t *count, void *value) {
    if (count) *count = name == HEURISTIC_RESULTS || name == PLAN_WORKSPACE;
    if (name == PLAN_WORKSPACE && room > 0 && value) {
        *(int64_t *)value = (int64_t)size_setting("FAKE_CUDA_CUDNN_WORKSPACE", 0);
    }
    return OK;
}

/* ---- Batch normalisation keeps nothing more, and needs no workspace ---- */

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *, int, int, void *, void *, void *, void *, void *,
                                                             size_t *bytes) {
    *bytes = 0;
    return OK;
}

int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *, int, int, void *, void *, size_t *bytes) {
    *bytes = 0;
    return OK;
}

int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *, int, int, void *, void *, void *, void *, void *, void *,
                                                      void *, size_t *bytes) {
    *bytes = 0;
    return OK;
}
