/* libcublas.so.13: handles. torch allocates the workspaces itself, and every product is a stub. */
#include "handle.h"

MAKES_HANDLE(cublasCreate_v2)
FREES_HANDLE(cublasDestroy_v2)

int cublasGetMathMode(void *, int *mode) {
    *mode = 0;
    return 0;
}

int cublasGetPointerMode_v2(void *, int *mode) {
    *mode = 0;
    return 0;
}
