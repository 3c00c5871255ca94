/* What the files of libcudnn.so.9 share. */
#ifndef FAKE_CUDNN_H
#define FAKE_CUDNN_H
#include <stddef.h>
#include <stdlib.h>

enum { OK = 0, MOST_DIMENSIONS = 8 };

struct tensor { int type, dimensions, sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS]; };
void set_tensor(struct tensor *one, int type, int count, const int *sizes, const int *strides);

#define DESCRIPTOR(name, type)                  \
    int cudnnCreate##name(struct type **one) {  \
        *one = calloc(1, sizeof **one);         \
        return OK;                              \
    }                                           \
    int cudnnDestroy##name(struct type *one) {  \
        free(one);                              \
        return OK;                              \
    }
#endif
