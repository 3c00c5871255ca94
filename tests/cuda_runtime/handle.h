/* For libraries whose handles and descriptors only have to be other than NULL. */
#ifndef FAKE_HANDLE_H
#define FAKE_HANDLE_H
#include <stdlib.h>

#define MAKES_HANDLE(name)                 \
    int name(void **handle) {              \
        *handle = calloc(1, 256);          \
        return *handle ? 0 : 1;            \
    }
#define FREES_HANDLE(name)                 \
    int name(void *handle) {               \
        free(handle);                      \
        return 0;                          \
    }
#endif
