/* libcusparse.so.12: torch makes its handle beside others. Its algebra is an error. */
#include "handle.h"

MAKES_HANDLE(cusparseCreate)
FREES_HANDLE(cusparseDestroy)
